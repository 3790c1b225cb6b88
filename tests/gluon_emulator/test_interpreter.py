"""The interpreter computes what torch computes, and leaves Triton as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from helpers.jitted import Flags, Operands, Strided, fresh, tile_pointers, update

from tilewise.testing import build, interpret, interpreting


@triton.jit
def copy_kernel(src, dst, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(dst + offs, tl.load(src + offs))


@triton.jit
def logsumexp_kernel(x, out, blocks, scale, extra, FLAGS: tl.constexpr, flags, BLOCK: tl.constexpr):
    """Online logsumexp over the column blocks of x.a and x.b, masked if the flags say so."""
    offs = tl.arange(0, BLOCK)
    state = fresh(BLOCK)
    for i in tl.range(0, blocks):
        cols = i * BLOCK + offs
        a = tl.load(tile_pointers(x.a, offs, cols))
        b = tl.load(tile_pointers(x.b, offs, cols))
        s = (a + b) * scale
        if FLAGS.CAUSAL and flags.CAUSAL:
            s = tl.where(offs[:, None] + FLAGS.SHIFT >= cols[None, :], s, -float("inf"))
        if extra is not None:
            s += tl.load(extra + offs)[:, None]
        state = update(state, s)
    tl.store(out.ptr + offs * out.row, state.m + tl.log(state.l))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
def test_nested_named_tuples_and_constexpr_flags(causal, with_extra):
    a, b = torch.randn(2, 40, 48)[:, ::2]
    out = torch.zeros(16, 3)
    extra = torch.randn(16) if with_extra else None
    x = Operands(Strided(a, a.stride(0)), Strided(b, b.stride(0)))
    args = (x, Strided(out, 3), 3, 0.5, extra)
    flags = Flags(tl.constexpr(causal), 5)
    interpret(logsumexp_kernel)[(1,)](*args, FLAGS=Flags(True, 5), flags=flags, BLOCK=16)
    s = (a[:16] + b[:16]) * 0.5
    if causal:
        s = s.masked_fill(~torch.ones(16, 48).tril(5).bool(), -float("inf"))
    if with_extra:
        s = s + extra[:, None]
    torch.testing.assert_close(out[:, 0], s.logsumexp(1))
    assert (out[:, 1:] == 0).all()


@triton.jit
def scalars_kernel(out, flag, number, n, ptr_or_none):
    if flag:
        tl.store(out, number.to(tl.float16))
    total = 0
    for i in range(n):
        total += i
    while total > 100:
        total -= 100
    if ptr_or_none is None:
        tl.store(out + 1, total.to(tl.float16))


def test_bool_float_int_and_none_arguments():
    out = torch.zeros(2, dtype=torch.float16)
    interpret(scalars_kernel)[(1,)](out, True, 0.1, 21, None)
    assert out.tolist() == [torch.tensor(0.1).half().item(), 10.0]
    interpret(scalars_kernel)[(1,)](out.zero_(), False, 0.1, 3, out)
    assert out.tolist() == [0.0, 0.0]


def apply_mod(x, mod):
    @triton.jit
    def kernel(x, SCALE: tl.constexpr, MOD: tl.constexpr):
        offs = tl.arange(0, 8)
        tl.store(x + offs, MOD(tl.load(x + offs), offs) * SCALE)

    interpret(kernel)[lambda meta: (meta["SCALE"] - 2,)](x, SCALE=3, MOD=mod)


def test_functions_as_arguments_with_captured_constants():
    def shifted(by):
        @triton.jit
        def mod(x, idx):
            zero = 0
            return x + idx + by + zero.to(tl.float32)

        return mod

    for by in (tl.constexpr(1), tl.constexpr(10)):
        x = torch.zeros(8)
        apply_mod(x, shifted(by))
        assert x.tolist() == [3.0 * (i + by.value) for i in range(8)]


@triton.jit
def grid_kernel(out, nx, ny):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out + (z * ny + y) * nx + x, tl.atomic_add(out + nx * ny * 2, 1))


def test_the_first_grid_axis_runs_fastest():
    out = torch.zeros(13, dtype=torch.int32)
    interpret(grid_kernel)[(3, 2, 2)](out, 3, 2, num_warps=8)
    assert out.tolist() == [*range(12), 12]


@triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(x, BLOCK + EVEN)


def test_autotuned_kernels_run_their_first_configuration():
    x = torch.zeros(1, dtype=torch.int32)
    interpret(tuned_kernel)[(1,)](x, 24)
    assert x.item() == 9


def test_types_that_are_known_are_those_that_triton_makes():
    """Shapes, sizes, names and numpy's dtypes, at first and when they come again."""
    interpreter = triton.runtime.interpreter
    kinds = [tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.float16), tl.float8e5]

    def made():
        blocks = [tl.block_type(x, shape) for x in kinds for shape in ([16, 32], [tl.constexpr(1)])]
        tensors = [tl.tensor(None, x) for x in (*kinds, *blocks)]
        said = [(list(x.shape), x.numel, str(x.dtype), str(x.type)) for x in tensors]
        blocks_said = [(str(x), x.numel, x.scalar, list(x.shape)) for x in blocks]
        return said, blocks_said, [interpreter._get_np_dtype(x) for x in (*kinds, *blocks)]

    shipped = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    expected = made()
    with interpreting(()):
        assert made() == made() == expected
    assert shipped == (interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__)


def test_random_bits_are_philox():
    @triton.jit
    def kernel(out, seed, N: tl.constexpr):
        offs = tl.arange(0, N)
        tl.store(out + offs, tl.randint(seed, offs))

    out = torch.zeros(4, dtype=torch.int32)
    interpret(kernel)[(1,)](out, 0, N=4)
    # First word of Philox-4x32-10 with key 0 and counter 0, from the Random123 test vectors.
    assert out.view(torch.uint32)[0].item() == 0x6627E8D5


def test_kernels_made_under_tritons_own_switch_run_too():
    this = Path(__file__)
    code = f"""if True:
        import runpy, sys
        sys.path.insert(0, {str(this.parent.parent)!r})
        tests = runpy.run_path({str(this)!r})
        assert type(tests["logsumexp_kernel"]).__name__ == "InterpretedFunction"
        tests["test_nested_named_tuples_and_constexpr_flags"](True, True)
        tests["test_random_bits_are_philox"]()
        """
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_a_kernel_compiles_before_and_after_it_is_interpreted():
    x, y = torch.randn(2, 16)
    first = build(copy_kernel, x, y, on="sm80", N=16).asm["ptx"]
    interpret(copy_kernel)[(1,)](x, y, N=16)
    assert torch.equal(x, y)
    assert build(copy_kernel, x, y, on="sm90", N=16).asm["ptx"]
    # By another name, or the kernel would only remember.
    again = build(triton.jit(copy_kernel.fn), x, y, on="sm80", N=16).asm["ptx"]
    assert again == first


def test_triton_is_left_as_it_was():
    before = tl.load, tl.tensor.__dict__.get("__bool__"), triton.knobs.runtime.interpret
    for fail in (False, True):
        try:
            with interpreting([]):
                assert tl.load is not before[0]
                if fail:
                    raise KeyError
        except KeyError:
            pass
        now = tl.load, tl.tensor.__dict__.get("__bool__"), triton.knobs.runtime.interpret
        assert now == before
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        update(None, None)


def test_nothing_of_the_interpreter_leaks_into_the_kernels_module():
    interpret(copy_kernel)[(1,)](torch.ones(2), torch.ones(2), N=2)
    assert "InterpreterBuilder" not in globals() and "_patch_lang" not in globals()


def test_a_tensor_beyond_int32_need_not_be_in_memory(tmp_path):
    size = 2**31 + 8
    huge = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size)
    out = torch.zeros(1)

    @triton.jit
    def kernel(x, out, last):
        tl.store(x + last, 3.0)
        tl.store(out, tl.load(x + last))

    interpret(kernel)[(1,)](huge, out, size - 1)
    assert out.item() == huge[-1].item() == 3.0


def test_wrong_kernels_and_devices_are_refused():
    with pytest.raises(TypeError, match="expected a @triton.jit kernel, got function"):
        interpret(lambda x: x)[(1,)](torch.zeros(1))
    with pytest.raises(ValueError, match="CPU tensors, got one on meta"):
        interpret(copy_kernel)[(1,)](torch.ones(2), torch.ones(2, device="meta"), N=2)


_THEN_COMPILES = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from tilewise.testing import interpret

@triton.jit
def copy_kernel(x, y):
    y.store([0, 0], x.load([0, 0]))

x = torch.randn(16, 16)
y = torch.zeros(16, 16)
interpret(copy_kernel)[(1,)](*[TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, y)])
assert torch.equal(x, y)
from triton.experimental.gluon import language as gl
assert gl.static_range is tl.static_range, "Gluon was imported while Triton meant something else"
"""


def test_gluon_compiles_after_it(tmp_path):
    """Triton's interpreter imports Gluon when it meets a descriptor, and Gluon takes over names of
    `triton.language` as they are at that moment.
    """
    script = tmp_path / "script.py"  # a kernel's source must be in a file
    script.write_text(_THEN_COMPILES)
    subprocess.run([sys.executable, script], check=True)


@triton.jit
def _two_of(a, b, other_a, other_b):
    """Of which the order counts."""
    return a * 0.5 + other_a, tl.maximum(b, other_b) - 1


@triton.jit
def reduce_kernel(x, out, AXIS: tl.constexpr):
    offs = tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tile = tl.load(x + offs)
    first, second = tl.reduce((tile, tile * 3), AXIS, _two_of)
    kept, _ = tl.reduce((tile, tile * 3), AXIS, _two_of, keep_dims=True)
    rows = tl.arange(0, 4 if AXIS == 0 else 8)
    tl.store(out + rows, first)
    tl.store(out + 8 + rows, second)
    tl.store(out + 16 + rows, kept.reshape(rows.shape))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_of_its_own_reduces_in_order(axis, dtype):
    x, out = torch.randn(8, 4).to(dtype), torch.zeros(24, dtype=dtype)
    interpret(reduce_kernel)[(1,)](x, out, AXIS=axis)
    rows = x.unbind(axis)
    first, second = rows[0], rows[0] * 3
    for row in rows[1:]:
        first, second = first * 0.5 + row, torch.maximum(second, row * 3) - 1
    count = len(first)
    assert torch.equal(out[:count], first) and torch.equal(out[16 : 16 + count], first)
    assert torch.equal(out[8 : 8 + count], second)


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reduce_all_kernel(x, out):
    tile = tl.load(x + tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(out, tl.reduce(tile, None, _larger))


def test_a_function_of_its_own_reduces_all():
    x, out = torch.randn(8, 4), torch.zeros(1)
    interpret(reduce_all_kernel)[(1,)](x, out)
    assert out.item() == x.max()
