# %% [markdown]
# # 07. Hopper
#
# 学完本课，你能写出让 Hopper GPU 的 Tensor Core 一直忙碌的内核 (kernel)：用拷贝引擎 (TMA) 加载分块
# (tile)；用 wgmma 把它们相乘，同时做别的工作；通过环形缓冲区 (ring) 把它们从一个 warp 交给另一个
# warp；给每组 warp 一项任务，以及任务所需的寄存器。这一切你都会逐个事件地看到，还会看着模拟器
# (emulator) 抓住两个经典的错误。
#
# 这一级级台阶只解决一个问题：注意力的前向，一个头接一个头，没有掩码，
# out = softmax(Q Kᵀ / √d) V，用第 03 课的在线 softmax 逐块计算。内核用 Gluon 编写，它是 Triton
# 的一种方言，数据放在哪里、事件按什么次序发生，都由你自己安排。它需要 Hopper GPU（H100、H200）；
# 在其他任何地方，内核都在 tilewise 的模拟器里运行。

# %%
import collections
import inspect

import hopper_parts as parts
import hopper_steps as steps
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from hopper_parts import Step, attend, describe, needs, prepare, verdict_of
from hopper_steps import compute_ahead, compute_in_turn, specialised
from hopper_timeline import Rates, Replay, busy, draw, draw_speeds, told
from lesson import ON_GPU, Figures, show
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

import tilewise
from tilewise.kernels.hopper.compat import tma_load  # named differently by Triton 3.6 and 3.8
from tilewise.testing import emulate, use_emulator
from tilewise.testing.hopper import Deadlock, HopperError
from tilewise.tile.softmax import online_step  # a block's online softmax, as in lesson 03

figures = Figures("07_hopper")
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
HEADDIM = 128
torch.manual_seed(0)

# %% [markdown]
# ## 自己会跑的拷贝
#
# 拷贝引擎在全局内存 (global memory) 与共享内存 (shared memory) 之间搬运整个分块。一个线程启动拷贝，
# 然后继续往下走；不占寄存器，也不计算地址。与它有关的有三样东西。
#
# - **描述符 (descriptor)**，在主机上创建：张量在哪里，形状如何，分块的形状，
#   以及分块在共享内存里怎样排布。`NVMMASharedLayout` 是 Tensor Core 读取的排布：每行 128
#   字节，其中的 16 字节小段逐行变换位置 (swizzle)，使同一列的八行落在不同的存储体 (bank) 里。
# - **mbarrier**，共享内存里的一个 64 位字，说明分块什么时候到齐。它数到达 (arrival)
#   的次数，也数预期的字节。一个都不缺时，它的相位结束，下一个相位开始。
# - **相位 (phase)**：相位的编号是 0、1、0、1…… 线程等待某个奇偶性 (parity) 的相位结束。新建的
#   barrier 处在相位 0，所以奇偶性为 1 的相位算是已经结束。


# %%
@gluon.jit
def double_kernel(x_desc, out):
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)  # a phase takes one arrival
    fence_async_shared()  # that was an ordinary store: the copy engine sees it after a fence
    mbarrier.expect(full, x_desc.block_type.nbytes)  # that arrival, and bytes that must come, too
    tma_load(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)  # until phase 0 is over
    x = tile.load(LAYOUT)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * COLUMNS + columns[None, :], 2 * x)


x = torch.randn(64, 64).bfloat16()
out, events = torch.zeros_like(x), []
emulate(double_kernel, trace=events)[(1,)](describe(x, 64), out)
assert torch.equal(out, 2 * x)
print(*told(events, partitions=False), sep="\n")

# %% [markdown]
# 这就是模拟器看到的。它在 CPU 张量上运行内核的 Python 代码：拷贝很晚才落地，
# 接下来轮到谁由种子抽签决定，没有人写过的内存是 NaN。把这份清单当故事来读：warp
# 在等待；拷贝落地，barrier 的相位随之结束；warp 通过。
#
# ## 第 1 步：一个 warpgroup，一件事接一件事
#
# **wgmma** 把分块相乘。它由一个 warpgroup（四个 warp，128 个线程）共同发出。右操作数在共享内存里，
# 左操作数在共享内存里或寄存器里；累加器 (accumulator) 有 64 行，分布在全部 128
# 个线程的寄存器中：所以一个 warpgroup 处理 64 个查询。默认情况下，调用返回时乘积已经算好。
#
# P 从第一次矩阵乘出来时在寄存器里，又作为左操作数进入第二次：元素就留在原来的线程里。
# 这一点和各步共用的其他东西都在 `hopper_parts.py` 里：layout、各行的状态、怎样创建
# barrier、怎样写出各行。`load_tile` 就是上面的 `expect` 和 `tma_load`。台阶本身在 `hopper_steps.py`
# 里，在这里打印出来。


# %%
def listing(*functions):
    """The source of functions that lie in a file beside this one: change them there."""
    print(*(inspect.getsource(getattr(x, "fn", x)) for x in functions), sep="\n")


listing(steps.step1_kernel)

# %% [markdown]
# ## 第 2 步：这一块在相乘，下一块在加载
#
# K 有两个槽 (slot)，V 也有两个。每一轮先启动下一轮的拷贝，再处理自己的槽。块 i 使用槽
# i mod 2，这是该槽第 (i div 2) 次被填充，从 0 数起：这个数的最低位就是要等待的相位。
# 正在填充的槽是上一轮读的，而上一轮的两次矩阵乘都已在那一轮等到结束；所以不需要 mbarrier
# 来说明它空了。（四个 warp 先会合，其中一个才启动拷贝：这由编译器负责。）

# %%
listing(steps.step2_kernel)

# %% [markdown]
# ## 第 3 步：只管加载的 warp
#
# 启动拷贝要花费做乘法的 warp 的指令，而且要等它们执行到那里才会启动。所以让一个 warp 专做这件事：
# `gl.warp_specialize` 让每个函数在各自的 warp 上运行。这样一来，槽要在两个方向上交接，于是有两个
# barrier。
#
# - **full**：拷贝的字节到齐，它的相位就结束。做乘法的一方等待它（`wait_full`）。
# - **empty**：读者的到达（`release`）使它的相位结束。
#   负责加载的一方在重新填充这个槽之前等待它（`wait_empty`）：等的是**上一圈**的相位。
#   第一圈里还没有人读过任何东西，这时新建的 barrier 正好合用：奇偶性 1，也就是上一圈，
#   算是已经结束。
#
# K 和 V 各有一个环，因为 K 释放得更早。寄存器按 warpgroup 分配，每个 SM 有 64 Ki 个，所以加载 warp
# 要按四个 warp 计算。旁边只有一个计算 warpgroup 时，寄存器够用：每个线程 255 个，这是上限。

# %%
listing(parts.wait_full, parts.wait_empty)
listing(steps.load_partition, compute_in_turn, specialised)

# %% [markdown]
# ## 第 4 步：先算下一块的 S，再算这一块的 P V
#
# warpgroup 在算指数时，Tensor Core 无事可做。加上 `is_async=True`，矩阵乘只是启动；
# `warpgroup_mma_wait(n)` 一直等到在途的不多于 n 个；它的 `deps` 是此后可以使用的东西。
# 所以先启动下一块的 S，再启动这一块的 O += P V，只等待前者：下一次 softmax 就与 P V
# 同时计算。（编译器可能把第二次等待提前：在这里，能与 P V 同时进行的，比求最大值多不了多少。）
#
# 每次矩阵乘都在启动它的那一轮里等到结束。只要有一次越过循环体的末尾还在途，
# 编译器就会让每次矩阵乘都立即等待，处处如此，而且只在它的日志里说出来。

# %%
listing(compute_ahead)

# %% [markdown]
# ## 第 5 步：两个 warpgroup 共用 K 和 V 的每个分块
#
# 每个程序 (program) 64 个查询，就意味着每 64 个查询要从 L2 缓存把 K 和 V 全部取一遍。两个 warpgroup
# 共用一个环，这就减半。而且其中一个算指数时，另一个在做乘法。**两个**都读过之后，槽才是空的：它的
# barrier 每个相位要有两次到达。
#
# 现在寄存器紧张了。启动时，三组 128 个线程，每个线程 168 个。加载 warp 那一组交还超过 40
# 的部分，每个计算线程就可以有 232 个：(3 * 168 - 40) / 2。如果不这样分配，168 个就得够
# S（64）、O（64）、P（32）和其余的一切使用。
#
# ## 每一步都正确
#
# 输出一开始是 NaN。与 fp64 相比的误差，以普通 torch 代码在 bf16 下的误差为标准。
# 这里运行的是模拟器；在 Hopper GPU 上，编译好的内核在计时之前也要过同样的标准。

# %%
STEPS = {
    "1 one by one": Step(steps.step1_kernel, 64),
    "2 two slots": Step(steps.step2_kernel, 64),
    "3 load warp": specialised(compute_in_turn),
    "4 S ahead": specialised(compute_ahead),
    "5 two warpgroups": specialised(compute_ahead, warpgroups=2),
    "5 without 4": specialised(compute_in_turn, warpgroups=2),
}
small = torch.randn(3, 1, 512, HEADDIM).bfloat16()  # q, k, v of one head
for name, step in STEPS.items():
    for seed in range(3):  # three orders of events
        verdict = verdict_of(attend(step, *small, seed=seed), *small)
        assert verdict.ok, f"{name}, seed {seed}: {verdict}"
    print(f"{name:18}{verdict}")

# %% [markdown]
# ## 谁在等谁
#
# 模拟器知道发生了什么、次序如何，但不知道时间。`hopper_timeline.py` 按一个 SM
# 的大致速率，给每次拷贝、矩阵乘和 softmax 一个长度，再把这些事件重放 (replay)
# 一遍：所等的东西一结束，它就开始。这说明一种事件次序能让独占 SM 的程序做到什么，在哪里要等待；
# 它不预测速度。第 5 步的工作量是其他各步的两倍。第二列里，拷贝不花时间。在那里可以看到第 4
# 步的用处；在第一列里还可以看到它的代价：V 多占用一轮，所以它的槽填充得更晚。

# %%
panels = {}
for name, step in STEPS.items():
    events = []
    attend(step, *small, trace=events)
    panels[name], free = (
        Replay(events, keys=128, headdim=HEADDIM, rates=rates).run()
        for rates in (Rates(), Rates(copy_bytes=1e9, copy_latency=0))
    )
    print(f"{name:18}tensor cores at work {busy(panels[name]):4.0%}, copies free {busy(free):4.0%}")
chosen = {name: panels[name] for name in list(STEPS)[:5]}
show(draw(chosen, "One program, four blocks of keys"), "07-timeline")
plt.close("all")

# %% [markdown]
# ## 抓住两个错误
#
# warpgroup 不等待 V，就是**竞态 (race)**：槽里是什么，它就乘什么。在 GPU 上往往不出事，
# 这正是最糟的地方。模拟器按每个种子抽取另一种事件次序，而且拷贝从启动到落地，目标里的内容都是坏的。
# 有的次序给出错误的数，有的报错（比如程序在它的拷贝之前结束）；少数次序会掩盖这个错误。
#
# 加载 warp 等待的如果是这一圈的相位，而不是上一圈的，就是在等一个分块的读者，
# 可它还没有加载这个分块：这就是**死锁 (deadlock)**。GPU 只会挂住。模拟器会说出谁在等什么。


# %%
@gluon.jit
def compute_without_waiting(WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale):
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = parts.empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, parts.accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    for i in range(seqlen // N):
        k = parts.wait_full(keys, i)
        s = warpgroup_mma(q.index(WG), k.permute((1, 0)), no_scores, use_acc=False)
        parts.release(keys, i)
        p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
        v = values.tiles.index(i % 2)  # is it there?
        p = parts.left_operand(p, D, q.dtype)
        acc_o = warpgroup_mma(p, v, parts.rescale(acc_o, alpha))
        parts.release(values, i)
    parts.write_rows(acc_o, l_i, out, row + WG * 64)


@gluon.jit
def load_in_wrong_phase(q, q_full, keys, values, descs, row, first, seqlen):
    N: gl.constexpr = keys.tiles.shape[1]
    parts.load_tile(descs[0], row, q_full.index(0), q.index(0))
    for i in range(seqlen // N):
        mbarrier.wait(keys.empty.index(i % 2), (i // 2) & 1)  # wait_empty has ^ 1 here
        parts.fill(keys, i, descs[1], first + i * N)
        parts.wait_empty(values, i)
        parts.fill(values, i, descs[2], first + i * N)


def outcome(step, seed):
    """What a run of 256 keys comes to under one seed, in a word, and the error if there is one."""
    short = small[:, :, :256]
    try:
        is_right = verdict_of(attend(step, *short, seed=seed), *short).ok
    except HopperError as error:
        return type(error).__name__, error
    return "right" if is_right else "wrong numbers", None


race = specialised(compute_without_waiting)
words = [outcome(race, seed)[0] for seed in range(20)]
print("20 seeds of the race:", dict(collections.Counter(words)))
assert set(words) - {"right"}
word, error = outcome(specialised(compute_ahead, load=load_in_wrong_phase), seed=0)
assert isinstance(error, Deadlock)
print(
    *(line for line in str(error).splitlines() if "CTA" not in line or "(0, 0, 0)" in line),
    sep="\n",
)

# %% [markdown]
# ## 编译器生成了什么
#
# 编译也不需要 GPU。spills 一列是溢出 (spill)：寄存器的内容写到显存，再读回来。`programs` 是一个
# SM 上同时放得下几个：放得下两个时，一个等待，另一个就工作，根本不需要环。比较第 1 步与第 2
# 步时，要记得这一点。

# %%
print(f"{'':18}registers  spills  shared memory  programs")
for name, step in STEPS.items():
    found = needs(step, HEADDIM)
    assert not found["wgmma_serialized"], f"{name}: one product at a time, whatever the source says"
    spills, kib = found["spill_stores"], found["smem"] / 1024
    print(f"{name:18}{found['registers']:9}{spills:8}{kib:11.0f} KiB{found['programs']:10}")

# %% [markdown]
# ## 每一步的速度，以及本库的内核
#
# 本库自己的内核是第 5 步加上余下的几件事：程序留在自己的 SM 上，从计数器领取分块；
# 一个分块的最后一次 P V 与下一个分块的第一次 S 同时进行；K 和 V 合用一对 barrier；O
# 由拷贝引擎写出；只在需要的地方用掩码。它的文件是 `tilewise/kernels/hopper/fwd/*.py`；
# `docs/design/hopper.md` 说明了其中每一件的价值。


# %%
def library(q, k, v):
    return tilewise.attention(q[None], k[None], v[None], layout="bhsd", backend="hopper")[0]


with use_emulator(seed=1):
    print("tilewise", verdict_of(library(*small), *small))


def checked_calls(seqlen, heads):
    """Launches to be timed, each held to fp64 at this size before; without a Hopper GPU, none."""
    names = [*STEPS, "tilewise", "SDPA"]
    if not ON_HOPPER:
        return dict.fromkeys(names)
    x = torch.randn(3, heads, seqlen, HEADDIM, device="cuda").bfloat16()
    for name, step in STEPS.items():
        verdict = verdict_of(attend(step, *x), *x)
        assert verdict.ok, f"{name} at {seqlen}: {verdict}"
    assert verdict_of(library(*x), *x).ok
    calls = {name: prepare(step, *x)[0] for name, step in STEPS.items()}
    calls["tilewise"] = lambda: library(*x)
    calls["SDPA"] = lambda: F.scaled_dot_product_attention(*x[:, None])
    return calls


speeds = {}
for seqlen in (4096, 16384) if ON_HOPPER or not ON_GPU else ():
    heads = 262144 // seqlen
    flops = 4 * heads * seqlen**2 * HEADDIM
    shape = dict(seqlen=seqlen, heads=heads, headdim=HEADDIM, dtype="bfloat16")
    times = figures.times(shape, checked_calls(seqlen, heads), flops)
    speeds[seqlen] = {name: flops / ms * 1e-9 for name, ms in times.items()}
    for name, tflops in speeds[seqlen].items():
        print(f"{seqlen:6} {name:18}{tflops:6.0f} TFLOP/s")
print(figures.machine)
if any(speeds.values()):
    show(draw_speeds(speeds, figures.machine), "07-speed")

# %% [markdown]
# 把这些柱子与“谁在等谁”的图放在一起读。在 H200 上，第 2 步比第 1 步**更慢**：
# 第 1 步时一个 SM 上有两个程序，一个在等，另一个就在乘。
# 两个槽用手工做了这件白送的事，却不再给第二个程序留地方。第 3、4 步赢回了其中的大部分。
# 第 5 步让每个查询只需一半的 K 与 V 的字节，两个 warpgroup 轮流使用 Tensor Core：飞跃就在这里。
#
# ## 练习
#
# **1.** 三个槽。 给第 5 步的环加上第三个槽。重放时好了多少，为什么？代价是什么，还放得下吗？
#
# <details><summary>答案</summary>
#
# 槽比需要它的时候提前一轮填充，所以拷贝启动得晚也来得及。第三个槽占 64 KiB，而一个程序可以用
# 227 KiB。GPU 上有多少收益，要由你来计时。
#
# ```python
# three = specialised(compute_ahead, warpgroups=2, slots=3)
# assert verdict_of(attend(three, *small), *small).ok
# events = []
# attend(three, *small, trace=events)
# gained, before = busy(Replay(events, 128, HEADDIM).run()), busy(panels["5 two warpgroups"])
# print(f"tensor cores at work {gained:.0%}, with two slots {before:.0%}")
# now, then = needs(three, HEADDIM), needs(STEPS["5 two warpgroups"], HEADDIM)
# assert gained > before and now["smem"] - then["smem"] >= 64 * 1024 and now["programs"] == 1
# ```
#
# </details>
#
# **2.** 交换两次等待。 让加载 warp 先等待并填充 V 的槽，再等待并填充 K 的槽。用两个槽试试
# `compute_ahead`，再用一个槽试试。其中一种会挂住：先说出原因，再运行。
#
# <details><summary>答案</summary>
#
# 只有一个槽时，块 1 的 V 必须等到块 0 的 V 被读过。读块 0 的 V 的那一轮，要先算块 1 的 S，而块 1 的
# K 加载 warp 还没有请求：它排在 V 的后面。
#
# ```python
# @gluon.jit
# def load_v_first(q, q_full, keys, values, descs, row, first, seqlen):
#     N: gl.constexpr = keys.tiles.shape[1]
#     parts.load_tile(descs[0], row, q_full.index(0), q.index(0))
#     for i in range(seqlen // N):
#         parts.wait_empty(values, i)
#         parts.fill(values, i, descs[2], first + i * N)
#         parts.wait_empty(keys, i)
#         parts.fill(keys, i, descs[1], first + i * N)
#
#
# words = [
#     outcome(specialised(compute_ahead, load=load_v_first, slots=slots), seed=0)[0]
#     for slots in (2, 1)
# ]
# assert words == ["right", "Deadlock"], words
# ```
#
# </details>
