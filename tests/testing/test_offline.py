"""Kernels compile for GPUs that are not there, and the figures read from them are right."""

import types

import pytest
import torch
import triton
import triton.language as tl
from helpers.jitted import Flags, Operands, Strided, tile_pointers
from helpers.tiers import sample

from gluon_emulator.hopper import machine
from tilewise.testing import SMEM_LIMIT, TARGETS, build, interpret, offline, stats

pytestmark = pytest.mark.compile


@triton.jit
def dot_kernel(a, b, c, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(tile_pointers(a.a, offs, offs))
    y = tl.load(tile_pointers(a.b, offs, offs))
    acc = tl.dot(x, y)
    if FLAGS.CAUSAL:
        acc = tl.where(offs[:, None] >= offs[None, :], tl.exp2(acc + FLAGS.SHIFT), 0.0)
    tl.store(tile_pointers(c, offs, offs), acc)


def arguments(block=64):
    a, b = torch.randn(2, block, block).half()
    c = torch.zeros(block, block)
    return Operands(Strided(a, block), Strided(b, block)), None, Strided(c, block)


@pytest.mark.parametrize("target", sample(TARGETS, "sm90", "sm100", "gfx950"))
def test_named_tuples_compile_for_every_target(target):
    flags = Flags(True, 0.5)
    compiled = build(dot_kernel, *arguments(), on=target, FLAGS=flags, BLOCK=64, num_warps=4)
    found = stats(compiled)
    assert found["warps"] == 4
    assert 0 < found["smem"] <= SMEM_LIMIT[target]
    if target.startswith("gfx"):
        assert found["MFMA"] > 0 and found["vgpr_count"] > 16 and found["vgpr_spill_count"] == 0
        return
    matmul = {"sm90": "HGMMA", "sm100": "UTCHMMA"}.get(target, "HMMA")
    assert found[matmul] > 0
    assert found["MUFU.EX2"] > 0
    assert 16 < found["registers"] <= 255
    assert (found["spill_stores"], found["spill_loads"]) == (0, 0)
    assert found["wgmma_serialized"] is False


@pytest.mark.parametrize("target", sample(["sm80", "sm90"], "sm90"))
def test_spills_are_seen(target):
    # 128x128 float32 sums on 4 warps want 128 registers a thread for themselves.
    args = arguments(128)
    compiled = build(
        dot_kernel, *args, on=target, FLAGS=Flags(False, 0.0), BLOCK=128, num_warps=4, maxnreg=96
    )
    found = stats(compiled)
    assert found["registers"] <= 96
    assert found["spill_stores"] > 0 and found["spill_loads"] > 0
    assert found["LDL"] > 0 and found["STL"] > 0


def test_a_kernel_built_twice_keeps_its_log():
    args = arguments(32)
    options = {"FLAGS": Flags(False, 1.0), "BLOCK": 32}
    first = stats(build(dot_kernel, *args, on="sm89", **options))
    assert stats(build(dot_kernel, *args, on="sm89", **options)) == first


def test_dtypes_stand_for_pointers():
    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.store(x + offs, tl.load(x + offs, mask=offs < n) * 2, mask=offs < n)

    compiled = build(kernel, torch.bfloat16, 100, on="sm90", BLOCK=128)
    assert "bf16" in compiled.asm["ttir"]


def test_a_kernel_is_interpreted_between_two_builds():
    operands, none, c = arguments(16)
    flags = Flags(False, 0.0)
    build(dot_kernel, operands, none, c, on="sm90", FLAGS=flags, BLOCK=16)
    interpret(dot_kernel)[(1,)](operands, none, c, FLAGS=flags, BLOCK=16)
    expected = operands.a.ptr.float() @ operands.b.ptr.float()
    torch.testing.assert_close(c.ptr, expected, rtol=1e-4, atol=1e-4)
    assert stats(build(dot_kernel, operands, none, c, on="sm80", FLAGS=flags, BLOCK=16))["HMMA"]


def test_the_emulator_has_the_limit_of_the_table():
    """It imports nothing of the library, the table neither."""
    assert machine.SHARED_MEMORY == SMEM_LIMIT["sm90"]


def test_every_target_has_a_limit_and_another_is_refused():
    assert SMEM_LIMIT.keys() == TARGETS.keys()
    with pytest.raises(ValueError, match="no target 'sm70'; known are sm80"):
        build(dot_kernel, on="sm70")


def test_what_does_not_compile_raises():
    @triton.jit
    def kernel(x):
        tl.store(x, tl.load(undefined_name))  # noqa: F821

    with pytest.raises(triton.CompilationError, match="undefined_name"):
        build(kernel, torch.empty(1))


def test_figures_need_a_kernel_from_build():
    class Plain:
        class metadata:
            shared, num_warps = 0, 4

        asm = types.MappingProxyType({"cubin": b""})

    with pytest.raises(ValueError, match="compiled by `build`"):
        stats(Plain)


@pytest.mark.parametrize(("meeting", "apart"), [(".L_x_1", 0), (".L_x_2", 1)])
def test_copies_of_parted_lanes(meeting, apart):
    sass = f"""
        BSSY B0, `({meeting}) ;
        UTMALDG.4D [UR8], [UR12] ;
   @P2  BRA `(.L_x_1) ;
        ATOMG.E.ADD.STRONG.GPU PT, R3, desc[UR14][R2.64], R5 ;
.L_x_1:
        BSYNC B0 ;
        UTMALDG.4D [UR16], [UR24] ;
.L_x_2:
        EXIT ;
"""
    assert offline._copies_apart(sass) == apart


@pytest.mark.parametrize(("used", "idle"), [("%full", 1), ("%full, %empty", 0)])
def test_unused_barriers(used, idle):
    ttgir = f"""
        %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
        %empty = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
        %tile = ttg.local_alloc : () -> !ttg.memdesc<64x64xbf16, #shared, #smem, mutable>
        %0 = ttg.memdesc_index %full[%c0] : !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
        ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
        %1 = ttg.memdesc_index %empty[%c0] : !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
        ttng.init_barrier %1, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
        ttg.warp_specialize({used}, %tile)
"""
    assert offline._idle_barriers(ttgir) == idle
