"""O is rescaled only where a row's maximum has grown past a threshold: maxima that grow slowly,
fast, late or not at all, and numbers that are none.
"""

import itertools

import pytest
import torch
from helpers.tiers import sample_rows

from tilewise import attention, attention_reference
from tilewise.kernels.hopper.rescale import THRESHOLD
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

LN_2 = 0.6931471805599453
SEQLEN, NHEADS = 320, 1


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def attend(q, k, v, **options):
    with use_emulator(), torch.no_grad():
        return attention(q, k, v, backend="hopper", return_lse=True, **options)


def rounding_p(q, k, v, causal=False, scale=None):
    """Attention in fp32 but for P, which is rounded to the dtype of q."""
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * (scale or q.shape[3] ** -0.5)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -float("inf"))
    p = s.softmax(-1).to(q.dtype).float()
    return torch.einsum("bhqk,bkhd->bqhd", p, v.float()).to(q.dtype)


def check(q, k, v, **options):
    """out and lse within the budget; and the mean error within 1.1 of what rounding P alone costs,
    as the largest P of a row is no longer 1, which rounding leaves as it is.
    """
    found = attend(q, k, v, **options)
    exact = attention_reference(*(x.double() for x in (q, k, v)), return_lse=True, **options)
    plain = attention_reference(q, k, v, return_lse=True, upcast=False, **options)
    for name, x, y, z in zip(("out", "lse"), found, exact, plain):
        assert_within(x, y, z.to(x.dtype), name)
    exact = exact[0]
    errors = [(x - exact).abs().mean() for x in (found[0], rounding_p(q, k, v, **options))]
    assert errors[0] <= 1.1 * errors[1]


GROWING = itertools.product((6.0, 60.0), (64, 128, 256), (False, True))
FAST = (6.0, 128, True), (60.0, 64, False), (60.0, 128, True), (60.0, 256, True)


@pytest.mark.parametrize("most, headdim, causal", sample_rows(GROWING, *FAST))
def test_keys_that_grow_along_the_sequence(most, headdim, causal):
    """Each block has larger scores than the one before, by less and by more than the threshold."""
    q, k, v = (normal(1, SEQLEN, NHEADS, headdim) for _ in range(3))
    growth = torch.linspace(0, most, SEQLEN)[:, None, None]
    check(q, (k * growth).bfloat16(), v, causal=causal)
    check(q, (k * growth.flip(0)).bfloat16(), v, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [-0.5, 0.5])
def test_a_maximum_just_short_of_the_threshold_and_just_past_it(step, dtype):
    """The last block of keys scores THRESHOLD more than the first, in base 2, and a bit: P is up to
    2^8, or O is rescaled; some rows of a warp grow, and some do not.
    """
    size = (THRESHOLD.value + step) * LN_2
    q, k = torch.zeros(1, SEQLEN, NHEADS, 128), torch.zeros(1, SEQLEN, NHEADS, 128)
    q[:, ::3, :, 0] = 1
    k[:, :128, :, 0] = k[:, -1:, :, 0] = size  # keys are read downwards under no mask
    check(q.to(dtype), k.to(dtype), normal(1, SEQLEN, NHEADS, 128, dtype=dtype), scale=1.0)


@pytest.mark.parametrize("headdim", [64, 128])
def test_rows_of_nan_and_infinity(headdim):
    """NaN in a query is its row's alone; a score of -inf is a key that is not there."""
    q, k, v = (normal(1, SEQLEN, NHEADS, headdim) for _ in range(3))
    clean, clean_lse = attend(q, k, v)
    broken = q.clone()
    broken[:, 77] = float("nan")
    out, lse = attend(broken, k, v)
    others = torch.arange(SEQLEN) != 77
    assert out[:, 77].isnan().all() and torch.equal(out[:, others], clean[:, others])
    assert torch.equal(lse[..., others], clean_lse[..., others])
    q, k = q.abs(), k.abs()
    k[:, 150:, :, 0] = -float("inf")
    check(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_few_large_probabilities(causal):
    """Where rounding shows most: scores three times as large."""
    q, k, v = (normal(1, 3 * SEQLEN, NHEADS, 128) for _ in range(3))
    check((3 * q.float()).bfloat16(), k, v, causal=causal)
