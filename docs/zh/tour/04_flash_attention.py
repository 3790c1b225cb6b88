# %% [markdown]
# # 04. FlashAttention：前向
#
# 学完本课，你能一步一步、按字节说清标准注意力的时间花在哪里；能把 FlashAttention-1
# 的前向写成内核 (kernel)，并说明块的大小怎样由片上内存的大小决定；能用三处改动把它变成
# FlashAttention-2，并算出每处改动省下了什么；还能读懂本库自己的前向内核。
#
# 你需要第 02 课的分块矩阵乘和第 03 课的在线 softmax。

# %%
import contextlib
import inspect
import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

import tilewise
from tilewise.kernels.portable.step import attend
from tilewise.testing import SMEM_LIMIT, build, stats, use_interpreter
from tilewise.testing.tolerance import assert_within

figures = Figures("04_flash_attention")
torch.manual_seed(0)

# %% [markdown]
# ## 标准注意力，时间花在哪里
#
# 注意力让每个查询与每个键相比较，把分数变成权重，再用权重对值求平均：S = Q Kᵀ / √d，P =
# softmax(S)，O = P V。语言模型还要遮住未来的键（因果掩码），训练时还会丢掉一部分权重（dropout）。在
# torch 里这是五次调用。


# %%
def standard_attention(q, k, v, causal, dropout_p=0.0):
    """Attention with its matrices in memory. All tensors are (batch, nheads, seqlen, headdim)."""
    s = q * q.shape[-1] ** -0.5 @ k.mT  # (batch, nheads, seqlen, seqlen)
    if causal:
        s = s.masked_fill(future(s), float("-inf"))
    p = torch.softmax(s, -1)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ v


def future(s):
    """True where the key comes after the query."""
    return torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)


# %% [markdown]
# 每次调用各是一个内核，内核之间通过 HBM（芯片旁边的大容量显存）交接数据。
# 所以每个内核都要读入前一个写出的矩阵，再写出自己的。下面的账本以 bf16 计，两边都记：算了多少，
# 搬了多少。
#
# 最后两列各除以 H200 的峰值，取自数据手册：bf16 稠密矩阵乘 989 TFLOP/s，HBM 带宽 4.8 TB/s。
# 哪个耗时更长，这一步就受哪个限制。形状取自 GPT-2 medium，批次为 64。


# %%
def ledger(problems, seqlen, headdim):
    """(step, FLOPs, bytes) of `problems` heads; a bf16 number has 2 bytes, a mask's bit 1."""
    pairs, rows = problems * seqlen**2, problems * seqlen * headdim
    return [
        ("matmul Q Kᵀ", 2 * pairs * headdim, 2 * (2 * rows + pairs)),
        ("mask", pairs, 2 * (pairs + pairs)),
        ("softmax", 5 * pairs, 2 * (pairs + pairs)),  # max, subtract, exp, sum, divide
        ("dropout", 2 * pairs, 2 * (pairs + pairs) + pairs),  # and what was kept, for the backward
        ("matmul P V", 2 * pairs * headdim, 2 * (pairs + 2 * rows)),
    ]


FLOPS, BANDWIDTH = 989e12, 4.8e12  # an H200's data sheet, a second
GPT2 = dict(batch=64, nheads=16, seqlen=1024, headdim=64, causal=True, dropout_p=0.1)
steps = ledger(64 * 16, 1024, 64)
print(f"{'step':12} {'GFLOP':>7} {'GB':>6} {'FLOP/byte':>10} {'ms of math':>11} {'ms of HBM':>10}")
for name, flops, size in steps:
    math_ms, hbm_ms = 1e3 * flops / FLOPS, 1e3 * size / BANDWIDTH
    counted = f"{flops / 1e9:7.1f} {size / 1e9:6.2f} {flops / size:10.1f}"
    print(f"{name:12} {counted} {math_ms:11.3f} {hbm_ms:10.3f}")

# %% [markdown]
# 每一步的访存都比计算更花时间，矩阵乘也不例外：headdim 只有 64，每写出一个分数，要做的计算并不多。
# 中间三步几乎不计算，却搬运了大部分字节。**标准注意力受显存限制 (memory-bound)**：算力翻倍的 GPU
# 也不会更快。
#
# 给同样的五步计时；旁边还有一个内核，它独自完成全部五步，把 S 和 P 留在芯片上：


# %%
def the_steps():
    """The five calls, each with its input in place, and one kernel for all. For a GPU."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    s = q * 64**-0.5 @ k.mT
    hidden, p = future(s), torch.softmax(s, -1)
    one = dict(causal=True, dropout_p=0.1, layout="bhsd")
    calls = (
        lambda: q @ k.mT,
        lambda: s.masked_fill(hidden, float("-inf")),
        lambda: torch.softmax(s, -1),
        lambda: F.dropout(p, 0.1),
        lambda: p @ v,
        lambda: tilewise.attention(q, k, v, **one),
    )
    return dict(zip(STEPS, calls))


STEPS = [name for name, _, _ in steps] + ["tilewise, all five"]
step_ms = figures.times(GPT2, the_steps() if ON_GPU else dict.fromkeys(STEPS), rounds=3)

bars = {"by the ledger": [1e3 * max(f / FLOPS, size / BANDWIDTH) for _, f, size in steps]}
if step_ms:
    bars |= {"measured": [step_ms[name] for name in STEPS[:5]], "one kernel": [step_ms[STEPS[5]]]}
fig, ax = plt.subplots(figsize=(8, 1.4 + 0.5 * len(bars)), layout="constrained")
for row, parts in enumerate(bars.values()):
    left, look = 0.0, dict(edgecolor="black", height=0.7)
    names = STEPS[:5] if len(parts) == 5 else STEPS[5:]
    for name, ms, hatch in zip(names, parts, ["", "//", "..", "xx", "||"]):
        color = "white" if len(parts) == 5 else "lightgray"
        label = name if row in (0, 2) else None
        ax.barh(row, ms, left=left, label=label, hatch=hatch, color=color, **look)
        left += ms
ax.set_yticks(range(len(bars)), bars)
ax.invert_yaxis()
ax.set_xlabel("ms, forward")
ax.set_title(f"Standard attention step by step ({figures.machine})", fontsize=9)
fig.legend(fontsize=8, ncols=6, loc="outside lower center")
show(fig, "04_steps")

# %% [markdown]
# 融合 (fuse) 相邻的两步，编译器就能做到，也确有帮助。但要融合全部五步，就遇到一个障碍：softmax
# 要除以整行之和，似乎 S 的一行必须先算完，才能开始算 P V。第 03 课已经消除了它。设 m
# 是到目前为止的最大分数，l 是 exp(s - m) 之和；每当最大值变大，就把之前累加的结果乘以
# exp(m_old - m_new)，这样一行的 softmax 就可以逐块求出。输出也是一个和，所以用同一个因子修正即可。
# 任何一步都不必把一个分数看第二遍。
#
# ## FlashAttention-1
#
# 把 K 和 V 切成每块 B_c 行，把 Q 和 O 切成每块 B_r 行。各取一块，一切都在芯片上完成：
# 加载、S = Q Kᵀ、exp、P V、累加。FlashAttention-1（Dao 等 2022，算法 1）把 K 和 V
# 放在外层循环：K_j 和 V_j 只加载一次，然后遍历所有 Q_i。O_i、l_i 和 m_i 在 HBM 里等待下一个 j；O
# 存的是归一化后的值，因此任何时刻它都是对已见过的键的注意力：
#
#     m_new = max(m, rowmax S)        P = exp(S - m_new)        l_new = exp(m - m_new) l + rowsum P
#     O_new = (exp(m - m_new) l O + P V) / l_new
#
# **块取多大？** 片上内存容得下多大就取多大：不论 B_c 是多少，遍历一次 Q 和 O 的 HBM
# 流量都一样，而遍历次数是 N / B_c。芯片上同时放着四个块：K_j、V_j、Q_i 和 O_i。若内存能放 M
# 个数，每块分到 M / 4 个，所以 B_c = ⌈M / 4d⌉。分数的分块 (tile) 是 B_r x B_c，也必须放得下：取
# B_r = min(B_c, d)，它就不超过 B_c · d ≈ M / 4。


# %%
def fa1_blocks(sram_bytes, headdim, itemsize=2):
    """(B_r, B_c) by the paper's rule."""
    numbers = sram_bytes // itemsize
    b_c = math.ceil(numbers / (4 * headdim))
    return min(b_c, headdim), b_c


def power_of_two(n):
    """The largest one that is not over n: Triton's tiles have sides of no other kind."""
    return 1 << int(math.log2(n))


for gpu, arch in {"A100": "sm80", "RTX 4090": "sm89", "H200": "sm90"}.items():
    pairs = {d: fa1_blocks(SMEM_LIMIT[arch], d) for d in (64, 128)}
    print(f"{gpu:9} {SMEM_LIMIT[arch] >> 10:4} KiB a program: (B_r, B_c) by headdim {pairs}")

# %% [markdown]
# 这条规则只算共享内存 (shared memory)。实际上，编译器把 S 和 O 放在寄存器 (register)
# 里，希望有两三块 K 和 V 正在加载途中，块的边长还要符合矩阵乘指令的要求。所以 FA1 自己的代码用 128
# 或 256 个键，后来的人都靠实测。但规则仍然点出了要害：片上内存越大，块越大，遍历次数越少。
#
# 下面把它写成内核。Q 的循环在内层，所以一个程序 (program) 处理整个头。分数以 2 为底（2^x
# 是一条指令，e^x 不是），因此 scale 里含有因子 log2(e)。


# %%
@triton.jit
def fa1_kernel(
    q, k, v, o, l_rows, m_rows, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    first = head * seqlen * D  # of this head's numbers: tensors are contiguous
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)[None, :]
    for n_start in range(0, seqlen, BLOCK_N):
        k_idx = n_start + offs_n
        of_keys = first + k_idx[:, None] * D + offs_d
        k_tile = tl.load(k + of_keys, mask=k_idx[:, None] < seqlen, other=0.0)
        v_tile = tl.load(v + of_keys, mask=k_idx[:, None] < seqlen, other=0.0)
        for m_start in range(0, seqlen, BLOCK_M):
            q_idx = m_start + offs_m
            is_row = q_idx < seqlen
            of_rows = first + q_idx[:, None] * D + offs_d
            q_tile = tl.load(q + of_rows, mask=is_row[:, None], other=0.0)
            o_tile = tl.load(o + of_rows, mask=is_row[:, None], other=0.0)  # fp32
            l_i = tl.load(l_rows + head * seqlen + q_idx, mask=is_row, other=1.0)
            m_i = tl.load(m_rows + head * seqlen + q_idx, mask=is_row, other=0.0)

            # S = Q K^T: (BLOCK_M, BLOCK_N)
            s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
            keep = (k_idx < seqlen)[None, :]
            if CAUSAL:
                keep = keep & (q_idx[:, None] >= k_idx[None, :])
            s = tl.where(keep, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            before = l_i * tl.exp2(m_i - m_new)
            l_new = before + tl.sum(p, 1)
            # O = (alpha l O + P V) / l_new
            pv = tl.dot(p.to(v_tile.dtype), v_tile)
            o_tile = (o_tile * before[:, None] + pv) * (1.0 / l_new)[:, None]

            tl.store(o + of_rows, o_tile, mask=is_row[:, None])
            tl.store(l_rows + head * seqlen + q_idx, l_new, mask=is_row)
            tl.store(m_rows + head * seqlen + q_idx, m_new, mask=is_row)
        tl.debug_barrier()  # the next pass reads what other threads of this program wrote


def fa1(q, k, v, causal, block_m=64, block_n=64):
    """FlashAttention-1's forward; needs contiguous tensors and a headdim that is a power of two."""
    batch, nheads, seqlen, headdim = q.shape
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l_rows = o.new_zeros(batch, nheads, seqlen)
    m_rows = torch.full_like(l_rows, -math.inf)
    here(fa1_kernel)[(batch * nheads,)](
        *(q, k, v, o, l_rows, m_rows, seqlen, headdim**-0.5 * math.log2(math.e)),
        *(headdim, block_m, block_n, causal),
        num_warps=8 if headdim * block_m > 4096 else 4,
        num_stages=2,
    )
    return o.to(q.dtype)


# %% [markdown]
# 结果对吗？看三个数：我们的结果与 fp64 下同样的注意力相差多少；以输入精度计算的普通
# torch 与它相差多少；以及由后者得出的误差预算。bf16 只保留 8 位，所以两者的误差都在结果的
# 1/256 左右；内核的误差可以和普通 torch 一样大，但不能更大。直接与 torch 的 bf16
# 结果比较，说明不了这么多：它本身也不是正确答案。


# %%
def make_qkv(batch, nheads, seqlen, headdim):
    shape = (3, batch, nheads, seqlen, headdim)
    return torch.randn(shape).to(DEVICE, torch.bfloat16).unbind(0)


def check(name, attend, q, k, v):
    """Holds `attend(q, k, v, causal)` to fp64 and to torch, full and causal."""
    for causal in (False, True):
        exact = standard_attention(q.double(), k.double(), v.double(), causal)
        plain = standard_attention(q, k, v, causal)
        torchs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out = attend(q, k, v, causal)
        assert_within(out, exact, plain, name)
        errors = [f"{(x.double() - exact).abs().max().item():.4f}" for x in (out, plain, torchs)]
        kind = "causal" if causal else "full"
        print(f"{name}, {kind}: off by {errors[0]}; plain torch {errors[1]}, SDPA {errors[2]}")


qkv = make_qkv(1, 2, 200, 64)  # 200 is no multiple of 64: the last block is ragged
check("FlashAttention-1", fa1, *qkv)

# %% [markdown]
# ## FlashAttention-2：三处改动
#
# FA1 让大半的矩阵乘单元闲着，原因有三；FlashAttention-2（Dao 2023）逐一消除。
#
# **一、内外循环互换。** K 和 V 在外层时，每次遍历都要把 O_i 从 HBM 读出来，再写回去；
# 而且一个程序必须处理整个头，否则几个程序会同时往同一个 O_i 上累加。Q 在外层时，O_i、l_i 和
# m_i 从第一个键到最后一个键都留在寄存器里，别人也用不着它们：每个查询块自成一个程序。一条 16Ki
# 的序列，16 个头，FA1 有 16 个程序，FA2 有 2048 个。而一块 GPU 有一百多个处理器 (SM)。
#
# **二、最后只做一次除法。** O 不做归一化，过了最后一个键再除一次。这样每一步只需把 O 乘以
# exp(m_old - m_new)。就这么几次运算，何必计较？因为矩阵乘单元比芯片的其余部分快十倍以上：按
# H200 的数据手册，bf16 矩阵乘是 989 TFLOP/s，fp32 是 67。矩阵乘之外的一次运算，
# 耗时相当于矩阵乘之内的十五次左右。
#
# **三、把因果块分类。** 对角线以上的块直接跳过，工作量就少了一半；对角线以下的块不需要掩码。
# 只有压在对角线上的块，或越过序列末尾的块，才要付出比较下标的代价。
# 所以一个查询块要访问的键分成两段：先是部分块 (partial block)，再是完整块 (full block)；
# 编译器由此生成两个循环，较长的那个没有掩码。


# %%
@triton.jit
def attend_block(
    state, rows, k, v, n_start, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVERY_STEP: tl.constexpr,
):  # fmt: skip
    """One block of keys into the state of a block of queries."""
    acc, m_i, l_i = state
    q_tile, q_idx = rows
    k_idx = n_start + tl.arange(0, BLOCK_N)
    offs = k_idx[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        k_tile = tl.load(k + offs, mask=k_idx[:, None] < seqlen, other=0.0)
        v_tile = tl.load(v + offs, mask=k_idx[:, None] < seqlen, other=0.0)
    else:
        k_tile, v_tile = tl.load(k + offs), tl.load(v + offs)
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
    if MASKED:
        keep = (k_idx < seqlen)[None, :]
        if CAUSAL:
            keep = keep & (q_idx[:, None] >= k_idx[None, :])
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_new = l_i * alpha + tl.sum(p, 1)
    if EVERY_STEP:  # FA1's arithmetic in FA2's loops, to be compared
        pv = tl.dot(p.to(v_tile.dtype), v_tile)
        acc = (acc * (l_i * alpha)[:, None] + pv) * (1.0 / l_new)[:, None]
    else:
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, m_new, l_new


@triton.jit
def fa2_kernel(
    q, k, v, out, lse, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVERY_STEP: tl.constexpr,
):  # fmt: skip
    m_start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    q_idx = m_start + tl.arange(0, BLOCK_M)
    first = head * seqlen * D
    k, v = k + first, v + first
    of_rows = first + q_idx[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + of_rows, mask=q_idx[:, None] < seqlen, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = acc, m_i, tl.zeros([BLOCK_M], tl.float32)

    # Full blocks end here; partial ones follow, up to the diagonal or the end
    full = (m_start if CAUSAL else seqlen) // BLOCK_N * BLOCK_N
    stop = tl.minimum(m_start + BLOCK_M, seqlen) if CAUSAL else seqlen
    for n_start in range(full, stop, BLOCK_N):
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen, scale_log2,
                             D, BLOCK_N, True, CAUSAL, EVERY_STEP)  # fmt: skip
    for n_start in range(0, full, BLOCK_N):
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen, scale_log2,
                             D, BLOCK_N, False, CAUSAL, EVERY_STEP)  # fmt: skip

    acc, m_i, l_i = state
    if not EVERY_STEP:
        acc = acc / l_i[:, None]
    tl.store(out + of_rows, acc.to(q_tile.dtype), mask=q_idx[:, None] < seqlen)
    # lse = m + log l, all that the backward needs of the softmax
    row_lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(lse + head * seqlen + q_idx, row_lse, mask=q_idx < seqlen)


def fa2(q, k, v, causal, tile=(64, 64), every_step=False, return_lse=False):
    """FlashAttention-2's forward, of contiguous tensors; one program a block of queries."""
    batch, nheads, seqlen, headdim = q.shape
    out, lse = torch.empty_like(q), q.new_empty((batch, nheads, seqlen), dtype=torch.float32)
    here(fa2_kernel)[(triton.cdiv(seqlen, tile[0]), batch * nheads)](
        *(q, k, v, out, lse, seqlen, headdim**-0.5 * math.log2(math.e)),
        *(headdim, *tile, causal, every_step),
        num_warps=8 if headdim * tile[0] > 4096 else 4,
        num_stages=3,
    )
    return (out, lse) if return_lse else out


check("FlashAttention-2", fa2, *qkv)

# %% [markdown]
# 为什么不用防备 exp(-inf - -inf)，也就是 NaN？因为每一行在遇到的第一个块里就能看到键：
# 对角线上的块当中，第一个的起点不晚于查询块的第一个查询。试试另一种次序，先完整块后部分块，
# 再加上窗口：这时某一行可能遇到一个什么都看不到的块，`tilewise/tile/softmax.py`
# 里有一行代码专门处理它。
#
# 下面把两种次序画成图：一个因果头，八乘八个块。数字是程序到达该块的时刻。FA1 的算法 1
# 不理会掩码，所有块都访问。

# %%
BLOCKS = 8
orders = {"FlashAttention-1: one program": {}, "FlashAttention-2: a program a row": {}}
one, two = orders.values()
for j in range(BLOCKS):
    for i in range(BLOCKS):
        one[i, j] = len(one)
        if j <= i:
            two[i, j] = 0 if j == i else j + 1  # the partial block first, then the full ones
fig, axes = plt.subplots(1, 2, figsize=(8, 4.2))
for ax, (title, order) in zip(axes, orders.items()):
    for (i, j), moment in order.items():
        hatch = "////" if i == j or order is one else ""
        box = dict(facecolor="white", edgecolor="gray", hatch=hatch)
        ax.add_patch(plt.Rectangle((j, i), 1, 1, **box))
        ax.text(j + 0.5, i + 0.5, moment, ha="center", va="center", fontsize=9,
                bbox=dict(facecolor="white", edgecolor="none", pad=1))  # fmt: skip
    ax.set(xlim=(0, BLOCKS), ylim=(BLOCKS, 0), xlabel="block of keys", ylabel="block of queries")
    ax.set(aspect="equal", xticks=[], yticks=[], facecolor="lightgray")
    ax.set_title(title, fontsize=10)
fig.suptitle("When each block is visited; hatched: with a mask; gray: never", fontsize=10)
show(fig, "04_orders")

# %% [markdown]
# ## 数一数除法的代价
#
# 先按公式数。对一行和一块键，
# 两个内核在每个分数上都要做一次缩放、一次取最大值、一次减法、一次指数和一次求和。在 O 的 d
# 个数上，FA1 每个花三次运算，即 (O · a + PV) · b；FA2 只花一次，因为矩阵乘本来就会加到累加器
# (accumulator) 上。
#
# 再看编译器实际生成了什么。`build` 为一块不必在场的 GPU 编译内核；PTX 是交给 NVIDIA
# 汇编器的汇编代码。三个内核的分块相同：FA1，FA2 的循环配 FA1 的算术，以及 FA2。
# 数的是遍历完整块的那个循环里的 fp32 指令，折算到分块的每个分数；矩阵乘是另一类指令，不在其中。


# %%
def innermost_loop(ptx):
    """The text of the last loop that has none inside."""
    loops = []
    for label in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE):
        backward = list(re.finditer(rf"bra[.\w]*\s+{re.escape(label[1])};", ptx[label.end() :]))
        if backward:
            body = ptx[label.end() : label.end() + backward[-1].end()]
            loops = [loop for loop in loops if body not in loop] + [body]
    return loops[-1]


M, N, D, WARPS = 128, 64, 128, 8
x, fp32, rows = torch.empty(4096, D, dtype=torch.bfloat16), torch.empty(4096, D), torch.empty(4096)
sizes = dict(D=D, BLOCK_M=M, BLOCK_N=N, CAUSAL=False, num_warps=WARPS, num_stages=2, on="sm90")
of_fa2 = (fa2_kernel, x, x, x, x, rows, 4096, 0.1)
built = {
    "FA1": build(fa1_kernel, x, x, x, fp32, rows, rows, 4096, 0.1, **sizes),
    "FA1's steps, FA2's loops": build(*of_fa2, EVERY_STEP=True, **sizes),
    "FA2": build(*of_fa2, EVERY_STEP=False, **sizes),
}
KINDS = ("mul", "fma", "add", "sub", "max", "ex2", "div")
per_score = {}
print(
    f"tiles of {M} x {N}, headdim {D}, compiled for sm_90: operations beside the matmuls, a score"
)
print(f"{'':25} formula  counted:", " ".join(f"{kind:>5}" for kind in KINDS), "  registers")
for name, kernel in built.items():
    loop = innermost_loop(kernel.asm["ptx"])
    counts = [len(re.findall(rf"\b{kind}\.[\w.]*f32", loop)) * 32 * WARPS / M / N for kind in KINDS]
    per_score[name] = sum(counts)
    formula = 5 + (1 if name == "FA2" else 3) * D / N
    line = " ".join(f"{count:5.2f}" for count in counts)
    print(f"{name:25} {formula:7.1f} {per_score[name]:8.2f} {line} {stats(kernel)['registers']:11}")

# %% [markdown]
# FA1 的计数低于公式，因为 O · a 作为被累加的初值进入矩阵乘，只剩下那两次乘法。其余相同：一条
# mul 为求最大值而缩放分数，一条 fma 再缩放一次并相减（FA1 中间隔着掩码，所以是一条
# sub）。超出整数的零头是每行只做一次的运算：m 与 l 的指数和求和，以及线程之间必须交换的最大值与和。
# 所以差别就是：每一步中，O 的每个数多一次乘法。
#
# ## 本库自己的内核
#
# `tilewise.kernels.portable.fwd` 就是上面的内核，再加上用户的种种需求：
# 不同的长度、键头少于查询头、窗口、偏置、dropout、sink。每一项都是对 `tilewise/tile/`
# 的一次调用。剩下的读起来就是算法本身；这是它的 `attend_block`：

# %%
print(inspect.getsource(attend.fn))


def portable(q, k, v, causal):
    """The library's Triton kernel: compiled on a GPU, else in the interpreter."""
    place = contextlib.nullcontext() if ON_GPU else use_interpreter()
    with place:
        return tilewise.attention(q, k, v, causal=causal, layout="bhsd", backend="portable")


check("tilewise, portable", portable, *qkv)

# %% [markdown]
# ## 有多快
#
# 这是每篇 FlashAttention 论文都有的图：TFLOP/s 随长度的变化，每种长度的
# token 总数相同。工作量只按掩码保留的查询与键的组合来算，即它们的两次矩阵乘，
# 不管内核实际做了什么：把被遮住的也算一遍，并不会多记功劳。“FA1's steps”是 FA2 的循环配 FA1
# 的算术，这样每处改动都有自己的一条线。


# %%
NAMES = ["standard", "SDPA", "lesson FA1", "FA1's steps", "lesson FA2", "portable", "tilewise"]
TOKENS, HEADS, HEADDIM = 16384, 16, 128
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def contenders(seqlen, causal):
    """name -> call, of those that fit into this GPU's memory."""
    shape = TOKENS // seqlen, HEADS, seqlen, HEADDIM
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    sram = SMEM_LIMIT["sm90"]
    if ON_GPU:
        sram = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    rule = [power_of_two(n) for n in fa1_blocks(sram, HEADDIM)]
    own = dict(causal=causal, layout="bhsd")
    calls = {
        "standard": lambda: standard_attention(q, k, v, causal),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "lesson FA1": lambda: fa1(q, k, v, causal, *rule),
        "FA1's steps": lambda: fa2(q, k, v, causal, (128, 64), every_step=True),
        "lesson FA2": lambda: fa2(q, k, v, causal, (128, 64)),
        "portable": lambda: portable(q, k, v, causal),
        "tilewise": lambda: tilewise.attention(q, k, v, **own),
    }
    if ON_GPU and 4 * 2 * TOKENS * HEADS * seqlen > torch.cuda.mem_get_info()[0]:
        del calls["standard"]  # it holds up to four matrices of scores
    return calls


looks = dict(zip(NAMES, ["kx:", "k^--", "ks:", "kv-.", "ko-", "kD-", "k*-"]))
fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
print(f"{'TFLOP/s at':20}", "  ".join(f"{n:6}" for n in LENGTHS), f"  ({figures.machine})")
for ax, causal in zip(axes, (False, True)):
    speeds = {name: {} for name in NAMES}
    for seqlen in LENGTHS:
        pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen**2
        flops = 4 * (TOKENS // seqlen) * HEADS * pairs * HEADDIM
        shape = dict(seqlen=seqlen, tokens=TOKENS, nheads=HEADS, headdim=HEADDIM, causal=causal)
        calls = contenders(seqlen, causal) if ON_GPU else dict.fromkeys(NAMES)
        for name, ms in figures.times(shape, calls, flops, rounds=3, round_ms=12).items():
            speeds[name][seqlen] = flops / ms * 1e-9
    for name, of in speeds.items():
        ax.plot(of.keys(), of.values(), looks[name], label=name, markersize=5, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set(title="causal" if causal else "full", xlabel="sequence length", ylim=(0, None))
    for name in NAMES if any(speeds.values()) else ():
        line = "  ".join(f"{speeds[name].get(n, math.nan):6.0f}" for n in LENGTHS)
        print(f"{'causal' if causal else 'full':7} {name:12} {line}")
axes[0].set_ylabel("TFLOP/s, forward")
fig.legend(*axes[0].get_legend_handles_labels(), ncols=7, loc="outside lower center", fontsize=8)
fig.suptitle(f"16Ki tokens, 16 heads of 128, bf16 ({figures.machine})", fontsize=9)
show(fig, "04_speed")

# %% [markdown]
# 怎样读这张图。标准注意力一直又平又低：不论长度多少，每个分数都要搬运同样多的字节。FA1
# 受制于每个头只有一个程序，批次里的头越少越严重，那就是图的右端。FA1's steps 与 FA2
# 之间差的是重缩放 (rescale)；有掩码时，FA1 还会计算谁也看不到的部分。本库的可移植 (portable)
# 内核是同一算法，分块按每种 headdim 实测选定。“tilewise”是一次调用默认采用的内核：在 Hopper GPU
# 上是另一个，即第 07 课的那个，加载、矩阵乘与 softmax 在其中相互重叠。
#
# ## 练习
#
# **1. 数流量。** bf16，前向，没有掩码：三种做法处理一个头，各有多少字节进出处理器？FA1 把 K 和 V
# 读一次，并在 N / B_c 次遍历中每次读 Q 和 O、写 O（每个数按 2 字节算）。FA2 读 Q、写 O 各一次，并在
# N / B_r 个程序中每个都读 K 和 V。标准注意力写 S，读 S，写 P，再读 P。N = 4096，d = 64，FA1 每块
# 256 个键，FA2 每块 128 个查询，哪一种省得最多？FA2 把 K 和 V 读了很多遍：为什么其中到达 HBM
# 的那么少？
#
# <details><summary>答案</summary>
#
# ```python
# def traffic(seqlen, headdim, b_c=256, b_r=128):
#     tensor = 2 * seqlen * headdim  # bytes of Q, K, V or O
#     return {
#         "standard": 4 * tensor + 4 * 2 * seqlen**2,
#         "FA1": 2 * tensor + 3 * tensor * (seqlen // b_c),
#         "FA2": 2 * tensor + 2 * tensor * (seqlen // b_r),
#     }
#
# for name, size in traffic(4096, 64).items():
#     print(f"{name:9} {size / 1e6:6.1f} MB")
# # The programs of a head run at the same time and walk the same keys: one of them
# # brings a block into the L2 cache, which holds K and V of a head many times over,
# # and the others find it there. S of one head takes 32 MiB.
# found = traffic(4096, 64)
# assert found["FA1"] < found["FA2"] < found["standard"] / 3
# ```
# </details>
#
# **2. 把键切成两半。** FA2 的一个程序不需要别的程序；但只有一个查询而序列很长时，程序就太少了。用
# `fa2(..., return_lse=True)` 分别对前一半键和后一半键计算注意力，再用它们的 lse 合并成整体。
# （split-KV 解码就是这样做的。）提示：exp(lse) 就是每一半所除的那个和。
#
# <details><summary>答案</summary>
#
# ```python
# q, k, v = make_qkv(1, 2, 128, 64)
# halves = []
# for keys in (slice(0, 64), slice(64, 128)):
#     part = [x[:, :, keys].contiguous() for x in (k, v)]
#     # the kernel takes one length for queries and keys, so the queries come in halves, too
#     rows = [fa2(q[:, :, at].contiguous(), *part, False, return_lse=True)
#             for at in (slice(0, 64), slice(64, 128))]
#     halves.append([torch.cat(x, 2) for x in zip(*rows)])
# (out1, lse1), (out2, lse2) = halves
# lse = torch.logaddexp(lse1, lse2)
# out = out1 * (lse1 - lse).exp()[..., None] + out2 * (lse2 - lse).exp()[..., None]
# whole, whole_lse = fa2(q, k, v, False, return_lse=True)
# assert (lse - whole_lse).abs().max() < 1e-3
# assert (out - whole).abs().max() < 1e-2
# ```
# </details>
#
# 还可以在内核上试试：交换 `fa2_kernel` 的两段循环；让 BLOCK_N 大于 BLOCK_M；加一个向左 64
# 个键的窗口，它会移动循环的起点，给 `keep` 加一个条件，并产生第二种部分块。
