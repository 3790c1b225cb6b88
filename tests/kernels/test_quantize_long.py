"""Quantising long sequences, of which some blocks tell means and scales: kernels, in the
interpreter, as plain torch; and what plain torch promises.
"""

import itertools
import math

import pytest
import torch
from helpers.quantizing import ALL, NO_SCALES, NONE, assert_same, by_kernels, ints, tensors
from helpers.tiers import sample_rows

from tilewise.kernels.common.quantized import COLUMNS, EVERY, LARGEST, ROOM, WHOLE, Lengths
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.hadamard import rotate

APART = EVERY * COLUMNS
# Next to WHOLE, and past it by less than a block, by one that is taken, and by more
PACKED = [0, WHOLE, 2 * WHOLE + 1, 3 * WHOLE + 200]
LENGTHS = {
    "batch": ((1, WHOLE + 90), Lengths()),
    "used": ((2, WHOLE + 300), Lengths(seqused_k=ints(WHOLE + 7, WHOLE))),
    "packed": ((1, PACKED[-1]), Lengths(*[ints(*PACKED)] * 2)),
}


def same(x, steps, of, scales=NO_SCALES):
    found, expected = (f(*x, steps, scales, of) for f in (by_kernels, plain.quantize))
    assert_same(found, expected, of)
    return found


HEADS, HEADDIMS = (2, 1), (32, 16)
_steps = itertools.product(LENGTHS, (NONE, ALL))


@pytest.mark.parametrize("name, steps", sample_rows(_steps, ("batch", ALL)))
def test_like_plain_torch(name, steps):
    rows, of = LENGTHS[name]
    x = tensors(rows, HEADS, HEADDIMS)
    found = same(x, steps, of)
    if steps == NONE:
        expected = plain.quantize(*x, steps, NO_SCALES, of)
        for mine, theirs in zip(found.scales, expected.scales):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_wide_values():
    """Whose sums are of all blocks."""
    same(tensors((1, WHOLE + 90), (2, 1), (32, 144)), ALL, Lengths())


@pytest.mark.slow
def test_given_scales():
    scale = torch.full((1, 1), 0.05)
    same(tensors((1, WHOLE + 90), HEADS, HEADDIMS), ALL, Lengths(), (scale, None, scale))


_values = itertools.product((1000.0, math.inf, math.nan), (NONE, ALL))


@pytest.mark.parametrize("value, steps", sample_rows(_values))
def test_a_number_that_the_scale_has_no_room_for(value, steps):
    """In a block that was not looked at, of one sequence: that is rounded again, and no other."""
    q, k, v = tensors((2, WHOLE + 90), HEADS, HEADDIMS)
    before = plain.quantize(q, k, v, steps, NO_SCALES, Lengths())
    for x in (q, k, v):
        x[1, COLUMNS + 3, -1, 5] = value
    found, expected = (
        f(q, k, v, steps, NO_SCALES, Lengths()) for f in (by_kernels, plain.quantize)
    )
    for mine, theirs, old in zip(found.scales, expected.scales, before.scales):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        torch.testing.assert_close(mine[0], old[0], rtol=1e-5, atol=0)
        assert not mine[1, 0] <= 2 * old[1, 0]
    if value == 1000.0:
        assert_same(found, expected, Lengths())
        assert found.v_t[1].float().abs().max() == LARGEST


@pytest.mark.parametrize("factor, is_kept", [(0.99 * ROOM, True), (1.01 * ROOM, False)])
def test_where_the_room_ends(factor, is_kept):
    x = torch.rand(1, WHOLE + 1, 1, 16) * 0.5
    x[0, 0, 0, 0] = 1.0
    x[0, COLUMNS + 5, 0, 0] = factor
    found = plain.quantize(x, x, x, NONE, NO_SCALES, Lengths())
    expected = 1.0 / (LARGEST / ROOM) if is_kept else factor / LARGEST
    for scale in found.scales:
        assert scale.item() == pytest.approx(expected, rel=1e-6)
    assert found.q.float().abs().max() == pytest.approx(LARGEST, rel=0.03)


@pytest.mark.parametrize("used", [0, 5, WHOLE - 1, WHOLE, WHOLE + 1, 2 * WHOLE, 2 * WHOLE + 130])
def test_which_rows_are_looked_at(used):
    rows = plain.rows_of(torch.empty(1, 3 * WHOLE, 1, 1), None, ints(used))
    found = plain.sample_of(rows)
    position = torch.arange(3 * WHOLE)
    expected = position < used
    if used > WHOLE:
        expected &= position % APART < COLUMNS
    assert torch.equal(found.is_used[0], expected) and found.used.item() == expected.sum()


def test_the_mean_of_some_keys_takes_most_of_it_off():
    """And the rest is in v_mean: of values of mean 1, 512 keys are some 0.04 off."""
    q, k, v = (x.float() for x in tensors((1, 4 * WHOLE), (1, 1), (16, 16)))
    found = plain.quantize(q, k, v, ALL, NO_SCALES, Lengths())
    exact = rotate(k).mean(1)
    assert (found.k_mean - exact).abs().max() < 5 * (4 * COLUMNS) ** -0.5
    means = plain.dequantize(found, Lengths())[2].double().mean(1)
    torch.testing.assert_close(means, v.double().mean(1), rtol=0, atol=5e-4)


def test_packed_sequences_are_quantised_as_they_are_alone():
    _, of = LENGTHS["packed"]
    x = tensors((1, PACKED[-1]), HEADS, HEADDIMS)
    found = plain.quantize(*x, ALL, NO_SCALES, of)
    for i, (first, end) in enumerate(itertools.pairwise(PACKED)):
        alone = plain.quantize(*(t[:, first:end] for t in x), ALL, NO_SCALES, Lengths())
        for mine, theirs in zip(found.scales, alone.scales):
            assert torch.equal(mine[i], theirs[0])
        assert torch.equal(found.k[0, first:end].float(), alone.k[0].float())
