"""The emulator's arithmetic is Triton's: the same kernels in Triton's interpreter give the same."""

import operator

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_emulator.hopper import emulate
from tilewise.testing import interpret

pytestmark = pytest.mark.emulator


def same_in_both(kernel, outputs, *args, grid=(1,), **constants):
    """Runs a kernel in both, with fresh outputs, and compares these bit by bit."""
    results = []
    for run in (interpret(kernel), emulate(kernel)):
        made = [torch.zeros(n, dtype=dtype) for n, dtype in outputs]
        run[grid](*args, *made, **constants)
        results.append(made)
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return results[1]


@triton.jit
def division_kernel(a, b, quotients, remainders, scalars, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(a + offs)
    y = tl.load(b + offs)
    tl.store(quotients + offs, x // y)
    tl.store(remainders + offs, x % y)
    for i in range(BLOCK):
        tl.store(scalars + 2 * i, tl.load(a + i) // tl.load(b + i))
        tl.store(scalars + 2 * i + 1, tl.load(a + i) % tl.load(b + i))


def test_integer_division_truncates():
    a = torch.tensor([7, -7, 7, -7, 0, 1, -1, 6], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 3, 5, 5, -3], dtype=torch.int32)
    outputs = [(8, torch.int32), (8, torch.int32), (16, torch.int32)]
    quotients, remainders, scalars = same_in_both(division_kernel, outputs, a, b, BLOCK=8)
    assert quotients.tolist() == [3, -3, -3, 3, 0, 0, 0, -2]
    assert remainders.tolist() == [1, -1, 1, -1, 0, 1, -1, 0]
    assert scalars.view(8, 2).tolist() == torch.stack([quotients, remainders], 1).tolist()


@triton.jit
def floats_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + offs)
    halved = 0.5
    tl.store(out + offs, v * 0.3 + 1.0)
    tl.store(out + BLOCK + offs, v * halved)
    tl.store(out + 2 * BLOCK + offs, (v / 3).to(tl.float32) * factor)
    tl.store(out + 3 * BLOCK + offs, tl.where(offs < n, v, float("-inf")))
    tl.store(out + 4 * BLOCK + offs, offs / n)
    tl.store(out + 5 * BLOCK + offs, tl.abs(-v) + tl.maximum(v, 0.25) - tl.minimum(offs, n))
    tl.store(out + 6 * BLOCK + offs, tl.fma(v.to(tl.float32), factor, 1.0))
    tl.store(out + 7 * BLOCK + offs, (factor * factor + n) / 3.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mixed_types_meet_as_in_triton(dtype):
    x = torch.randn(16).to(dtype)

    def run(launch):
        out = torch.zeros(8 * 16)
        launch[(1,)](x, out, 5, 0.1, BLOCK=16)
        return out

    expected, found = run(interpret(floats_kernel)), run(emulate(floats_kernel))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if dtype != torch.float32:  # rounded where Triton rounds
        assert torch.equal(found[16:32], expected[16:32])


@triton.jit
def shapes_kernel(x, out, N: tl.constexpr):
    r = tl.arange(0, N)
    tile = tl.load(x + r[:, None] * N + r[None, :])
    pairs = tl.join(tile, tl.trans(tile))
    low, high = tl.split(tl.permute(tl.reshape(pairs, (N, 2, N)), (0, 2, 1)))
    both = tl.broadcast_to(tl.expand_dims(tl.sum(low, 1), 0), (N, N)) - high.T
    tl.store(out + r[:, None] * N + r[None, :], both + tl.max(tile, 1)[:, None] + tile.sum())
    tl.store(out + N * N + r, tl.min(tile, 0, keep_dims=True).reshape([N]))


def test_shapes_and_reductions():
    x = torch.randint(-50, 50, (64,)).float()
    same_in_both(shapes_kernel, [(72, torch.float32)], x, N=8)


@triton.jit
def prefixes_kernel(x, sums, whole, N: tl.constexpr):
    r = tl.arange(0, N)
    tile = r[:, None] * N + r[None, :]
    tl.store(sums + tile, tl.cumsum(tl.load(x + tile), 1))
    tl.store(sums + N * N + tile, tl.load(x + tile).cumsum(0, reverse=True))
    tl.store(whole + r, tl.cumsum((tl.load(x + r) > 0).to(tl.int8), 0))


def test_prefix_sums():
    x = torch.randint(-50, 50, (64,)).float()
    same_in_both(prefixes_kernel, [(128, torch.float32), (8, torch.int32)], x, N=8)


@triton.jit
def largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def scan_kernel(x, maxima, N: tl.constexpr):
    r = tl.arange(0, N)
    tile = r[:, None] * N + r[None, :]
    tl.store(maxima + tile, tl.associative_scan(tl.load(x + tile), 1, largest))
    backwards = tl.associative_scan(tl.load(x + tile), 0, largest, reverse=True)
    tl.store(maxima + N * N + tile, backwards)


def test_prefix_maxima():
    x = torch.randint(-50, 50, (64,)).float()
    same_in_both(scan_kernel, [(128, torch.float32)], x, N=8)


@triton.jit
def larger(a, i, b, j):
    keep = a >= b
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def reduce_kernel(x, values, places, N: tl.constexpr):
    r = tl.arange(0, N)
    value, place = tl.reduce((tl.load(x + r), r), 0, larger)
    tl.store(values, value)
    tl.store(places, place)


def test_a_reduction_of_the_kernels_own():
    found = same_in_both(
        reduce_kernel, [(1, torch.float32), (1, torch.int32)], torch.arange(8.0).roll(3), N=8
    )
    assert [x.item() for x in found] == [7.0, 2]


@triton.jit
def bits_kernel(x, n, out, N: tl.constexpr):
    r = tl.arange(0, N)
    v = tl.load(x + r)
    tl.store(out + r, (v << 3) ^ (v >> 1) | 5)
    tl.store(out + N + r, ~v & 0xFF)
    tl.store(out + 2 * N + r, v.to(tl.uint32, bitcast=True) >> 4)
    tl.store(out + 3 * N + r, (~(v > 0) & (r != n)).to(tl.int32))
    tl.store(out + 4 * N + r, v.to(tl.float32, bitcast=True).to(tl.int32, bitcast=True))


def test_bits():
    x = torch.tensor([0, 1, -1, 1234567, -1234567, 99, 2**30, -(2**31)], dtype=torch.int32)
    same_in_both(bits_kernel, [(40, torch.int64)], x, 3, N=8)


@triton.jit
def atomics_kernel(counter, total, out):
    tl.store(out + tl.program_id(0) + 4 * tl.program_id(1), tl.num_programs(1))
    tl.atomic_add(counter, 1)
    tl.atomic_max(counter + 1, tl.program_id(0))
    tl.atomic_cas(counter + 2, 0, 7)
    r = tl.arange(0, 4)
    tl.atomic_add(total + r // 2, r.to(tl.float32), mask=r < 3)


def test_atomics_and_the_grid():
    counter = torch.zeros(3, dtype=torch.int32)
    total, out = torch.zeros(2), torch.zeros(8, dtype=torch.int32)
    emulate(atomics_kernel)[(4, 2)](counter, total, out)
    assert counter.tolist() == [8, 3, 7]
    assert total.tolist() == [8.0, 16.0]
    assert out.tolist() == [2] * 8


@gluon.jit
def overflow_kernel(n, x, BLOCK: gl.constexpr, WIDE: gl.constexpr, LOOP: gl.constexpr):
    offs = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [1], [0]))
    if WIDE:
        offs = offs.to(gl.int64)
    if LOOP:
        for i in range(n, n + 2):
            gl.load(x + i * 0)
            gl.store(x, i.to(gl.int64) * 4)
    else:
        gl.load(x + (offs + n) * 0)


def test_int32_overflow():
    x = torch.zeros(1, dtype=torch.int64)
    launch = emulate(overflow_kernel)[(1,)]
    launch(2**31 - 32, x, BLOCK=32, WIDE=False, LOOP=False)
    launch(2**31 - 31, x, BLOCK=32, WIDE=True, LOOP=False)
    launch(2**40, x, BLOCK=32, WIDE=False, LOOP=False)
    with pytest.raises(OverflowError, match="cast to int64 before it"):
        launch(2**31 - 31, x, BLOCK=32, WIDE=False, LOOP=False)
    launch(2**30, x, BLOCK=32, WIDE=False, LOOP=True)
    assert x.item() == 4 * (2**30 + 1)
    with pytest.raises(OverflowError, match="cast to int64 before it"):
        launch(2**31 - 2, x, BLOCK=32, WIDE=False, LOOP=True)


@gluon.jit
def condition_kernel(x):
    if gl.load(x + gl.arange(0, 4, gl.BlockedLayout([1], [32], [1], [0]))) > 0:
        gl.store(x, 1.0)


def test_a_block_is_no_condition():
    with pytest.raises(TypeError, match="write `&`"):
        emulate(condition_kernel)[(1,)](torch.zeros(4))


@gluon.jit
def masked_kernel(x, out, n):
    offs = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out + offs, gl.load(x + offs, mask=offs < n, other=-1.0))
    gl.store(out + 8 + offs, gl.load(x + offs, mask=offs < n), mask=offs < 4)
    gl.device_assert(n < 8, "n is small")


def test_masked_lanes():
    x, out = torch.arange(5.0), torch.zeros(16)
    emulate(masked_kernel)[(1,)](x, out, 3)
    assert out[:8].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert out[8:11].tolist() == [0, 1, 2] and out[11].isnan()  # undefined on a GPU
    with pytest.raises(AssertionError, match="n is small"):
        emulate(masked_kernel)[(1,)](torch.arange(8.0), out, 8)


def test_no_operator_is_forgotten():
    from gluon_emulator.hopper.values import Value

    one = Value(1, tl.int32)
    for name in "add sub mul truediv floordiv mod and_ or_ xor lshift rshift lt ne".split():
        assert isinstance(getattr(operator, name)(one, 1), Value)
        assert isinstance(getattr(operator, name)(1, one), Value)


FACTOR = tl.constexpr(2)


@gluon.jit
def scaled(x):
    return x * FACTOR


@gluon.jit
def scaling_kernel(out):
    gl.store(out, scaled(3))


def test_a_launch_reads_globals_as_they_are(monkeypatch):
    out = torch.zeros(1, dtype=torch.int32)

    def launched():
        emulate(scaling_kernel)[(1,)](out)
        return out.item()

    @gluon.jit
    def negative(x):
        return -x

    assert launched() == launched() == 6
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5))
    assert launched() == 15
    monkeypatch.setitem(globals(), "scaled", negative)
    assert launched() == -3
