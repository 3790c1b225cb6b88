"""Quantising kernels, in the interpreter: what plain torch gives, in the same places."""

import itertools
import math

import pytest
import torch
from helpers.fp8 import transposed
from helpers.quantizing import (
    ALL,
    BF16,
    LENGTHS,
    NO_SCALES,
    NONE,
    assert_same,
    by_kernels,
    ints,
    tensors,
    transposed_by_kernels,
)
from helpers.tiers import sample, sample_rows

from tilewise.kernels.common.quantized import COLUMNS, FP8, LARGEST, Lengths
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.quantize import Steps
from tilewise.kernels.portable import quantize_memory
from tilewise.testing import use_interpreter
from tilewise.tile.quantize import SMALLEST
from tilewise.tile.rotary import Rotary

FP32 = torch.float32


@pytest.fixture(params=sample(["native", "by integers"], "native"))
def cast(request, monkeypatch):
    """By the GPU's conversion, and for those without it."""
    if request.param == "by integers":
        monkeypatch.setattr(quantize_memory, "architecture", lambda device: "sm80")


def turning(positions=300, rotary_dim=48, interleaved=True, dtype=BF16):
    angles = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(0, rotary_dim, 2) / 32))
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


_casts = list(itertools.product(LENGTHS, ("native", "by integers")))


@pytest.mark.parametrize(
    "name, cast",
    sample_rows(_casts, ("used", "native"), ("packed", "by integers")),
    indirect=["cast"],
)
def test_like_plain_torch(name, cast):
    rows, of = LENGTHS[name]
    x = tensors(rows)
    assert_same(by_kernels(*x, ALL, NO_SCALES, of), plain.quantize(*x, ALL, NO_SCALES, of), of)


_turned = itertools.product(LENGTHS, (False, True), (BF16, torch.float16, FP32))


@pytest.mark.parametrize("name, interleaved, dtype", sample_rows(_turned, ("used", False, BF16)))
def test_turned_by_positions(name, interleaved, dtype, cast):
    """Without rotation and means every bit is the same; with them as without rotary tables."""
    rows, of = LENGTHS[name]
    x = tensors(rows, heads=(2, 1), dtype=dtype)
    rotary = turning(interleaved=interleaved)
    found, expected = (f(*x, NONE, NO_SCALES, of, rotary) for f in (by_kernels, plain.quantize))
    for mine, theirs in zip(found.scales, expected.scales):
        assert torch.equal(mine, theirs)
    if "packed" not in name and name != "gaps":  # rows of no sequence are 0 here
        for mine, theirs in zip(found[:3], expected[:3]):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    found, expected = (f(*x, ALL, NO_SCALES, of, rotary) for f in (by_kernels, plain.quantize))
    assert_same(found, expected, of)


@pytest.mark.parametrize("headdims", sample([(16, 16), (128, 64), (256, 16), (96, 80)], (16, 16)))
def test_turned_channels(headdims):
    """Some of them, and all; queries that are the last of other numbers of keys."""
    of = Lengths(ints(0, 30, 40), ints(0, 20, 200), ints(30, 4), ints(20, 170))
    q, k, v = tensors((1, 200), (3, 1), headdims)
    for rotary_dim in (6, headdims[0]):
        given = q[:, :40], k, v, ALL, NO_SCALES, of, turning(200, rotary_dim, False, FP32)
        assert_same(by_kernels(*given), plain.quantize(*given), of)


def test_empty_tables():
    x, of = tensors((1, 40), heads=(2, 1)), Lengths()
    expected = by_kernels(*x, ALL, NO_SCALES, of)
    for rotary in (turning(40, 0), turning(0, 8)):
        for mine, theirs in zip(by_kernels(*x, ALL, NO_SCALES, of, rotary)[:3], expected):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


STEPS = [Steps(*(bool(n >> i & 1) for i in range(3))) for n in range(8)]


@pytest.mark.parametrize("steps", sample(STEPS, NONE, Steps(True, False, False)), ids=str)
@pytest.mark.parametrize("dtype", sample([BF16, torch.float16, FP32], BF16), ids=str)
def test_each_step(steps, dtype, cast):
    """Without rotation and means every bit is the same."""
    x, of = tensors((1, 140), dtype=dtype), Lengths()
    found, expected = (f(*x, steps, NO_SCALES, of) for f in (by_kernels, plain.quantize))
    assert_same(found, expected, of)
    if steps == NONE:
        for mine, theirs in zip((*found[:3], *found.scales), (*expected[:3], *expected.scales)):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


HEADDIMS = [(16, 16), (128, 64), (256, 256), (96, 80), (65, 100), (192, 128)]


@pytest.mark.parametrize("headdims", sample(HEADDIMS, (96, 80)), ids=str)
def test_head_dims(headdims):
    x, of = tensors((1, 40), (3, 1), headdims), Lengths()
    assert_same(by_kernels(*x, ALL, NO_SCALES, of), plain.quantize(*x, ALL, NO_SCALES, of), of)


def test_given_scales_saturate(cast):
    x, of = tensors((2, 40)), Lengths()
    one = torch.tensor(0.001).expand(2, 2)
    given = one, torch.rand(2, 2) + 0.01, one.contiguous()
    found = by_kernels(*x, NONE, given, of)
    expected = plain.quantize(*x, NONE, given, of)
    for mine, theirs in zip(found[:3], expected[:3]):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert found.q.float().abs().max() == LARGEST
    assert all(mine is theirs for mine, theirs in zip(found.scales, given))


def test_codes_are_products_with_the_inverse(cast):
    """Of the scale: where a quotient would round to another code, too."""
    of, scale = Lengths(), torch.tensor(0.3)
    x = torch.arange(1, 4097) * 0.3 * 2.0**-4  # next to the middle of two codes, many of them
    x = x.view(1, 64, 1, 64)
    given = tuple(scale.expand(1, 1).contiguous() for _ in "qkv")
    expected = (x * (1 / scale)).clamp(-LARGEST, LARGEST).to(FP8)
    assert (expected.float() != (x / scale).clamp(-LARGEST, LARGEST).to(FP8).float()).any()
    for quantize in (plain.quantize, by_kernels):
        found = quantize(x, x, x, NONE, given, of)
        for codes in (found.q, found.k, plain.natural_values(found.v_t, 64, None)):
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["batch", "packed"])
def test_a_block_of_small_values_limits_what_is_added_to_the_mean(name):
    rows, of = LENGTHS[name]
    q, k, v = tensors(rows, heads=(2, 1))
    v[:, :128] *= 0.125
    given = q, k, v, ALL, NO_SCALES, of
    assert_same(by_kernels(*given), plain.quantize(*given), of)


def test_rows_not_in_use_do_not_count(cast):
    rows, of = LENGTHS["gaps"]
    q, k, v = tensors(rows, heads=(2, 1))
    expected = by_kernels(q, k, v, ALL, NO_SCALES, of)
    for x, starts, used in ((q, of[0], of[2]), (k, of[1], of[3]), (v, of[1], of[3])):
        keep = torch.zeros(x.shape[1], dtype=torch.bool)
        for first, count in zip(starts.tolist(), used.tolist()):
            keep[first : first + count] = True
        x[:, ~keep] = torch.nan
    found = by_kernels(q, k, v, ALL, NO_SCALES, of)
    for mine, theirs in zip((*found[:3], *found.scales), (*expected[:3], *expected.scales)):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_nan_and_zero(cast):
    q, k, v = tensors((2, 40))
    k[0, 3, 1, 5], v[1] = torch.nan, 0.0
    found = by_kernels(q, k, v, NONE, NO_SCALES, Lengths())
    assert found.scales.k.isnan().tolist() == [[False, True], [False, False]]
    assert found.k[0, :, 1].isnan().all() and not found.k[0, :, 0].isnan().any()
    assert (found.scales.v[1] == SMALLEST).all() and (found.v_t[1].float() == 0).all()


@pytest.mark.parametrize("value", sample([torch.inf, -torch.inf, torch.nan], torch.inf))
def test_no_mean_without_finite_numbers(value):
    """Nor a scale: NaN, as plain torch has it."""
    q, k, v = tensors((2, 40))
    k[0, 5, 0, 3] = v[0, 5, 0, 3] = value
    for rotate in (False, True):
        given = q, k, v, Steps(rotate, True, True), NO_SCALES, Lengths()
        found, expected = by_kernels(*given), plain.quantize(*given)
        for mine, theirs in zip(found.scales, expected.scales):
            assert torch.equal(mine.isnan(), theirs.isnan()) and mine.isfinite().any()
        assert found.scales.k[0, 0].isnan() and found.scales.v[0, 0].isnan()


@pytest.mark.parametrize("name", sample(LENGTHS))
def test_how_far_wide_values_drift(name, cast):
    rows, of = LENGTHS[name]
    given = tensors(rows, headdims=(16, 144))
    sequences = rows[0] if of.cu_seqlens_k is None else len(of.cu_seqlens_k) - 1
    for scales in (NO_SCALES, (None, None, torch.full((sequences, 2), 0.03))):
        call = *given, ALL, scales, of
        found, expected = by_kernels(*call), plain.quantize(*call)
        assert (expected.v_drift > 1.5) == (name != "short")  # one block has lost its own mean
        assert_same(found, expected, of)


def test_nan_drifts():
    q, k, v = tensors((2, 40), headdims=(16, 144))
    v[0, 5, 0, 3] = math.nan
    given = q, k, v, ALL, NO_SCALES, Lengths()
    assert by_kernels(*given).v_drift.isnan() and plain.quantize(*given).v_drift.isnan()


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_nothing(shape):
    q, k, v = tensors(shape)
    found = by_kernels(q, k, v, ALL, NO_SCALES, Lengths())
    expected = plain.quantize(q, k, v, ALL, NO_SCALES, Lengths())
    assert_same(found, expected, Lengths())
    packed = tensors((1, 9))
    of = Lengths(ints(0), ints(0))
    found = by_kernels(*packed, ALL, NO_SCALES, of)
    assert found.v_t.shape[3] == 0 and found.scales.k.shape == (0, 2)


@pytest.mark.parametrize("memory", ["dense", "heads first", "last apart"])
@pytest.mark.parametrize("name", LENGTHS)
def test_transposed_values(name, memory):
    rows, of = LENGTHS[name]
    v = tensors(rows)[2].to(FP8)
    if memory == "heads first":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif memory == "last apart":
        v = torch.stack([v, v], -1).view(torch.uint8)[..., 0].view(FP8)
    with use_interpreter():
        found = transposed_by_kernels(v, of.seqused_k, of.cu_seqlens_k)
    expected = plain.transposed_values(v, of.seqused_k, of.cu_seqlens_k)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_rows_before_the_first_sequence():
    """As a cut of longer packed tensors has them: the first column follows from the first key."""
    v = tensors((1, 300))[2].to(FP8)
    with use_interpreter():
        found = transposed_by_kernels(v, None, ints(135, 140, 290))
    expected = torch.zeros_like(found.view(torch.uint8))
    for sequence, (first, keys) in enumerate([(135, 5), (140, 150)]):
        alone = transposed(v[:, first : first + keys], [keys])
        column = (first // COLUMNS + sequence) * COLUMNS
        expected[..., column : column + alone.shape[3]] = alone.view(torch.uint8)
    assert torch.equal(found.view(torch.uint8), expected)


def test_rows_past_2_to_31_elements():
    """Memory that is not touched takes none."""
    apart, rows = 1 << 25, 70
    v = torch.empty(rows * apart, dtype=torch.uint8).as_strided((1, rows, 1, 16), (0, apart, 16, 1))
    v.copy_(torch.randint(0, 100, v.shape))
    with use_interpreter():
        found = transposed_by_kernels(v.view(FP8), None, None)
    expected = plain.transposed_values(v.contiguous().view(FP8), None, None)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
