"""The interpreter computes what torch computes, and refuses what a GPU would get wrong."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from testing.jitted import Flags, Operands, Strided, fresh, tile_pointers, update

from tilewise.testing import build, interpret, interpreter_is_on, interpreting, use_interpreter

LOW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def copy_kernel(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    x = tl.load(src + offs, mask=keep)
    tl.store(dst + offs, x.to(dst.dtype.element_ty), mask=keep)


def copied(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    interpret(copy_kernel)[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


# ---- low precision


def floats(limit):
    scales = 2.0 ** torch.arange(-20, 20).float()
    x = torch.cat([torch.randn(50, 40) * scales, scales[None], -scales[None]]).flatten()
    edges = torch.tensor([0.0, -0.0, 0.12376, 1.00390625, 1.01171875, 448.0, limit, -limit])
    return torch.cat([x, edges]).clamp(-limit, limit)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_casts_to_low_precision_are_torchs(dtype):
    x = floats(torch.finfo(dtype).max)
    assert torch.equal(copied(x, dtype).float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_casts_from_every_low_precision_value_are_torchs(dtype):
    wide = dtype.itemsize == 2
    bits = torch.arange(2**16 if wide else 2**8).to(torch.int16 if wide else torch.int8)
    x = bits.view(dtype)
    torch.testing.assert_close(copied(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float64], ids=str)
def test_bfloat16_to_and_from_other_types(dtype):
    x = torch.tensor([-300.0, -2.5, 0.0, 1.0, 77.7, 1e4])
    assert torch.equal(copied(x.bfloat16(), dtype), x.bfloat16().to(dtype))
    assert torch.equal(copied(x.to(dtype), torch.bfloat16), x.to(dtype).bfloat16())


def test_a_cast_to_fp8_saturates():
    x = torch.tensor([1e6, -1e6, float("inf")])
    assert copied(x, torch.float8_e4m3fn).tolist() == [448.0, -448.0, 448.0]


@triton.jit
def arithmetic_kernel(x, y, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    a, b = tl.load(x + offs), tl.load(y + offs)
    tl.store(out + offs, a + b)
    tl.store(out + N + offs, a * b - 1.5)
    tl.store(out + 2 * N + offs, tl.maximum(a, b))
    tl.store(out + 3 * N + offs, tl.where(a < b, a, -b))
    tl.store(out + 4 * N + offs, tl.abs(a))


def test_bfloat16_arithmetic_rounds_each_step():
    x, y = torch.randn(2, 64).bfloat16()
    out = torch.empty(5, 64, dtype=torch.bfloat16)
    interpret(arithmetic_kernel)[(1,)](x, y, out, N=64)
    expected = [x + y, x * y - 1.5, torch.maximum(x, y), torch.where(x < y, x, -y), x.abs()]
    assert torch.equal(out, torch.stack(expected))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    offs = tl.arange(0, N)
    tile = offs[:, None] * N + offs[None, :]
    acc = tl.dot(tl.load(a + tile), tl.load(b + tile))
    tl.store(c + tile, acc.to(c.dtype.element_ty))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_dot_of_low_precision_sums_in_float32(dtype):
    a, b = torch.randn(2, 32, 32).to(dtype)
    c = torch.empty(32, 32)
    interpret(dot_kernel)[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def maximum_kernel(x, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, tl.maximum(tl.load(x + offs), 0.0))


def test_maximum_drops_nan_as_a_gpu_does():
    out = torch.empty(2)
    interpret(maximum_kernel)[(1,)](torch.tensor([float("nan"), -1.0]), out, N=2)
    assert out.tolist() == [0.0, 0.0]


# ---- what is checked


@triton.jit
def touch_kernel(x, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    if KIND == "load":
        tl.load(x + offs, mask=keep)
    elif KIND == "store":
        tl.store(x + offs, 1.0, mask=keep)
    elif KIND == "atomic":
        tl.atomic_add(x + offs, 1.0, mask=keep)
    elif KIND == "negative load":
        tl.load(x - 1 - offs, mask=keep)
    elif KIND == "unmasked load":
        tl.load(x + offs)


@pytest.mark.parametrize("kind", ["load", "store", "atomic"])
def test_an_address_past_the_end_is_named(kind):
    x = torch.zeros(12)
    interpret(touch_kernel)[(2,)](x, 12, KIND=kind, BLOCK=8)
    with pytest.raises(IndexError, match=rf"{kind} in program \(1, 0, 0\): 1 of 5 .* end .* of x"):
        interpret(touch_kernel)[(2,)](x, 13, KIND=kind, BLOCK=8)


def test_addresses_before_the_start_and_unmasked_ones():
    x = torch.zeros(12)
    with pytest.raises(IndexError, match="load .*: 3 of 3 .* before the storage of x"):
        interpret(touch_kernel)[(1,)](x, 3, KIND="negative load", BLOCK=8)
    with pytest.raises(IndexError, match="load .*: 4 of 8"):
        interpret(touch_kernel)[(2,)](x, 0, KIND="unmasked load", BLOCK=8)


@triton.jit
def compare_and_swap_kernel(x, at):
    tl.atomic_cas(x + at, 0, 7)


def test_compare_and_swap_is_checked():
    x = torch.zeros(4, dtype=torch.int32)
    interpret(compare_and_swap_kernel)[(1,)](x, 3)
    assert x.tolist() == [0, 0, 0, 7]
    with pytest.raises(IndexError, match="atomic"):
        interpret(compare_and_swap_kernel)[(1,)](x, 4)


def test_an_element_that_begins_inside_but_ends_outside_is_caught():
    bytes_ = torch.zeros(10, dtype=torch.uint8)
    x = torch.empty(0).set_(bytes_.untyped_storage(), 0, (2,))
    interpret(touch_kernel)[(1,)](x, 2, KIND="load", BLOCK=4)
    with pytest.raises(IndexError, match="1 of 3"):
        interpret(touch_kernel)[(1,)](x, 3, KIND="load", BLOCK=4)


@triton.jit
def descriptor_kernel(desc, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tile = desc.load([0, N])
    tl.store(out + offs[:, None] * N + offs[None, :], tile)


def test_host_descriptors_pad_with_zeros():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.randn(4, 12)
    out = torch.empty(8, 8)
    interpret(descriptor_kernel)[(1,)](TensorDescriptor.from_tensor(x, [8, 8]), out, N=8)
    expected = torch.zeros(8, 8)
    expected[:4, :4] = x[:, 8:]
    assert torch.equal(out, expected)


@triton.jit
def overflow_kernel(out, n, stride, WIDE: tl.constexpr):
    for i in range(n, n + 1):
        index = i.to(tl.int64) if WIDE else i
        tl.store(out, index * stride)


def test_int32_overflow_raises_and_int64_does_not():
    out = torch.zeros(1, dtype=torch.int64)
    interpret(overflow_kernel)[(1,)](out, 2**20, 2**12, WIDE=True)
    assert out.item() == 2**32
    with pytest.raises(AssertionError, match="overflow"):
        interpret(overflow_kernel)[(1,)](out, 2**20, 2**12, WIDE=False)


@triton.jit
def condition_kernel(x, HOW: tl.constexpr):
    offs = tl.arange(0, 4)
    if HOW == "and":
        keep = (offs > 0) and (offs < 3)
    elif HOW == "chain":
        keep = 0 < offs < 3
    else:
        keep = (offs > 0) & (offs < 3)
    tl.store(x + offs, 1.0, mask=keep)


def test_a_block_is_no_condition():
    x = torch.zeros(4)
    interpret(condition_kernel)[(1,)](x, HOW="&")
    assert x.tolist() == [0, 1, 1, 0]
    with pytest.raises(TypeError, match="write `&`"):
        interpret(condition_kernel)[(1,)](x, HOW="and")
    with pytest.raises(TypeError, match="write `&`"):
        interpret(condition_kernel)[(1,)](x, HOW="chain")


# ---- arguments


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


def test_random_bits_are_philox():
    @triton.jit
    def kernel(out, seed, N: tl.constexpr):
        offs = tl.arange(0, N)
        tl.store(out + offs, tl.randint(seed, offs))

    out = torch.zeros(4, dtype=torch.int32)
    interpret(kernel)[(1,)](out, 0, N=4)
    # First word of Philox-4x32-10 with key 0 and counter 0, from the Random123 test vectors.
    assert out.view(torch.uint32)[0].item() == 0x6627E8D5


# ---- around it


def test_a_kernel_compiles_before_and_after_it_is_interpreted():
    x, y = torch.randn(2, 16)
    first = build(copy_kernel, x, y, 16, on="sm80", BLOCK=16).asm["ptx"]
    assert torch.equal(copied(x, torch.float32), x)
    assert build(copy_kernel, x, y, 16, on="sm90", BLOCK=16).asm["ptx"]
    # By another name, or the kernel would only remember.
    again = build(triton.jit(copy_kernel.fn), x, y, 16, on="sm80", BLOCK=16).asm["ptx"]
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
    assert copied(torch.ones(2), torch.float32).tolist() == [1, 1]
    assert "InterpreterBuilder" not in globals() and "_patch_lang" not in globals()


def test_the_switch_nests_and_ends_after_an_error():
    assert not interpreter_is_on()
    with use_interpreter(), use_interpreter():
        assert interpreter_is_on()
    assert not interpreter_is_on()
    with pytest.raises(ZeroDivisionError), use_interpreter():
        assert 1 / 0
    assert not interpreter_is_on()


def test_the_switch_imports_neither_triton_nor_numpy():
    code = (
        "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
        "import importlib.util as u, pathlib, sys\n"
        "spec = u.spec_from_file_location('switch', sys.argv[1])\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "assert not module.interpreter_is_on()"
    )
    from tilewise.testing import switch

    subprocess.run([sys.executable, "-c", code, switch.__file__], check=True)


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
        interpret(touch_kernel)[(1,)](torch.zeros(1, device="meta"), 1, KIND="load", BLOCK=1)
