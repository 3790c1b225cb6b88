"""Scores are softcap and ALiBi as written, their derivative is autograd's, tanh is exact enough."""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import NOTHING, features, sequence

from tilewise.testing import interpret
from tilewise.tile.score import exp_scale, load_slope, score, tanh

BLOCK = 16
LOG2E = math.log2(math.e)


@triton.jit
def score_kernel(qk, derivative, m_start, seq, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    at = offs[:, None] * BLOCK + offs[None, :]
    scored = score(tl.load(qk + at), m_start + offs[:, None], offs[None, :], seq, FEATURES)
    tl.store(qk + at, scored.s * exp_scale(seq, FEATURES))
    tl.store(derivative + at, scored.derivative + tl.zeros([BLOCK, BLOCK], tl.float32))


def scores(qk, seq, on, m_start=0):
    """Scores in natural units, and their derivative by scale * qk."""
    s, derivative = qk.clone(), torch.full_like(qk, math.nan)
    interpret(score_kernel)[(1,)](s, derivative, m_start, seq, FEATURES=on, BLOCK=BLOCK)
    return s / LOG2E, derivative


@pytest.mark.parametrize("scale", [0.125, 2.0])
def test_plain_scores_are_scaled_in_the_exponent(scale):
    qk = torch.randn(BLOCK, BLOCK)
    s, derivative = scores(qk, sequence(16, 16, scale=scale), features())
    torch.testing.assert_close(s, qk * scale)
    assert torch.equal(derivative, torch.ones_like(qk))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_softcap_and_its_derivative(softcap, alibi, size):
    qk = torch.randn(BLOCK, BLOCK) * size
    slope, diagonal, scale = 0.25 if alibi else 0.0, 7, 0.5
    seq = sequence(40, 47, diagonal, slope=slope * LOG2E, scale=scale, softcap=softcap)
    s, derivative = scores(qk, seq, features(SOFTCAP=True, ALIBI=alibi), m_start=5)

    scaled = (qk.double() * scale).requires_grad_()
    capped = softcap * torch.tanh(scaled / softcap)
    (expected,) = torch.autograd.grad(capped.sum(), scaled)
    q_idx, k_idx = torch.arange(5, 21)[:, None], torch.arange(16)[None, :]
    distance = (q_idx + diagonal - k_idx).abs()
    torch.testing.assert_close(s.double(), (capped - slope * distance).detach(), **near(softcap))
    torch.testing.assert_close(derivative.double(), expected, **near(1.0))


@pytest.mark.parametrize("diagonal", [0, 3, -20])
def test_alibi_counts_from_the_diagonal(diagonal):
    qk = torch.randn(BLOCK, BLOCK)
    seq = sequence(40, 40, diagonal, slope=0.5 * LOG2E, scale=0.3)
    s, derivative = scores(qk, seq, features(ALIBI=True), m_start=10)
    q_idx, k_idx = torch.arange(10, 26)[:, None], torch.arange(16)[None, :]
    expected = 0.3 * qk - 0.5 * (q_idx + diagonal - k_idx).abs()
    torch.testing.assert_close(s, expected)
    assert torch.equal(derivative, torch.ones_like(qk))


def near(size):
    """A few roundings of a number of this size."""
    return dict(rtol=0, atol=6e-7 * size + 1e-6)


@triton.jit
def tanh_kernel(x, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offs, tanh(tl.load(x + offs)))


def test_tanh():
    """Within a few ulps of itself everywhere; equal to its limits where fp32 cannot tell them."""
    magnitudes = torch.cat([torch.logspace(-37, 38, 2032), torch.linspace(0, 12, 2064)])
    x = torch.cat([magnitudes, -magnitudes])
    found = x.clone()
    interpret(tanh_kernel)[(8192 // 1024,)](found, BLOCK=1024)
    expected = torch.tanh(x.double())
    ulp = 2.0 ** torch.floor(torch.log2(expected.abs().clamp(min=1e-300))) * 2.0**-23
    assert ((found.double() - expected).abs() / ulp).max() <= 4
    assert torch.equal(found[x.abs() > 20], x[x.abs() > 20].sign())
    assert torch.equal(found[x.abs() < 1e-8], x[x.abs() < 1e-8])


def test_tanh_of_what_is_no_number():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0] * 4)
    interpret(tanh_kernel)[(1,)](x, BLOCK=16)
    torch.testing.assert_close(x, torch.tensor([math.nan, 1, -1, 0] * 4), equal_nan=True)


@triton.jit
def slope_kernel(out, optionals, batch, head, FEATURES: tl.constexpr):
    tl.store(out, load_slope(optionals, batch, head, FEATURES))


def test_slopes_by_head_and_by_batch():
    slopes = torch.rand(3, 4)
    for given, stride in ((slopes[0].contiguous(), 0), (slopes, 4)):
        optionals = NOTHING._replace(alibi_slopes=given, alibi_batch=stride)
        found = torch.zeros(1)
        interpret(slope_kernel)[(1,)](found, optionals, 2, 3, FEATURES=features(ALIBI=True))
        expected = slopes[2 if stride else 0, 3] * LOG2E
        torch.testing.assert_close(found[0], expected)
    interpret(slope_kernel)[(1,)](found, NOTHING, 2, 3, FEATURES=features())
    assert found.item() == 0.0
