"""The executor on small kernels: right results in any order, and bugs planted in their PTX."""

import re

import numpy as np
import pytest
import torch
from helpers import hopper_kernels, hopper_launches
from helpers.tiers import sample

from ptx import execute
from ptx.copies import TensorMap, swizzled
from ptx.errors import AsyncFault, BarrierFault, Deadlock, Divergence, MemoryFault, PtxError
from ptx.launch import machine_of
from ptx.machine import Cta
from ptx.memory import SHARED, GlobalMemory, SharedMemory

pytestmark = pytest.mark.slow

LAUNCHES = {
    "copy": hopper_launches.copy,
    "matmul": lambda: hopper_launches.matmul(hopper_kernels, n=128),
    "attention": lambda: hopper_launches.attention(nheads=1),
}


def run(name, seed=None, edit=None):
    launch = LAUNCHES[name]()

    def edited(ptx):
        found = ptx if edit is None else edit(ptx)
        assert edit is None or found != ptx
        return found

    kernel = getattr(hopper_kernels, launch.name)
    execute(kernel, seed, edit=edited)[launch.grid](*launch.args, **launch.constants)
    launch.check()


@pytest.mark.parametrize("seed", sample([None, *range(20)], None, 1))
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels(name, seed):
    run(name, seed)


DESCRIPTOR = 0x4000004000010000  # 128-byte swizzle, stride 1024, leading 16


def bits_of_descriptors(change):
    return lambda ptx: ptx.replace(str(DESCRIPTOR), str(DESCRIPTOR ^ change))


def without(pattern, by=""):
    return lambda ptx: re.sub(pattern, by, ptx)


def with_registers(most, least):
    """Other numbers of registers a thread, of partitions that take some and of those that give."""
    more = without(r"(setmaxnreg\.inc\S*)\s+\d+;", rf"\1 {most};")
    less = without(r"(setmaxnreg\.dec\S*)\s+\d+;", rf"\1 {least};")
    return lambda ptx: less(more(ptx))


BUGS = {
    "no proxy fence": ("copy", without(r"fence\.proxy\.async\.shared::cta;"), AsyncFault),
    "no fence of what is stored": (
        *("copy", without(r"(?s)(st\.shared\.v4.*?)fence\.proxy\.async\.shared::cta;", r"\1")),
        AsyncFault,
    ),
    "no wait for a phase": (
        "copy",
        without(r"mbarrier\.try_wait[^;]*;", "mov.pred complete, 1;"),
        BarrierFault,
    ),
    "another phase": (
        *("copy", without(r"(try_wait[^;]*), %r\d+;", r"\1, 1;")),
        Deadlock,
    ),
    "two arrivals": (
        "copy",
        without(r"(mbarrier\.arrive\.shared::cta\.b64 _, \[[^]]*\]);", r"\1, 2;"),
        BarrierFault,
    ),
    "more bytes": ("copy", lambda ptx: ptx.replace(", 8192;", ", 8320;"), Deadlock),
    "no wait for a store": ("copy", without(r"cp\.async\.bulk\.wait_group\.read\s+0;"), AsyncFault),
    "another swizzle": ("matmul", bits_of_descriptors(3 << 62), AssertionError),
    "another stride": ("matmul", bits_of_descriptors(0x60 << 32), AssertionError),
    "not transposed": (
        *("matmul", without(r"(wgmma\.mma_async[^;]*, 0), 1;", r"\1, 0;")),
        (AssertionError, MemoryFault),
    ),
    "no wait for a wgmma": ("matmul", without(r"wgmma\.wait_group\.sync\.aligned 0;"), AsyncFault),
    "no group of wgmmas": ("matmul", without(r"wgmma\.commit_group\.sync\.aligned;"), AsyncFault),
    "half of a warpgroup": (
        *("matmul", without(r"(wgmma\.fence\.sync\.aligned;)", r"@%p1 \1 @!%p1 ret;")),
        PtxError,
    ),
    "out of bounds": (
        *("matmul", without(r"(ld\.global\.v\d\.b32[^;]*\+ )0 \]", r"\g<1>1048576 ]")),
        MemoryFault,
    ),
    "not aligned": (
        *("matmul", without(r"(ld\.global\.v\d\.b32[^;]*\+ )0 \]", r"\g<1>4 ]")),
        MemoryFault,
    ),
    "past shared memory": (
        *("copy", without(r"(ld\.shared\.v4\.b32[^;]*\[%r\d+)\]", r"\1+262144]")),
        MemoryFault,
    ),
    "more registers": (
        *("matmul", without(r"(setmaxnreg\.inc\S*)\s+\d+;", r"\1 256;")),
        Deadlock,
    ),
    "more registers than it began with": ("matmul", with_registers(240, 32), Deadlock),
    "a fragment's order": (
        *("attention", without(r"(mma_async[^;]*\}, \{)(%r\d+),(%r\d+)", r"\1\3,\2")),
        AssertionError,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs(bug):
    name, edit, error = BUGS[bug]
    with pytest.raises(error):
        run(name, edit=edit)


def test_a_slot_freed_by_one_warp_before_others_have_read_it():
    """Found by chance alone, when warps of a warpgroup are apart."""
    with pytest.raises((PtxError, AssertionError)):
        for seed in range(20):
            run("copy", seed, without(r"bar\.sync\s+\d+, 128;"))


def test_an_error_names_the_instruction_and_the_line():
    name, edit, error = BUGS["out of bounds"]
    with pytest.raises(error, match=r"ld\.global.* of hopper_kernels\.py:\d+.*bytes at 0x"):
        run(name, edit=edit)


# Kernels of a few lines

ENTRY = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 x)
.reqntid {threads}
{{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
ld.param.b64 %rd1, [x];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
{body}
ret;
}}
"""


def run_lines(body, threads=64, shared=256, seed=None, most_rounds=200):
    x = torch.zeros(threads, dtype=torch.int32)
    ptx = ENTRY.format(body=body, threads=threads)
    how = dict(shared=shared, seed=seed, most_rounds=most_rounds)
    machine_of(ptx, [x.data_ptr()], (1, 1, 1), GlobalMemory([x]), **how).run()
    return x.numpy()


EXCHANGE = """
shl.b32 %r2, %r1, 2; mov.b32 %r3, global_smem; add.s32 %r2, %r2, %r3;
st.shared.b32 [%r2], %r1;
{barrier}
xor.b32 %r2, %r2, 128; ld.shared.b32 %r4, [%r2];
st.global.b32 [%rd3], %r4;
"""


def test_a_barrier_of_two_warps():
    found = run_lines(EXCHANGE.format(barrier="bar.sync 0;"))
    assert (found == np.arange(64) ^ 32).all()


def test_what_is_written_over_needs_the_fence_of_the_last_writer_alone():
    """Warp 5 copies, all of a warpgroup fence, and three of them clear what one of them may not."""
    memory, first, rows = SharedMemory(64), np.array([SHARED]), np.zeros((1, 16), np.uint8)
    readers, units = [0, 1, 2, 3], np.arange(SHARED, SHARED + 16)
    memory.store(first, rows, "copies", np.array([5]))
    with pytest.raises(AsyncFault, match="wgmma reads byte 0"):
        memory.check_fenced(units, readers, "wgmma")
    memory.fence(np.array(readers))
    memory.check_fenced(units, readers, "wgmma")
    memory.store(first, rows, "clears", np.array([2]))
    with pytest.raises(AsyncFault):
        memory.check_fenced(units, readers, "wgmma")
    memory.fence(np.array([1, 2, 3]))
    memory.check_fenced(units, readers, "wgmma")
    memory.store(first, rows, "copies", np.array([5]))
    memory.store(first, rows[:, :4], "clears in part", np.array([2]))
    memory.fence(np.array([1, 2, 3]))
    with pytest.raises(AsyncFault):  # the rest is still what warp 5 wrote
        memory.check_fenced(units[:8], readers, "wgmma")


def test_shared_memory_begins_poisoned():
    """One warp reads before the other has written, in some order."""
    runs = [run_lines(EXCHANGE.format(barrier=""), seed=seed) for seed in range(20)]
    assert any((x == -1).any() for x in runs)


@pytest.mark.parametrize(
    "barrier, error",
    [
        ("bar.sync 1, 96;", Deadlock),
        ("bar.sync 1, 32; bar.sync 1, 33;", BarrierFault),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bra HERE; bar.sync 0; HERE:", Divergence),
        ("LOOP: ld.shared.b32 %r4, [%r2]; setp.ne.b32 %p1, %r4, 99; @%p1 bra LOOP;", Deadlock),
        ("mbarrier.arrive.shared.b64 _, [%r3];", BarrierFault),
        ("st.shared.b32 [%r2+129], %r1;", MemoryFault),
    ],
)
def test_errors_have_names(barrier, error):
    with pytest.raises(error):
        run_lines(EXCHANGE.format(barrier=barrier))


def test_lanes_meet_where_branches_join():
    """Some leave a loop's body for code behind the loop, and come back into it, as compilers place
    what is seldom executed.
    """
    found = run_lines("""
    mov.b32 %r3, 0; mov.b32 %r4, 0;
    LOOP:
    setp.lt.u32 %p1, %r1, 7; @%p1 bra SELDOM;
    BACK:
    add.s32 %r3, %r3, 1; bar.sync 0;
    setp.lt.u32 %p2, %r3, 3; @%p2 bra LOOP;
    bra DONE;
    SELDOM:
    add.s32 %r4, %r4, 10; bra BACK;
    DONE:
    add.s32 %r4, %r4, %r3; st.global.b32 [%rd3], %r4;
    """)
    assert (found[:7] == 33).all() and (found[7:] == 3).all()


def test_lanes_that_leave_a_loop_wait_behind_it():
    """Also where the code behind it comes first in the text, and of a loop in another one."""
    found = run_lines("""
    mov.b32 %r3, 0; mov.b32 %r4, 0;
    bra OUTER;
    BEHIND:
    bar.sync 0; add.s32 %r4, %r4, 100;
    setp.ge.u32 %p1, %r4, 300; @%p1 bra DONE;
    OUTER:
    mov.b32 %r3, 0;
    INNER:
    setp.ge.u32 %p1, %r3, %r1; @%p1 bra BEHIND;
    add.s32 %r3, %r3, 1; add.s32 %r4, %r4, 0;
    bra INNER;
    DONE:
    add.s32 %r4, %r4, %r3; st.global.b32 [%rd3], %r4;
    """)
    assert found.tolist() == [300 + n for n in range(len(found))]


def test_phases_of_an_mbarrier():
    """Warp 1 waits for two phases, each of 32 arrivals of warp 0."""
    found = run_lines("""
    mov.b32 %r3, global_smem;
    setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r3], 32; bar.sync 0;
    setp.ge.u32 %p2, %r1, 32; @%p2 bra WAITS;
    st.shared.b32 [%r3+16], 5; mbarrier.arrive.shared::cta.b64 _, [%r3];
    bar.sync 0;
    st.shared.b32 [%r3+16], 6; mbarrier.arrive.shared::cta.b64 _, [%r3];
    bra DONE;
    WAITS:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; ld.shared.b32 %r4, [%r3+16]; bar.sync 0;
    mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 1; ld.shared.b32 %r5, [%r3+16];
    mad.lo.s32 %r4, %r4, 10, %r5; st.global.b32 [%rd3], %r4;
    DONE:
    """)
    assert (found[32:] == 56).all()


# TMA


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("first", [(0, 0), (16, 3), (-4, -2), (40, 9)])
def test_boxes(swizzle, first, monkeypatch):
    """To shared memory and back, out of bounds zeros, which are not written back; a swizzle
    permutes 16-byte units.
    """
    width = (swizzle or 64) // 2
    x = torch.arange(12 * 48, dtype=torch.int16).reshape(12, 48)
    y = torch.full_like(x, -1)
    maps = [
        TensorMap(t.data_ptr(), (48, 12), (96,), (width, 8), 2, swizzle, b"\0\0") for t in (x, y)
    ]
    column, row = first
    body = f"""
    mov.b32 %r3, global_smem; setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3+4096], 1;
    fence.proxy.async.shared::cta; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3+4096], {width * 16};
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r3], [%rd1, {{{column}, {row}}}], [%r3+4096];
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3+4096], 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {{{column}, {row}}}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    """
    ptx = f"""
    .extern .shared .align 16 .b8 global_smem[];
    .visible .entry kernel(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128]) .reqntid 32
    {{ .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    mov.b64 %rd1, a; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, b; mov.u32 %r1, %tid.x;
    {body} ret; }}
    """
    ended = []
    monkeypatch.setattr(Cta, "check_end", lambda cta: ended.append(cta))
    machine_of(ptx, maps, (1, 1, 1), GlobalMemory([x, y]), shared=8192).run()
    expected = np.zeros((8, width), np.int16)
    for i in range(8):
        for j in range(width):
            if 0 <= row + i < 12 and 0 <= column + j < 48:
                expected[i, j] = x[row + i, column + j]
                assert y[row + i, column + j] == x[row + i, column + j]
    places = swizzled(1024 + 2 * np.arange(8 * width), swizzle)
    held = ended[0].shared.bytes.view(np.int16)
    assert (held[places // 2].reshape(8, width) == expected).all()
    assert (y != -1).sum() == (expected != 0).sum() + (column <= 0 and row <= 0)  # x[0, 0] is 0
