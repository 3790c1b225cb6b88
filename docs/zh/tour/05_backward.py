# %% [markdown]
# # 05. 反向，以及怎样做性能剖析
#
# 学完本课，你能在一页纸上推导出注意力的梯度；能写出自己的内核 (kernel)，不存矩阵就算出梯度；能对照
# FlashAttention 论文里的表，算清训练搬运的每个字节和执行的每次运算；还能用两种性能剖析器 (profiler)
# 找出是什么拖住了内核。
#
# 你需要第 04 课：它的前向留下了 O 和 lse，后者是每行所除之和的对数。

# %%
import contextlib
import csv
import math
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show
from torch.profiler import ProfilerActivity, profile

import tilewise
from tilewise.testing import build, stats, use_interpreter
from tilewise.testing.tolerance import assert_within

figures = Figures("05_backward")
torch.manual_seed(0)

# %% [markdown]
# ## 梯度
#
# 记 S = scale · Q Kᵀ，P = softmax(S)，O = P V。训练给出 dO，即损失对 O 中每个数的梯度；要求的是
# dQ、dK 和 dV。乘积 Y = A B 把梯度传给两边：dA = dY Bᵀ，dB = Aᵀ dY。除了 softmax，其余就都有了：
#
#     dV = Pᵀ dO        dP = dO Vᵀ        dQ = scale · dS K        dK = scale · dSᵀ Q
#
# 对一行的 softmax，∂p_j/∂s_i 在 i = j 时是 p_i (1 - p_i)，否则是 -p_i p_j：一个分数升高，
# 就从所有其他分数那里拿走权重。所以 ds_i = p_i (dp_i - Σ_j p_j dp_j)。这个和每行只有一个数，记作
# delta。看上去它需要整行，但是
#
#     delta = Σ_j p_j dp_j = Σ_j p_j Σ_c do_c v_jc = Σ_c do_c Σ_j p_j v_jc = Σ_c do_c o_c
#
# 所以 delta = rowsum(dO ∘ O)，由两个张量求出，而它们在第一个分块 (tile) 之前就已经有了。于是
# dS = P ∘ (dP - delta) 只涉及单个分块。六行 torch，与 autograd 对照：


# %%
def backward_by_hand(q, k, v, dout, causal):
    """dq, dk, dv of one head in plain torch, (seqlen, headdim) each."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.T
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -math.inf)
    p = torch.softmax(s, -1)
    dv = p.T @ dout
    dp = dout @ v.T
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    return scale * ds @ k, scale * ds.T @ q, dv


q, k, v, dout = torch.randn(4, 50, 16, dtype=torch.float64).unbind(0)
leaves = [x.requires_grad_() for x in (q, k, v)]
out = F.scaled_dot_product_attention(*(x[None, None] for x in leaves), is_causal=True)[0, 0]
by_autograd = torch.autograd.grad(out, leaves, dout)
with torch.no_grad():
    by_hand = backward_by_hand(q, k, v, dout, causal=True)
worst = max((a - b).abs().max().item() for a, b in zip(by_hand, by_autograd))
print(f"by hand and by autograd, fp64: they differ by {worst:.1e}")
assert worst < 1e-13

# %% [markdown]
# ## 重算，而不是存储
#
# 上面每一行都需要 P。autograd 从前向起就存着它，每个头 seqlen² 个数，现在再读回来。FlashAttention
# 丢掉 P，再算一遍：一个分块一个分块地重新计算 S = Q Kᵀ，然后 P = exp(S - lse)。有了 lse，
# 分块不需要最大值、求和或重缩放 (rescale)：P 的一个分块算出来就是最终结果。代价是多一次矩阵乘，
# 换来的是少搬 O(seqlen²) 字节；GPU 缺的是哪一样，第 04 课的账本已经说了。
#
# 循环同样有两种嵌套方式。dV_j 和 dK_j 是对查询求和，dQ_i 是对键求和：谁拥有一块键，谁就能把 dK 和
# dV 留在寄存器里，而 dQ 要从每个拥有者那里各得一份。FlashAttention-2（算法 2）让每个程序 (program)
# 负责一块键，用原子操作 (atomic) 往显存中的 dQ 上累加。写成内核：


# %%
@triton.jit
def backward_kernel(
    inputs, of_row, grads, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    q, k, v, dout = inputs  # contiguous (batch, nheads, seqlen, headdim)
    lse, delta = of_row
    dq, dk, dv = grads
    n_start, head = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    first = head * seqlen * D
    k_idx, offs_d = n_start + tl.arange(0, BLOCK_N), tl.arange(0, D)[None, :]
    is_key = (k_idx < seqlen)[:, None]
    of_keys = first + k_idx[:, None] * D + offs_d
    k_tile = tl.load(k + of_keys, mask=is_key, other=0.0)
    v_tile = tl.load(v + of_keys, mask=is_key, other=0.0)
    acc_dk = tl.zeros([BLOCK_N, D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, D], tl.float32)

    start = n_start // BLOCK_M * BLOCK_M if CAUSAL else 0  # no query before it sees these keys
    for m_start in range(start, seqlen, BLOCK_M):
        q_idx = m_start + tl.arange(0, BLOCK_M)
        is_row = q_idx < seqlen
        of_rows = first + q_idx[:, None] * D + offs_d
        q_tile = tl.load(q + of_rows, mask=is_row[:, None], other=0.0)
        do_tile = tl.load(dout + of_rows, mask=is_row[:, None], other=0.0)
        row_lse = tl.load(lse + head * seqlen + q_idx, mask=is_row, other=0.0)
        row_delta = tl.load(delta + head * seqlen + q_idx, mask=is_row, other=0.0)

        # P = exp(S - lse): (BLOCK_M, BLOCK_N)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        p = tl.exp2((s - row_lse[:, None]) * 1.4426950408889634)  # log2(e)
        keep = is_row[:, None] & (k_idx < seqlen)[None, :]
        if CAUSAL:
            keep = keep & (q_idx[:, None] >= k_idx[None, :])
        p = tl.where(keep, p, 0.0)
        # dV += P^T dO
        acc_dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, acc_dv)
        # dS = P (dP - delta), dP = dO V^T
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = (p * (dp - row_delta[:, None])).to(q_tile.dtype)
        # dK += dS^T Q, dQ += dS K
        acc_dk = tl.dot(tl.trans(ds), q_tile, acc_dk)
        tl.atomic_add(dq + of_rows, tl.dot(ds, k_tile) * scale, mask=is_row[:, None])
    tl.store(dk + of_keys, (acc_dk * scale).to(k_tile.dtype), mask=is_key)
    tl.store(dv + of_keys, acc_dv.to(k_tile.dtype), mask=is_key)


def lesson_backward(q, k, v, dout, causal, tile=(64, 64)):
    """dq, dk, dv of contiguous (batch, nheads, seqlen, headdim), by recomputation."""
    batch, nheads, seqlen, headdim = q.shape
    out, lse = tilewise.attention(q, k, v, causal=causal, layout="bhsd", return_lse=True)
    delta = (dout.float() * out.float()).sum(-1)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # many add to it
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    here(backward_kernel)[(triton.cdiv(seqlen, tile[1]), batch * nheads)](
        *((q, k, v, dout), (lse, delta), (dq, dk, dv), seqlen, headdim**-0.5),
        *(headdim, *tile, causal),
        num_warps=8 if headdim > 64 else 4,
        num_stages=2,
    )
    return dq.to(q.dtype), dk, dv


# %% [markdown]
# 检验梯度的办法与第 04 课相同：看它与 fp64 的距离，并与同样精度的普通 torch 相比，后者存储
# P，也因此对它做了舍入。


# %%
def standard_attention(q, k, v, causal, dropout_p=0.0):
    """With its matrices in memory, and autograd's backward."""
    s = q * q.shape[-1] ** -0.5 @ k.mT
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    p = torch.softmax(s, -1)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ v


def gradients(attend, q, k, v, dout, **how):
    """What autograd makes of a forward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*leaves, **how), leaves, dout)


def check(name, backward, q, k, v, dout):
    """Holds dq, dk and dv to fp64, full and causal."""
    for causal in (False, True):
        wide = (x.double() for x in (q, k, v, dout))
        exact = gradients(standard_attention, *wide, causal=causal)
        plain = gradients(standard_attention, q, k, v, dout, causal=causal)
        line = []
        for what, got, right, usual in zip(("dq", "dk", "dv"), backward(causal), exact, plain):
            assert_within(got, right, usual, f"{what} of {name}")
            off, torchs = ((x.double() - right).abs().max().item() for x in (got, usual))
            line.append(f"{what} off by {off:.4f} (torch {torchs:.4f})")
        print(f"{name}, {'causal' if causal else 'full'}: {', '.join(line)}")


inputs = torch.randn(4, 1, 2, 150, 64).to(DEVICE, torch.bfloat16).unbind(0)
check("the lesson's kernel", lambda causal: lesson_backward(*inputs, causal), *inputs)

# %% [markdown]
# ## 本库的内核
#
# FA2 用一个内核的地方，`tilewise.kernels.portable` 用两个。`bwd_dkdv`
# 是上面的内核去掉最后一次矩阵乘。`bwd_dq` 让每个程序负责一个查询块，像前向那样遍历键，把 S 和 dP
# 再算一遍。所以每个分块有七次矩阵乘，而不是五次。任何两个程序都不会往同一处累加：没有原子操作，没有
# dQ 的 fp32 副本；浮点求和的结果取决于次序，而这里次序固定，所以每次运行的结果逐位相同。本库的
# Hopper 内核（`tilewise/kernels/hopper/bwd/*.py`）是另一种做法，五次。
#
# 这两个内核你都不必自己调用：前向为 autograd 留下 q、k、v、out 和 lse，反向时由 autograd 运行它们。


# %%
def portable_gradients(causal):
    """The library's Triton kernels: compiled on a GPU, else in the interpreter."""
    with contextlib.nullcontext() if ON_GPU else use_interpreter():
        how = dict(causal=causal, layout="bhsd", backend="portable")
        return gradients(tilewise.attention, *inputs, **how)


check("tilewise, portable", portable_gradients, *inputs)

# %% [markdown]
# 对编译器来说，一个分块的开销有多大？反向要同时保存 S、dP 和两个累加器 (accumulator)。为 H200
# 编译，headdim 64，4 个 warp，分块分别为 64 x 64 和 128 x 128：

# %%
x, row = torch.empty(1, 1, 4096, 64, dtype=torch.bfloat16), torch.empty(1, 1, 4096)
arguments = (x, x, x, x), (row, row), (torch.empty(1, 1, 4096, 64), x, x), 4096, 0.125
for side in (64, 128):
    meta = dict(D=64, BLOCK_M=side, BLOCK_N=side, CAUSAL=True, num_warps=4, num_stages=2)
    needs = stats(build(backward_kernel, *arguments, on="sm90", **meta))
    line = f"{needs['registers']} registers a thread, {needs['smem'] >> 10} KiB of shared memory"
    print(f"{side} x {side}: {line}, {needs['spill_stores']} bytes spilled")

# %% [markdown]
# 255 个寄存器装不下的就会溢出 (spill)：写到显存，再读回来。内核慢的时候，首先就要看它。
#
# ## 算账
#
# FlashAttention 论文里有一张 GPT-2 medium 的表（seqlen 1024，headdim 64，16 个头，批次 64，一块
# A100），前向与反向合计。我们来试着把表中的数数出来。
#
# **标准注意力的字节数。** 每一步读写的是 seqlen² 的矩阵和 seqlen x headdim 的张量，每个数 2
# 字节；dropout 保存的掩码每个元素 1 字节，算半个矩阵。

# %%
PAPER = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}  # GFLOP, GB, ms
HEADS, SEQLEN, HEADDIM = 64 * 16, 1024, 64
MATRIX, TENSOR = 2 * HEADS * SEQLEN**2, 2 * HEADS * SEQLEN * HEADDIM  # bytes
MATMUL = 2 * HEADS * SEQLEN**2 * HEADDIM  # FLOPs

STANDARD = {  # step: (matrices, tensors) read or written, matmuls
    "S = Q Kᵀ": (1, 2, 1),
    "mask": (2, 0, 0),
    "softmax": (2, 0, 0),
    "dropout": (2.5, 0, 0),
    "O = P V": (1, 2, 1),
    "dV = Pᵀ dO": (1, 2, 1),
    "dP = dO Vᵀ": (1, 2, 1),
    "dropout's": (2.5, 0, 0),
    "softmax's": (3, 0, 0),  # reads P and dP, writes dS; the mask's gradient is 0 in it
    "dQ = dS K": (1, 2, 1),
    "dK = dSᵀ Q": (1, 2, 1),
}
moved = {step: m * MATRIX + t * TENSOR for step, (m, t, _) in STANDARD.items()}
matrices, tensors, matmuls = (sum(x) for x in zip(*STANDARD.values()))
standard_gb = sum(moved.values()) / 1e9
print(f"standard: {matrices} matrices and {tensors} tensors are {standard_gb:.1f} GB")
assert round(standard_gb, 1) == PAPER["standard"][1]

# %% [markdown]
# 这正是论文里的数。（论文没有说是怎样数的，别的数法也可能得到它。）
#
# **FlashAttention 的字节数。** K 和 V 在外层循环，前向就把 K 和 V 读一次，并在 T 次遍历中每次读
# Q 和 O、写 O。反向读 K 和 V、写 dK 和 dV 各一次，并在每次遍历中读 Q、O、dO 和 dQ，写
# dQ：总共 6 + 8 T 个张量。按第 04 课取块大小的规则，在 A100 上要遍历四次。FlashAttention-2
# 的次序会把每个张量按分块读很多遍，但一个头的 K 和 V 只有 256 KiB：第一遍之后，它们就在 L2
# 缓存里了。必须来自 HBM 的，只是每个内核把自己要用的张量各读一次。

# %%
fa1_gb = (6 + 8 * 4) * TENSOR / 1e9
portable = {"forward": 4, "delta": 2, "dK, dV": 6, "dQ": 5}  # tensors each kernel reads and writes
portable_gb = sum(portable.values()) * TENSOR / 1e9
flops = {"standard": matmuls, "FlashAttention, 1 and 2": 7, "tilewise, portable": 9}
print(f"{'':24} {'GFLOP':>7} {'of 64 heads':>12} {'GB':>6}")
for (name, count), gb in zip(flops.items(), (standard_gb, fa1_gb, portable_gb)):
    of_64 = count * MATMUL / 16 / 1e9
    print(f"{name:24} {count * MATMUL / 1e9:7.1f} {of_64:12.1f} {gb:6.1f}")
for name, (gflop, gb, ms) in PAPER.items():
    print(f"the paper's {name:15} {gflop:17.1f} {gb:9.1f}   {ms} ms on an A100")
assert round(MATMUL / 16 / 1e9, 1) == round(PAPER["FlashAttention"][0] - PAPER["standard"][0], 1)

# %% [markdown]
# **运算次数。** 这里，论文的表令人费解。64 x 16 个头的六次矩阵乘，是表中 66.6 GFLOP
# 的十倍以上。但两行之差 8.6，恰好是 64 个头的一次矩阵乘：重算的那次 S。所以字节数与全部 1024
# 个头吻合，运算次数与其中 64 个头吻合，另外两行都有 15 GFLOP 不是矩阵乘。我们不知道那是怎样数的；
# 这里数的是所有头的矩阵乘。对会跳过块的内核，因果掩码让工作量减半；这些数都没有计入这一点。
#
# 不论怎样，这张表的结论都成立：**FlashAttention 算得更多，却更快**，因为它只搬运十分之一。
# 对等待显存的内核，拿运算次数当代价是错的。
#
# 在本课的 GPU 上，同样的形状，带因果掩码与 dropout，前向加反向：

# %%
GPT2 = dict(batch=64, nheads=16, seqlen=SEQLEN, headdim=HEADDIM, causal=True, dropout_p=0.1)


def trainings():
    """name -> forward and backward. For a GPU."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    qkv_dout = torch.randn(4, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    own = dict(causal=True, dropout_p=0.1, layout="bhsd")
    sdpa = F.scaled_dot_product_attention
    return {
        "standard": lambda: gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1),
        "SDPA": lambda: gradients(sdpa, *qkv_dout, is_causal=True, dropout_p=0.1),
        "portable": lambda: gradients(tilewise.attention, *qkv_dout, backend="portable", **own),
        "tilewise": lambda: gradients(tilewise.attention, *qkv_dout, **own),
    }


NAMES = ["standard", "SDPA", "portable", "tilewise"]
train_ms = figures.times(GPT2, trainings() if ON_GPU else dict.fromkeys(NAMES), rounds=3)

fig, (ax, ax_ms) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(3, 2))
gb_of = {"standard": standard_gb, "paper:\nstandard": PAPER["standard"][1]}
gb_of |= {"FA1 by\nformula": fa1_gb, "paper:\nFA1": PAPER["FlashAttention"][1]}
gb_of |= {"portable,\nat least": portable_gb}
ms_of = {
    "paper:\nstandard": PAPER["standard"][2],
    "paper:\nFA1": PAPER["FlashAttention"][2],
}
for axes, of, unit in ((ax, gb_of, "GB from and to HBM"), (ax_ms, ms_of | train_ms, "ms")):
    hatches = ["//" if "paper" in name else "" for name in of]
    axes.bar(of.keys(), of.values(), color="white", edgecolor="black", hatch=hatches)
    for place, value in enumerate(of.values()):
        axes.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel(f"{unit}, forward and backward")
    axes.tick_params(axis="x", labelsize=6.5)
bottom = 0.0
for step, size in moved.items():  # what the first bar is made of
    ax.bar("standard", size / 1e9, bottom=bottom, color="none", edgecolor="black", linewidth=0.5)
    ax.text(0, bottom + size / 2e9, step, ha="center", va="center", fontsize=6)
    bottom += size / 1e9
ax_ms.set_title(f"hatched: the paper's A100\nothers: {figures.machine}", fontsize=6)
fig.suptitle("GPT-2 medium, the attention of one layer, batch 64", fontsize=10)
fig.tight_layout()
show(fig, "05_account")

# %% [markdown]
# ## 性能剖析，第一遍：是哪个内核？
#
# `torch.profiler` 擅长回答一个问题：哪些操作花了时间，多少次，多久。它不用来看内核内部。
# 先预热，免得把编译算进去；再剖析几次调用，按 *self* 时间排序，它不包括该操作所调用的其他操作。
# 下面剖析的是标准注意力，就在运行本课的机器上，不论那是什么机器：CPU 与 GPU 的排序不一样，CPU 生成
# dropout 的随机数很慢。要找的有两样：搬运数据却几乎不计算的操作（拷贝、掩码、dropout）；在 GPU
# 上还有内核之间的空隙，那里是主机启动得太慢。`prof.export_chrome_trace("t.json")` 导出的文件可以在
# Perfetto 里按时间轴查看这些。

# %%
seqlen = 1024 if ON_GPU else 256
qkv_dout = torch.randn(4, 4, 8, seqlen, 64, device=DEVICE, dtype=torch.bfloat16).unbind(0)
activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1)  # warm up
with profile(activities=activities) as prof:
    gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1)
clock = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
events = sorted(prof.key_averages(), key=lambda event: -getattr(event, clock))
total = sum(getattr(event, clock) for event in events)
print(f"one forward and backward of standard attention on this {DEVICE}")
for event in events[:8]:
    share = 100 * getattr(event, clock) / total
    print(f"{share:5.1f} %  {event.count:3} x  {event.key[:70]}")

# %% [markdown]
# ## 第二遍：这个内核为什么慢？
#
# Nsight Compute（`ncu`）读取硬件的计数器。它把一次启动运行很多遍，每组计数器一遍，
# 所以只给它一个内核的一次启动。`-k` 指定名字，`--launch-skip` 跳过预热，`--set full` 为查看器
# `ncu-ui` 收集全部内容：
#
#     ncu --set full -k regex:attn_fwd_kernel --launch-skip 2 --launch-count 1 -o fwd python mine.py
#
# 它需要访问计数器的权限：root，或者由管理员放行（报错的名字是 ERR_NVGPUCTRPERM）。
# 没有查看器时，可以只查单项指标。关于一个注意力内核该说的，下面十项说出了大半；
# 这个单元格读取的是本库可移植前向内核在上述形状下的指标。它们是事先记录的数据，除非你在 GPU 上用
# TILEWISE_NCU=1 运行。

# %%
COUNTERS = {
    "gpu__time_duration.sum": "ns; under the profiler, caches flushed: not for comparing speed",
    "dram__bytes_read.sum": "bytes from HBM: beside your formula. Far more: L2 did not hold it",
    "dram__bytes_write.sum": "bytes to HBM: O and lse. More: spills, or a tensor too many",
    "lts__t_sector_hit_rate.pct": "% of the L2 cache's accesses that it could answer",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of HBM's best: near 80, memory bounds",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "% the matmul units work",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the busiest unit of the processors",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps there: low is fine in matmuls",
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct": "% waiting for a plain load",
    "launch__registers_per_thread": "at 255, look for spills in the compiler's log",
}
PROGRAM = """
import torch, tilewise
q, k, v = torch.randn(3, 64, 16, 1024, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
tilewise.attention(q, k, v, causal=True, layout="bhsd", backend="portable")
"""


def read_counters(program, kernel):
    """metric -> value of the first launch of `kernel`, by ncu."""
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(COUNTERS), "-k", f"regex:{kernel}", "--launch-count", "1"]
    said = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True)
    rows = list(csv.DictReader(x for x in said.stdout.splitlines() if x.startswith('"')))
    if not rows:
        raise RuntimeError(f"ncu counted nothing: {said.stdout[-500:]}{said.stderr[-500:]}")
    return {row["Metric Name"]: as_number(row["Metric Value"]) for row in rows}


def as_number(text):
    """A counter's value, nan where this GPU does not have it."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


counted = {}
if ON_GPU and os.environ.get("TILEWISE_NCU"):
    counted = read_counters(PROGRAM, "attn_fwd_kernel")
launch = dict(kernel="attn_fwd_kernel", batch=64, nheads=16, seqlen=1024, headdim=64, causal=True)
for name, meaning in COUNTERS.items():
    if ON_GPU and math.isnan(counted.get(name, math.nan)):
        number = None
    else:
        number = figures.value(launch, name, lambda name=name: counted[name])
    shown = "not recorded" if number is None else f"{number:,.1f}"
    print(f"{name}\n    {shown:>15}  {meaning}")

# %% [markdown]
# 怎样读它们。先做预测：字节数按上面的账，FLOP 数按公式，各除以这块卡的峰值。
# 然后必是以下四种情形之一。
#
# - **HBM 接近峰值。** 内核受显存限制。把字节数与公式相比：如果相等，只有搬运更少的算法才有用；
#   如果不等，就找出谁把什么读了两遍。
# - **矩阵乘单元接近峰值。** 已经做到头了；要不就是在计算掩码会丢掉的东西。
# - **都不是，停顿在加载上。** 这是延迟：加载开始得太晚。流水线多几级 (stage)，用更大的分块，或者用
#   TMA（第 07 课）。
# - **都不是，也没有停顿在加载上。** 在注意力里，这就是 softmax：指数与重缩放拖住了矩阵乘。
#   减少运算（第 04 课），或者让一个 warpgroup 做矩阵乘，同时另一个算指数（第 07
#   课）。要不就是程序太少：把分块数与处理器数比一比。
#
# **检查清单，请按顺序。** 越靠前越省事。
#
# 1. 就在这个形状上，结果对吗？错误的内核，耗时没有意义。
# 2. 计时方法对吗：预热过，用设备上的事件计时，清空缓存，与对比对象交替运行，取几轮的中位数，
#    并给出离散程度？每一轮都排在同一个内核之后吗？在 H200 上，同一个内核用两个名字计时，
#    因所跟随的内核不同，相差可达 4.5 %；很可能是慢的内核留下了功率余量，卡就给下一个更高的时钟。
# 3. 真的是这个内核吗？用 torch.profiler 看它占总时间的比例。
# 4. 主机跟得上吗？不到 20 µs 的内核往往在等待启动。
# 5. 数据类型：操作数 bf16 或 fp16，累加器 fp32。操作数是 fp32，矩阵乘单元就慢。
# 6. 寄存器与溢出：运行之前，先从编译器那里看。
# 7. 分块、warp 数、级数：按形状实测，不要猜。
# 8. 程序够不够分给所有处理器，最后一波 (wave) 是不是几乎空着。
# 9. 实测的字节数与公式的字节数对照；最后一维连续；16 字节对齐。
# 10. 跳过的工作：被遮住的块跳过了吗，完整块免去掩码了吗？
#
# ## 练习
#
# **1. dS 的行。** 从公式和数值两方面说明：dS 每一行之和为 0。关于“给所有键加上同一个向量”，
# 这说明了什么？
#
# <details><summary>答案</summary>
#
# ```python
# # rowsum(P (dP - delta)) = rowsum(P dP) - delta rowsum(P) = delta - delta = 0.
# # Adding u to all keys adds q u to all scores of a row: softmax is not changed by that,
# # so the loss is not, and the gradient along that direction must be 0.
# q, k, v, dout = torch.randn(4, 40, 16, dtype=torch.float64).unbind(0)
# p = torch.softmax(q @ k.T / 4, -1)
# ds = p * (dout @ v.T - (dout * (p @ v)).sum(-1, keepdim=True))
# print(f"largest row sum of dS: {ds.sum(-1).abs().max():.1e}")
# assert ds.sum(-1).abs().max() < 1e-13
# u = torch.randn(16, dtype=torch.float64)
# moved_keys = torch.softmax(q @ (k + u).T / 4, -1)
# assert (moved_keys - p).abs().max() < 1e-13
# ```
# </details>
#
# **2. dropout。** 设矩阵 Z 在保留权重之处为 1 / (1 - p)，其余为 0，那么前向是 O = (P ∘ Z) V。在
# `backward_by_hand` 里找出四个地方，看它们变还是不变。delta 还是 rowsum(dO ∘ O) 吗？（Z
# 也不必存储：`tilewise/tile/dropout.py` 用种子和下标重新生成它。）
#
# <details><summary>答案</summary>
#
# ```python
# q, k, v, dout = torch.randn(4, 40, 16, dtype=torch.float64).unbind(0)
# z = (torch.rand(40, 40, dtype=torch.float64) < 0.9) / 0.9
# leaves = [x.requires_grad_() for x in (q, k, v)]
# out = (torch.softmax(q @ k.T / 4, -1) * z) @ v
# expected = torch.autograd.grad(out, leaves, dout)
# with torch.no_grad():
#     p = torch.softmax(q @ k.T / 4, -1)
#     dv = (p * z).T @ dout  # 1: the weights that were used
#     dp = z * (dout @ v.T)  # 2: a dropped weight has no gradient
#     delta = (dout * out).sum(-1, keepdim=True)  # 3: as before, with the O of the forward
#     ds = p * (dp - delta)  # 4: as before, with the P from before dropout
#     found = ds @ k / 4, ds.T @ q / 4, dv
# assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected))
# ```
# </details>
#
# 还可以在内核上试试：从中去掉 dQ，再像本库那样写第二个内核，每个查询块一个程序。
# 然后把两个版本各运行两次，逐位比较。
