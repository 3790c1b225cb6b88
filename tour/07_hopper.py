# %% [markdown]
# # 07. Hopper
#
# **The idea:** the tensor cores stay busy when warps have different jobs, one
# loading and others computing, and hand tiles over through stages of shared memory,
# each with two barriers.
#
# After this lesson you can
#
# - load tiles with the TMA and multiply them with wgmma, both asynchronous,
# - build a pipeline of stages between a producer warp and consumer warpgroups,
# - find a race and a deadlock in an emulator, without a GPU.
#
# All kernels compute attention forward, one head after another, no mask, block by
# block with the online softmax of lesson 03. They are written in Gluon, the dialect
# of Triton in which you choose layouts and order asynchronous operations yourself.
# It needs a Hopper GPU (H100, H200); everywhere else the kernels run in tilewise's
# emulator.

# %%
import torch
from lesson import (
    Figures,
    NotYet,
    hopper_parts,
    hopper_steps,
    listing,
    pictures_07,
    solutions_07,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

figures = Figures("07_hopper")
torch.manual_seed(0)

# %% [markdown]
# ## An asynchronous copy
#
# The TMA (tensor memory accelerator) copies whole tiles between global and shared
# memory. One thread starts a copy and goes on; no registers are used, no addresses
# computed. A copy needs
#
# - a **descriptor**, made on the host: where the tensor lies, its shape, the shape
#   of a tile, and the layout of the tile in shared memory. `NVMMASharedLayout` is
#   the one that the tensor cores read: rows of 128 bytes whose 16-byte pieces are
#   permuted from row to row (a swizzle), so that eight rows of one column lie in
#   different memory banks.
# - an **mbarrier**, a 64-bit word in shared memory that counts arrivals, and bytes
#   that are expected. When none is missing its phase ends and the next begins.
# - a **phase**: phases are numbered 0, 1, 0, 1, ... A thread waits until the phase
#   of a parity is over. A new barrier is in phase 0, so the phase of parity 1
#   counts as over already.


# %%
@gluon.jit
def double_kernel(x_desc, out):
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)  # a phase takes one arrival
    fence_async_shared()  # init is an ordinary store: the TMA sees it after a fence
    # that arrival, and the bytes to come
    mbarrier.expect(full, x_desc.block_type.nbytes)
    hopper_parts.tma_load(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)  # until phase 0 is over
    x = tile.load(LAYOUT)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * COLUMNS + columns[None, :], 2 * x)


x = torch.randn(64, 64).bfloat16()
out, events = torch.zeros_like(x), []
hopper_parts.emulate(double_kernel, trace=events)[(1,)](
    hopper_parts.describe(x, 64), out
)
assert torch.equal(out, 2 * x)
pictures_07.print_events(events)

# %% [markdown]
# That is what the emulator recorded. It runs the kernel's Python on CPU tensors:
# copies land late, the order of events is drawn from a seed, and memory that was
# not written is NaN. The warps wait, the copy lands, which ends the barrier's
# phase, and they pass.
#
# ## Step 1: one warpgroup, no overlap
#
# **wgmma** multiplies tiles. A warpgroup (four warps, 128 threads) issues it
# together. The right operand lies in shared memory, the left one there or in
# registers; the accumulator is spread over the registers of all 128 threads, 64
# rows of it: hence the 64 queries of a warpgroup. By default the call returns when
# the product is done.
#
# Which thread holds which element is a **layout**. wgmma leaves its accumulator in
# the one below: `NVMMADistributedLayout`, in `accumulator` of
# `lesson/hopper_parts.py`.
#
# ```{diagram} warpgroup
# ```
#
# - The maximum of a row is taken within a thread first, then among four threads.
# - A number per row, like m and l, has the layout of a slice: each of the four
#   threads holds it, and scales its part of the row without an exchange.
# - P, rounded to 16 bits, is in the layout in which wgmma reads a left operand. So
#   it goes from the first product into the second, and no element changes its
#   thread.
#
# `lesson/hopper_parts.py` has that and what else all steps share. `load_tile` is
# the `expect` and the `tma_load` of above. The kernels are in
# `lesson/hopper_steps.py`, printed here.

# %%
listing(hopper_steps.step1_kernel)

# %% [markdown]
# ## Step 2: load the next block while this one is multiplied
#
# Two stages for K and two for V. An iteration first starts the copies of the next
# one, then works on its own stage. Block i uses stage i mod 2, which it fills for
# the (i div 2)-th time: that number's last bit is the phase to wait for. The stage
# that is filled was read in the iteration before, which waited for both of its
# products; so no mbarrier has to say that it is empty. (The four warps synchronize
# before one of them starts a copy: the compiler sees to that.)

# %%
listing(hopper_steps.step2_kernel)

# %% [markdown]
# ## Step 3: warp specialization
#
# Starting copies costs the multiplying warps instructions. So one warp, the
# **producer**, has this job alone: `gl.warp_specialize` runs each function on warps
# of its own. Now a stage is handed over in both directions, and has two barriers.
#
# - **full**: the bytes of a copy end its phase. The consumer waits for it
#   (`wait_full`).
# - **empty**: the consumers' arrivals (`release`) end its phase. The producer waits
#   for it before it fills the stage again (`wait_empty`): for the *previous* phase.
#   The first time a stage is filled nothing was read, and there a new barrier
#   helps: parity 1, the previous phase, counts as over.
#
# K and V have stages of their own, as K is released earlier. Registers are
# allocated to warpgroups, from 64 Ki per SM, so a producer warp counts as four
# warps. Beside one consumer warpgroup there are enough: 255 per thread, the most
# there can be.

# %%
listing(hopper_parts.wait_full, hopper_parts.wait_empty)
listing(
    hopper_steps.load_partition,
    hopper_steps.compute_in_order,
    hopper_steps.specialised,
)

# %% [markdown]
# ## Exercise 1: a race
#
# A warpgroup that does not wait for V is a **race**: it multiplies with whatever
# lies in the stage. On a GPU it often goes well, which is the worst of it. The
# emulator draws another order of events with every seed, and a copy overwrites its
# target from its start until it has landed. Some orders give wrong numbers, some an
# error; a few hide the bug.


# %%
@gluon.jit
def compute_without_waiting(
    WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale
):
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = hopper_parts.empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, hopper_parts.accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    for i in range(seqlen // N):
        k = hopper_parts.wait_full(keys, i)
        s = hopper_steps.warpgroup_mma(
            q.index(WG), k.permute((1, 0)), no_scores, use_acc=False
        )  # fmt: skip
        hopper_parts.release(keys, i)
        p, m_i, l_i, alpha = hopper_steps.online_step(s, m_i, l_i, scale, False)
        v = values.tiles.index(i % 2)  # is it there?
        p = hopper_parts.left_operand(p, D, q.dtype)
        acc_o = hopper_steps.warpgroup_mma(p, v, hopper_parts.rescale(acc_o, alpha))
        hopper_parts.release(values, i)
    hopper_parts.write_rows(acc_o, l_i, out, row + WG * 64)


seen = pictures_07.outcomes(hopper_steps.specialised(compute_without_waiting))
print("20 seeds of the race:", dict(seen))
assert set(seen) - {"right"}

# %% [markdown]
# Correct it: copy the function into the one below and add what is missing.
#
# **Hint:** how does the function wait for K?


# %%
@gluon.jit
def compute_with_waits(
    WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale
):
    raise NotYet


solutions_07.check_race(compute_with_waits)

# %% [markdown]
# <details><summary>An answer</summary>
#
# It is `compute_in_order` of step 3, whose `v = wait_full(values, i)` is the
# missing line.
#
# </details>
#
# ## Step 4: S of the next block before P V of this one
#
# While a warpgroup computes exponentials, it gives the tensor cores nothing to do.
# With `is_async=True` a product only starts, and `warpgroup_mma_wait(n)` waits
# until no more than n are in flight; its `deps` are what you may use afterwards. So
# start S of the next block, then O += P V of this one, and wait for the first
# alone: the next softmax is computed beside P V. (The compiler may move the second
# wait up: little more than the maxima stays beside P V here.)
#
# Every product is waited for in the iteration that started it. One in flight over
# the end of the loop's body makes the compiler wait for each product at once,
# everywhere, and say so only in its log.

# %%
listing(hopper_steps.compute_ahead)

# %% [markdown]
# ## Step 5: two warpgroups share every tile of K and V
#
# 64 queries per program means that all of K and V comes from the L2 cache once for
# every 64 queries. Two warpgroups that read the same stages halve that. And while
# one of them computes exponentials, the other multiplies. A stage is empty when
# *both* have read it: its barrier takes two arrivals a phase.
#
# Now registers are scarce. Three groups of 128 threads get 168 each at the launch.
# The producer's gives back what is over 40, and each consumer thread can take 232:
# (3 * 168 - 40) / 2. Without that 168 would have to do for S (64), O (64), P (32)
# and all the rest.
#
# Outputs start as NaN. Errors against fp64 are compared with those of plain torch
# code in bf16. Here the emulator runs; on a Hopper GPU the compiled kernels are
# checked before they are timed.

# %%
specialised = hopper_steps.specialised
in_order, ahead = hopper_steps.compute_in_order, hopper_steps.compute_ahead
STEPS = {
    "1 one by one": hopper_parts.Step(hopper_steps.step1_kernel, 64),
    "2 two stages": hopper_parts.Step(hopper_steps.step2_kernel, 64),
    "3 load warp": specialised(in_order),
    "4 S ahead": specialised(ahead),
    "5 two warpgroups": specialised(ahead, warpgroups=2),
    "5 without 4": specialised(in_order, warpgroups=2),
}
pictures_07.verify(STEPS)

# %% [markdown]
# ## What waits for what
#
# The emulator records what happens and in which order, but no time.
# `lesson/hopper_timeline.py` gives each copy, product and softmax a length, by
# round rates of one SM, and replays the events: each starts when what it waits for
# is over. That shows what an order of events makes possible for a program alone on
# its SM; it predicts no speed. Step 5 does twice the work of the others.
#
# Each title has two shares of the time: with copies, and with copies that take no
# time. By the first one step 4 is no better than step 3: V is held for an iteration
# longer, so its stage is filled later. By the second one you see what step 4 is
# for: the tensor cores no longer wait for the softmax. Step 5 has both.

# %%
panels = pictures_07.timelines(STEPS)

# %% [markdown]
# ## Exercise 2: a deadlock
#
# Let the producer wait for and fill the stage of V first, then that of K. Try
# `compute_ahead` with two stages, and with one. One of them never ends: a GPU
# hangs, and the emulator raises `Deadlock` and prints what waits for what. Say
# which one and why before you run it.
#
# **Hint:** copy `load_partition`, which step 3 listed, and exchange the two pairs
# of lines in its loop.


# %%
@gluon.jit
def load_v_first(q, q_full, keys, values, descs, row, first, seqlen):
    raise NotYet


solutions_07.check_load(load_v_first)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_07.py
# :pyobject: load_v_first
# :language: python
# ```
#
# With one stage the emulator stops, and says (shortened):
#
# ```text
# nothing is in flight and every partition waits:
#   compute_ahead waits for phase 1 of barrier keys.full[0]
#   load_v_first waits for phase 0 of barrier values.empty[0]
# ```
#
# </details>
#
# ## What the compiler made of it
#
# Compiling needs no GPU either. Spills would be registers that went to memory and
# back. `programs` is how many fit on an SM at a time: where there are two, one
# works while the other waits, with no stages at all. Mind that when you compare
# step 1 with step 2.

# %%
pictures_07.needed(STEPS)

# %% [markdown]
# ## The speed of each step, and the library's kernel
#
# The library's own kernel is step 5 and what remains: persistent programs that
# fetch tiles from a counter, the last P V of a tile beside the first S of the next,
# O stored by the TMA, masks where they are needed. Its files are
# `tilewise/kernels/hopper/fwd/*.py`; `docs/design/hopper.md` says what each of
# these was worth.

# %%
pictures_07.speeds(figures, STEPS)

# %% [markdown]
# Read the bars beside the timelines. On an H200 step 2 is *slower* than step 1:
# there two programs share an SM, and one multiplies while the other waits. Two
# stages do the same by hand, and leave no room for a second program. Steps 3 and 4
# win most of it back. Step 5 reads half the bytes of K and V per query, and its
# warpgroups alternate on the tensor cores: that is the largest gain.
#
# To try: give step 5 a third stage,
# `specialised(hopper_steps.compute_ahead, warpgroups=2, stages=3)`. A stage is then
# filled an iteration earlier, so a copy that starts late is still in time. It takes
# 64 KiB of the 227 that a program may have.

# %%
solutions_07.exercises.show()
