"""The kernels' inline assembly, executed: what the emulator puts in its place gives the same."""

import itertools

import numpy as np
import pytest
import torch
from helpers.row_max import LAGS, made_rows, next_max_kernel, run_both
from helpers.tiers import sample

from ptx import assemble, execute
from tilewise.kernels.common import device_words
from tilewise.kernels.hopper import assembly, bias, dependents, hide, rescale, row_max
from tilewise.kernels.hopper.bwd import dropout as bwd_dropout
from tilewise.kernels.hopper.bwd import dropout_bits
from tilewise.kernels.hopper.decode import eight_bits
from tilewise.kernels.hopper.fwd import dropout as fwd_dropout
from tilewise.kernels.hopper.fwd import fp8_operand, pairs, runs, transpose

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = "bf16", "f16"  # as PTX names them
BYTES = np.arange(256, dtype=np.uint8)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1.0, -1.0, 2.0**-126, 448.0]


def text_of(text):
    return str(getattr(text, "value", text))


def floats(count=2048, scale=8.0, seed=0):
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * scale
    values[: len(SPECIAL)] = SPECIAL
    return values


def words(count=2048, seed=1):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def assert_bits(found, expected):
    """Equal bits, but for those of NaN."""
    found, expected = found.contiguous(), expected.contiguous()
    same = found.view(torch.uint8) == expected.view(torch.uint8)
    same = same.unflatten(-1, (-1, found.element_size())).all(-1)
    if found.dtype.is_floating_point:
        same |= found.isnan() & expected.isnan()
    assert same.all(), (found[~same][:8], expected[~same][:8])


def in_registers(tile):
    """(registers, lanes) of a warpgroup's accumulator, (64, N)."""
    register, lane = np.arange(tile.shape[1] // 2)[:, None], np.arange(128)[None, :]
    row = lane // 32 * 16 + lane % 32 // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + lane % 4 * 2 + register % 2
    return tile[row, column]


def of_rows(values, n):
    """The same of a number for each row."""
    return in_registers(np.broadcast_to(values[:, None], (64, 2 * n)))


# Every pattern of bits


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("is_int", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_byte_of_a_cache_is_exact(dtype, is_int, in_order):
    """In all four places of a word, even ones first or in order; NaN stays NaN, -0 negative."""
    several = np.stack([np.roll(BYTES, n) for n in (0, 85, 170, 251)], 1)
    text = text_of(eight_bits.assembly_of(dtype == BF16, is_int, in_order))
    found = np.stack(assemble(text, "=r,=r,r", several.view(np.uint32)[:, 0]), 1)
    expected = tensor(several).view(torch.int8 if is_int else torch.float8_e4m3fn).to(dtype)
    order = [0, 1, 2, 3] if in_order else [0, 2, 1, 3]
    assert_bits(tensor(found).view(dtype), expected[:, order])


def test_every_bf16_is_widened():
    pairs = np.arange(2**16, dtype=np.uint32)
    pairs |= np.uint32(0xA5C30000) ^ pairs << np.uint32(16)
    low, high = assemble(text_of(bias.WIDEN), "=f,=f,r", pairs)
    expected = tensor(pairs.view(np.uint16).reshape(-1, 2)).view(BF16).float()
    assert_bits(tensor(np.stack([low, high], 1)), expected)


# Conversions


def test_exponentials_in_e4m3():
    """Probabilities, as e4m3 and in fp32."""
    y = np.concatenate([floats(4096, 6.0), np.linspace(-30, 12, 4096, dtype=np.float32)])
    y = y.reshape(-1, 4)
    packed, *exact = assemble(fp8_operand.EXPONENTIALS.value, "=r,=f,=f,=f,=f,f,f,f,f", *y.T)
    codes, expected = fp8_operand._in_e4m3(tensor(y))
    expected = torch.where(expected < 2.0**-126, 0.0, expected)  # flushed
    assert_bits(tensor(np.stack(exact, 1)), expected)
    assert_bits(tensor(packed.view(np.uint8).reshape(-1, 4)).view(codes.dtype), codes)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("has_relu", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_conversion_of_pairs(kind, has_relu, is_masked):
    dtype = {"bf16": BF16, "f16": FP16}[kind]
    x, y = floats(seed=2), floats(seed=3)[::-1]
    text = bwd_dropout.conversion(kind, has_relu, is_masked)
    (found,) = assemble(text_of(text), "=r,r,r", x, y)
    expected = bwd_dropout.ASM[text_of(text)](tensor(np.stack([x, y], 1))).to(dtype)
    if has_relu:  # torch's keeps the sign of -0
        expected = torch.where(expected == 0, 0, expected)
    found = tensor(found.view(np.uint16).reshape(-1, 2)).view(dtype)
    assert_bits(torch.where(found == 0, 0, found) if has_relu else found, expected)


# Softmax


@pytest.mark.parametrize("is_pinned", [False, True])
def test_factors(is_pinned):
    """2^difference, and for each warp whether any is not 1."""
    differences = np.zeros((256, 2), np.float32)
    differences[40, 1], differences[100, 0], differences[130, 1] = -3.0, -np.inf, 0.5
    start = np.zeros(256, np.int32)
    found = assemble(
        text_of(rescale.factors_of(is_pinned)),
        *("=f,=f,=r,=r,f,f,r,r", *differences.T, start, start),
    )
    assert_bits(tensor(np.stack(found[:2], 1)), torch.exp2(tensor(differences)))
    by_warp = (differences != 0).reshape(8, 64).any(1).repeat(32)
    assert (found[2] == by_warp).all() and (found[3] == by_warp).all()


@pytest.mark.parametrize("n", rescale._REGISTERS)
def test_rescale(n):
    """Warps that do not need it keep their part."""
    draw = np.random.default_rng(4)
    acc, alpha = (draw.standard_normal(x).astype(np.float32) for x in ((64, 2 * n), 64))
    is_needed = np.repeat([1, 0, 7, 0], 16).astype(np.int32)
    registers = in_registers(acc), of_rows(alpha, n), of_rows(is_needed, n).view(np.float32)
    text, constraints = text_of(rescale.rescale_of(n)), text_of(rescale.in_place(n, "fr"))
    found = assemble(text, constraints, *np.concatenate(registers))
    expected = np.where(is_needed[:, None] != 0, acc * alpha[:, None], acc)
    assert_bits(tensor(np.stack(found)), tensor(in_registers(expected)))


@pytest.mark.parametrize("n", rescale._REGISTERS)
@pytest.mark.parametrize("first, stop, is_pinned", [(0, 1, True), (1, 4, False)])
@pytest.mark.parametrize("by_row", [False, True])
def test_exponentials_of_quarters(n, first, stop, is_pinned, by_row):
    s = np.random.default_rng(6).standard_normal((64, 2 * n)).astype(np.float32) * 20
    scale = np.where(np.arange(64) % 3 == 0, np.float32(0.5), np.float32(0.125))
    scale = scale if by_row else np.full_like(scale, 0.125)
    m = s.max(1) * scale
    registers = np.concatenate([in_registers(s), of_rows(m, n), of_rows(scale, n)])
    text = text_of(rescale.exponentials_of(n, first, stop, is_pinned, by_row))
    constraints = text_of(rescale.in_place(n, "ff"))
    found = assemble(text, constraints, *registers)
    of_rows_alone = (x[:, None] for x in (m, scale))
    expected = rescale.ASM[text](*map(tensor, (s.astype(np.float64), *of_rows_alone)))
    found, expected = np.stack(found), in_registers(expected.float().numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2.0**-126)


@pytest.mark.parametrize("lag", LAGS)
def test_votes_about_maxima(lag):
    """Whether all m of a warp are high enough: -lag is, what is just below it or NaN is not."""
    m = np.full((224, 2), -lag, np.float32)
    m[40, 1], m[70, 0], m[130, 1] = np.nextafter(m[0, 0], -np.inf), np.nan, -np.inf
    m[100, 1], m[170, 0] = -0.0, np.inf
    found = assemble(text_of(row_max.vote_of(lag)), "=r,=r,f,f", *m.T)
    with np.errstate(invalid="ignore"):
        by_warp = (m >= np.float32(-lag)).reshape(7, 64).all(1).repeat(32)
    assert (found[0] == by_warp).all() and (found[1] == by_warp).all()
    assert (by_warp[::32] == [1, 0, 0, 1, 0, 1, 1]).all()


@pytest.mark.parametrize("n", row_max._COLUMNS)
def test_maxima_of_a_thread(n):
    """Two rows a thread; warps 1 and 3 take integers."""
    draw = np.random.default_rng(12)
    values = draw.standard_normal((n, 2, 128)).astype(np.float32)
    values[:, 0, ::3] = -np.abs(values[:, 0, ::3])
    values[:, 1, ::5] = draw.choice(np.float32([0.0, -1e-40, -np.inf, -3.0]), (n, 26))
    values[n - 1, :, 1::7] = np.inf
    flag = np.repeat(np.int32([0, 1, 0, 5]), 32)
    inputs = values.reshape(2 * n, 128).view(np.uint32)
    text, constraints = text_of(row_max.maxima_of(n)), text_of(row_max.constraints_of(n))
    found = np.stack(assemble(text, constraints, *inputs, flag, flag)).view(np.float32)
    integers = values.view(np.int32).max(0).view(np.float32)
    assert (found == np.where(flag != 0, integers, values.max(0))).all()
    assert (integers != values.max(0)).any()
    of_emulator = row_max.ASM[text](*(tensor(x).view(torch.int32) for x in values), tensor(flag))
    assert torch.equal(of_emulator.view(torch.float32), tensor(found))


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("n", sample([64, 128], 64))
def test_maxima_of_rows(n, lag):
    """Every value is in its row."""
    for seed in range(4):
        s, m = made_rows(lag, seed, n)
        flags, found, expected = run_both(execute(next_max_kernel)[(1,)], s, m, 0.25, lag)
        assert torch.equal(found, expected)
        by_warp = (m >= -lag).view(4, 16).all(1)
        assert torch.equal(flags.view(4, 16), by_warp[:, None].int().expand(4, 16))


def test_tanh():
    x = floats()
    (found,) = assemble("tanh.approx.f32 $0, $1;", "=f,f", x)
    np.testing.assert_allclose(found, np.tanh(x), rtol=1e-6)


# Masks


@pytest.mark.parametrize("way", hide._WAYS, ids=str)
def test_selection(way):
    s, draw = floats(4096), np.random.default_rng(7)
    column = draw.integers(-4, 40, 4096, dtype=np.int32)
    ends = dict(first=draw.integers(-4, 40, 4096), stop=draw.integers(-4, 40, 4096))
    tests = [x.astype(np.int32) for x, has in zip(ends.values(), way) if has]
    tests += [draw.integers(-1, 2, 4096, dtype=np.int32)] * way[2]
    text = text_of(hide.selection(*way))
    (found,) = assemble(text, text_of(hide.registers(*way)), s, column, *tests)
    assert_bits(tensor(found), hide.ASM[text](*map(tensor, (s, column, *tests))))


@pytest.mark.parametrize("n", [8, 16, 32, 64])
def test_selection_in_a_warp(n):
    """Columns count from a thread's first one; ends of rows within, before and behind the tile."""
    draw = np.random.default_rng(8)
    s = draw.standard_normal((64, 2 * n)).astype(np.float32)
    first, stop = (draw.integers(-9, 2 * n + 9, 64) for _ in "ab")
    first[:16], stop[16:32], first[32:48], stop[32:48] = -5, 9999, -1, 9999
    thread = np.tile(np.arange(2 * n) & 6, (64, 1))  # what a thread's ends are less
    ends = [(x[:, None] - thread).astype(np.int32) for x in (first, stop)]
    text, constraints = text_of(hide.selection_in_warp(n)), text_of(hide.in_place(n, "rr"))
    registers = np.concatenate([in_registers(s), *(in_registers(x).view(np.float32) for x in ends)])
    found = assemble(text, constraints, *registers)
    expected = hide.ASM[text](tensor(s), *map(tensor, ends))
    assert_bits(tensor(np.stack(found)), tensor(in_registers(expected.numpy())))


# Dropout


def test_comparison_of_bytes():
    """Four at a time, with every threshold."""
    several = words()
    for threshold in range(1, 256):
        lower = (0x80 - (threshold & 0x7F)) * 0x01010101
        either = 0xFFFFFFFF if threshold < 0x80 else 0
        inputs = several, *(np.full(len(several), x, np.uint32) for x in (lower, either))
        (found,) = assemble(dropout_bits._AT_LEAST, "=r,r,r,r", *inputs)
        kept = several.view(np.uint8) >= threshold
        assert ((found.view(np.uint8) >> 7) == kept).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_drop_pairs(kind):
    """P, or 0 where its byte is below the threshold."""
    even, odd = (np.abs(floats(seed=9 + n, scale=1.0)) for n in range(2))
    even[:12], odd[:12] = 0.5, 0.0
    draw, word = np.random.default_rng(11), words()
    threshold = draw.integers(1, 256, len(word), dtype=np.uint32)
    selector = (0x5150 + 0x101 * draw.choice([0, 2], len(word))).astype(np.uint32)
    least = (threshold + 0x6400) * np.uint32(0x10001)
    text = text_of(fwd_dropout.selection(kind))
    (found,) = assemble(text, "=r,r,r,r,r,r", even, odd, word, selector, least)
    wide = (tensor(x.astype(np.int64)) for x in (word, selector, least))
    expected = fwd_dropout.ASM[text](tensor(even), tensor(odd), *wide)
    assert (found == expected.numpy().astype(np.uint32)).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_pairs(kind):
    even, odd = floats(seed=14), floats(seed=15)[::-1].copy()
    text = text_of(pairs.rounding(kind))
    (found,) = assemble(text, "=r,r,r", even, odd)
    expected = pairs.ASM[text](tensor(even), tensor(odd))
    dtype = BF16 if kind == "bf16" else FP16
    assert_bits(tensor(found.view(np.int32)).view(dtype), expected.view(dtype))


def test_selection_by_bits():
    """A word of bits for a thread's 32 elements of (64, 64)."""
    x, other = (floats(64 * 64, seed=n).reshape(64, 64) for n in (12, 13))
    by_tile = words(64 * 64).reshape(64, 64)
    by_tile[:] = by_tile[:1, :1]
    registers = [in_registers(y).view(np.uint32) for y in (x, other, by_tile)]
    text = text_of(bwd_dropout.selection())
    constraints = text_of(bwd_dropout.registers(32))
    found = assemble(text, constraints, *np.concatenate(registers))
    expected = bwd_dropout._select(tensor(x), tensor(other), tensor(by_tile.astype(np.int64)))
    assert_bits(tensor(np.stack(found)), tensor(in_registers(expected.numpy()).view(np.uint32)))


WAITS = {  # pieces that have arrived, failed; known to have arrived, wanted; what is found
    "known": (None, 0, 7, 7, 7),
    "arrived": (9, 0, 3, 7, 9),
    "late": (5, 0, 3, 7, 5),
    "failed": (5, 1, 3, 7, 5),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_for_pieces(name):
    """A wait reads nothing where what it wants is known; it ends after its limit, here 2 us, and at
    once after another has failed.
    """
    arrived, failed, known, least, expected = WAITS[name]
    memory = torch.zeros(device_words.WORDS, dtype=torch.int32)
    memory[device_words.FAILED], memory[device_words.ARRIVED] = failed, arrived or 0
    address = memory.data_ptr() + 4 * device_words.ARRIVED if arrived is not None else 0
    lanes = np.full(32, least, np.uint32), np.full(32, known, np.uint32)
    limit = np.full(32, 10**15 if name == "failed" else 2000, np.uint64)
    inputs = np.full(32, address, np.uint64), *lanes, limit
    (found,) = assemble(runs.AWAIT, "=&r,l,r,r,l", *inputs, reached=[memory])
    assert (found == expected).all()


READY = {  # words of a head; the block that is wanted, how many are known; how many then are
    "known": ([0, 0, 0], 1, 2, 2),
    "one": ([0, 1, 0], 1, 0, 2),
    "some": ([1, 1, 1, 0, 1], 0, 0, 3),
    "the last one": ([0, 0, 1], 2, 0, 34),
    "32": ([0, *[1] * 40, 0], 2, 1, 34),
}


@pytest.mark.parametrize("name", READY)
def test_waits_for_blocks_of_v_t(name):
    """Past a head's last block its word is read again, so that more may be found than there are."""
    given, level, known, expected = READY[name]
    memory = torch.tensor(given, dtype=torch.int32)
    address = np.full(32, memory.data_ptr() if name != "known" else 0, np.uint64)
    numbers = (np.full(32, x, np.uint32) for x in (level, known, len(given)))
    (found,) = assemble(transpose.AWAIT, "=&r,l,r,r,r", address, *numbers, reached=[memory])
    assert (found == expected).all()


def test_a_fence_of_stores_returns_what_it_was_given():
    (found,) = assemble(transpose.FENCE, "=r,r", words(32))
    assert (found == words(32)).all()


def test_no_assembly_is_left_out():
    """A kernel's new assembly needs a test here."""
    of_bytes = itertools.product((False, True), repeat=3)
    tested = {text_of(eight_bits.assembly_of(*x)) for x in of_bytes}
    tested |= {text_of(rescale.factors_of(x)) for x in (False, True)}
    tested |= {text_of(rescale.rescale_of(n)) for n in rescale._REGISTERS}
    for n in rescale._REGISTERS:
        kinds = itertools.product(((0, 1, True), (1, 4, False)), (False, True))
        tested |= {text_of(rescale.exponentials_of(n, *x, by_row)) for x, by_row in kinds}
    tested |= {text_of(row_max.vote_of(lag)) for lag in LAGS}
    tested |= {text_of(row_max.maxima_of(n)) for n in row_max._COLUMNS}
    tested |= {text_of(hide.selection(*way)) for way in hide._WAYS}
    tested |= {text_of(hide.selection_in_warp(n)) for n in (8, 16, 32, 64)}
    tested |= {text_of(x(kind)) for x in (fwd_dropout.selection, pairs.rounding) for kind in KINDS}
    for kind in KINDS:
        flags = [(a, b) for a in (False, True) for b in (False, True)]
        tested |= {text_of(bwd_dropout.conversion(kind, *x)) for x in flags}
    tested |= {"tanh.approx.f32 $0, $1;", text_of(bias.WIDEN), fp8_operand.EXPONENTIALS.value}
    tested |= {transpose.AWAIT, transpose.FENCE}
    # Between launches, and where a program is: they compute nothing
    tested |= {x.value for x in (dependents.START, dependents.WAIT, dependents.SM)}
    tested |= {runs.AWAIT, dropout_bits._AT_LEAST, text_of(bwd_dropout.selection())}
    known = (
        assembly.ASM
        | runs.ASM
        | eight_bits.ASM
        | fp8_operand.ASM
        | bwd_dropout.ASM
        | fwd_dropout.ASM
        | pairs.ASM
        | transpose.ASM
    )
    assert tested == known.keys()
