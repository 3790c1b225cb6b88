# %% [markdown]
# # 07. Hopper
#
# After this lesson you can write a kernel that keeps a Hopper GPU's tensor cores busy: load tiles
# with the copy engine (TMA), multiply them with wgmma while other work goes on, hand them from warp
# to warp through a ring of buffers, and give each group of warps a job and the registers for it.
# You see all that happen event by event, and watch an emulator catch two classic bugs.
#
# The ladder has one problem: attention forward for one head after another, no mask, out =
# softmax(Q Kᵀ / √d) V, block by block with the online softmax of lesson 03. Kernels are written in
# Gluon, the dialect of Triton in which you place data and order events yourself. It needs a Hopper
# GPU (H100, H200); everywhere else the kernels run in tilewise's emulator.

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
# ## A copy that runs by itself
#
# The copy engine moves whole tiles between global and shared memory. One thread starts a copy and
# goes on; no registers are used, no addresses computed. Three things belong to it.
#
# - A **descriptor**, made on the host: where the tensor lies, its shape, the shape of a tile, and
#   how the tile lies in shared memory. `NVMMASharedLayout` is the arrangement that the tensor cores
#   read: rows of 128 bytes whose 16-byte pieces are permuted from row to row (a swizzle), so that
#   eight rows of one column lie in different memory banks.
# - An **mbarrier**, a 64-bit word in shared memory that says when the tile is there. It counts
#   arrivals, and bytes that are expected. When none is missing its phase ends and the next begins.
# - A **phase**: phases are numbered 0, 1, 0, 1, ... A thread waits for the phase of a parity to be
#   over. A fresh barrier is in phase 0, so the phase of parity 1 counts as over already.


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
# That is what the emulator saw. It runs the kernel's Python on CPU tensors: copies land late, who
# goes on next is drawn from a seed, and memory that nobody wrote is NaN. Read the list as a story:
# the warps wait, the copy lands, which ends the barrier's phase, and they pass.
#
# ## Step 1: one warpgroup, one thing after the other
#
# **wgmma** multiplies tiles. A warpgroup (four warps, 128 threads) issues it together. The right
# operand lies in shared memory, the left one there or in registers; the accumulator is spread over
# the registers of all 128 threads, 64 rows of it: hence the 64 queries of a warpgroup. By default
# the call returns when the product is there.
#
# P comes out of the first product in registers and goes into the second one as its left operand:
# the elements stay in the threads they are in. `hopper_parts.py` has that and what else all steps
# share: layouts, the state of rows, how barriers are made and rows written. `load_tile` is the
# `expect` and the `tma_load` of above. The ladder itself is `hopper_steps.py`, printed here.


# %%
def listing(*functions):
    """The source of functions that lie in a file beside this one: change them there."""
    print(*(inspect.getsource(getattr(x, "fn", x)) for x in functions), sep="\n")


listing(steps.step1_kernel)

# %% [markdown]
# ## Step 2: the next block is loaded while this one is multiplied
#
# Two slots for K and two for V. A turn first starts the copies of the next turn, then works on its
# own slot. Block i uses slot i mod 2, which it fills for the (i div 2)-th time: that number's last
# bit is the phase to wait for. The slot that is filled was read in the turn before, and both of its
# products were waited for there; so no mbarrier has to say that it is empty. (The four warps meet
# before one of them starts a copy: the compiler sees to that.)

# %%
listing(steps.step2_kernel)

# %% [markdown]
# ## Step 3: a warp that only loads
#
# Starting copies costs the multiplying warps instructions, and they start one only when they get
# there. So one warp gets this job alone: `gl.warp_specialize` runs each function on warps of its
# own. Now a slot is handed over in both directions, and has two barriers.
#
# - **full**: the bytes of a copy end its phase. Who multiplies waits for it (`wait_full`).
# - **empty**: the readers' arrivals (`release`) end its phase. Who loads waits for it before it
#   fills the slot again (`wait_empty`): for the phase of the lap *before*. In the first lap nobody
#   has read anything, and there a fresh barrier helps: parity 1, the lap before, counts as over.
#
# K and V have a ring each, as K is let go of earlier. Registers are dealt to warpgroups, from 64 Ki
# an SM, so a load warp counts as four warps. Beside one computing warpgroup there are enough: 255 a
# thread, the most there can be.

# %%
listing(parts.wait_full, parts.wait_empty)
listing(steps.load_partition, compute_in_turn, specialised)

# %% [markdown]
# ## Step 4: S of the next block before P V of this one
#
# While a warpgroup computes exponentials, the tensor cores have nothing from it. With
# `is_async=True` a product only starts, and `warpgroup_mma_wait(n)` waits until no more than n are
# on their way; its `deps` are what you may use afterwards. So start S of the next block, then
# O += P V of this one, and wait for the first alone: the next softmax is computed beside P V.
# (The compiler may move the second wait up: little more than the maxima stays beside P V here.)
#
# Every product is waited for in the turn that started it. One in flight over the end of the loop's
# body makes the compiler wait for each product at once, everywhere, and say so only in its log.

# %%
listing(compute_ahead)

# %% [markdown]
# ## Step 5: two warpgroups share every tile of K and V
#
# 64 queries a program means that all of K and V comes from the L2 cache once for every 64 queries.
# Two warpgroups on one ring halve that. And while one of them computes exponentials, the other
# multiplies. A slot is empty when *both* have read it: its barrier takes two arrivals a phase.
#
# Now registers are scarce. Three groups of 128 threads get 168 each at the launch. The load warp's
# gives back what is over 40, and each computing thread can take 232: (3 * 168 - 40) / 2. Without
# these budgets 168 would have to do for S (64), O (64), P (32) and all the rest.
#
# ## All steps are right
#
# Outputs start as NaN. Errors against fp64 are held to those of plain torch code in bf16. Here the
# emulator runs; on a Hopper GPU the compiled kernels are held to the same before they are timed.

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
# ## Who waits for whom
#
# The emulator knows what happens and in which order, but no time. `hopper_timeline.py` gives each
# copy, product and softmax a length, by round rates of one SM, and plays the events again: each
# starts when what it waits for is over. That shows what an order of events makes possible for a
# program alone on its SM, and where it waits; it predicts no speed. Step 5 does twice the work
# of the others. In the second column copies cost nothing. There you see what step 4 is for; in the
# first one also its price: V is held for a turn longer, so its slot is filled later.

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
# ## Two bugs, caught
#
# A warpgroup that does not wait for V is a **race**: it multiplies with whatever lies in the slot.
# On a GPU it often goes well, which is the worst of it. The emulator draws another order of events
# with every seed, and a copy spoils its target from its start until it has landed. Some orders give
# wrong numbers, some an error (say, a program that ends before its copies); a few hide the bug.
#
# A load warp that waits for the phase of this lap, not the one before, waits for readers of a tile
# that it has not loaded: a **deadlock**. A GPU just hangs. The emulator says who waits for what.


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
# ## What the compiler made of it
#
# Compiling needs no GPU either. Spills would be registers that went to memory and back. `programs`
# is how many fit on an SM at a time: where there are two, the one works while the other waits, with
# no ring at all. Mind that when you compare step 1 with step 2.

# %%
print(f"{'':18}registers  spills  shared memory  programs")
for name, step in STEPS.items():
    found = needs(step, HEADDIM)
    assert not found["wgmma_serialized"], f"{name}: one product at a time, whatever the source says"
    spills, kib = found["spill_stores"], found["smem"] / 1024
    print(f"{name:18}{found['registers']:9}{spills:8}{kib:11.0f} KiB{found['programs']:10}")

# %% [markdown]
# ## The speed of each step, and the library's kernel
#
# The library's own kernel is step 5 and what remains: programs that stay on their SM and draw tiles
# from a counter, the last P V of a tile beside the first S of the next, one pair of barriers for K
# and V together, O written by the copy engine, masks where they are needed. Its files are
# `tilewise/kernels/hopper/fwd/*.py`; `docs/design/hopper.md` says what each of these was worth.


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
# Read the bars beside the picture of who waits. On an H200 step 2 is *slower* than step 1: there
# two programs share an SM, one waits and the other multiplies. Two slots do that by hand, and leave
# no room for a second program. Steps 3 and 4 win most of it back. Step 5 asks for half the bytes of
# K and V a query, and its warpgroups take turns at the tensor cores: that is the leap.
#
# ## Exercises
#
# **1.** *Three slots.* Give the rings of step 5 a third slot. What does the replay gain, and why?
# What does it cost, and does it still fit?
#
# <details><summary>Solution</summary>
#
# A slot is filled a turn earlier than it is needed, so a copy that starts late is still in time.
# The third slots take 64 KiB of the 227 that a program may have. What a GPU gains you have to time.
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
# **2.** *Swap two waits.* Let the load warp wait for and fill the slot of V first, then that of K.
# Try `compute_ahead` with two slots, and with one. One of them hangs: say why before you run it.
#
# <details><summary>Solution</summary>
#
# With one slot V of block 1 has to wait until V of block 0 is read. That happens in the turn which
# starts with S of block 1, whose K the load warp has not asked for yet: it stands behind V.
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
