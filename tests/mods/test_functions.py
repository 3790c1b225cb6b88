"""The functions of torch that FlexAttention's users write, each as torch computes it, with its
derivative, at the edges too; and by the kernels of both dialects.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.modified_tiles import check, emulated, interpreted
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.mods import functions, mask, score
from tilewise.mods.scores import ScoreMod

TABLE = torch.linspace(-2, 2, 2 * 3 * 40 * 40).sin().view(2, 3, 40, 40)
IDS = torch.arange(64) // 5
# Of a score that is 0 and the ends of clamps and ties among others
FLOATS = {
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -1, 2) + s.clamp(min=q - 3.0) + s.clip(max=1.5),
    "clamp, crossed": lambda s, b, h, q, k: torch.clamp(s, 2, -1) * s + s.clamp_min(0.5),
    "**": lambda s, b, h, q, k: s**2 + s**3 - s**4.0 + 2 ** (s / 2) + (s * s + 1) ** -1.5,
    "pow": lambda s, b, h, q, k: torch.pow(2, -((h + 1) * 8.0 / 3)) * s + (s * s + 1).pow(0.5),
    "methods": lambda s, b, h, q, k: s.abs() + s.tanh() * s.exp().neg() + s.sigmoid().add(q),
    "float": lambda s, b, h, q, k: s + (q - k).abs().float() + (q == k).float(),
    "to": lambda s, b, h, q, k: (q - k).to(s.dtype) / 7 + s.to(torch.float32) + s.type_as(s),
    "long": lambda s, b, h, q, k: s * (s * 2).long() + (q > k).long() + (s / 3).int(),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf),
    "where": lambda s, b, h, q, k: s.where(q < k, -s) + torch.where(s > 0, s, 0.0),
    "max": lambda s, b, h, q, k: torch.max(s, -s) + torch.min(s, s * s) + s.maximum(q - 2.0),
    "fmax": lambda s, b, h, q, k: torch.fmax(s, TABLE[b, h, q, k]) + torch.fmin(s, 2 * s),
    "rounding": lambda s, b, h, q, k: s.floor() * s + torch.ceil(s) + s.trunc() * s + s.round(),
    "frac": lambda s, b, h, q, k: torch.frac(s) + s.sign() * s + torch.sgn(s),
    "trigonometry": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b) + s.sin() * q,
    "div": lambda s, b, h, q, k: (
        s * torch.div(q, 3, rounding_mode="floor")
        + torch.div(k - q, 4, rounding_mode="trunc")
        + torch.div(s + 0.1, 2, rounding_mode="floor") * s
        + s.div(2)
    ),
    "log1p": lambda s, b, h, q, k: torch.log1p(s * s) + torch.log1p(s.abs()) + s.expm1(),
    "logarithms": lambda s, b, h, q, k: torch.log10(s * s + 1) + (s.abs() + 1).log2() + q.sqrt(),
    "relu": lambda s, b, h, q, k: torch.relu(s) + F.relu(s - q) * s + s.relu(),
    "relus": lambda s, b, h, q, k: F.leaky_relu(s, 0.1) + F.relu6(3 * s) + F.elu(s) + F.hardtanh(s),
    "softplus": lambda s, b, h, q, k: F.softplus(s) + F.softplus(s, beta=2, threshold=3),
    "logsigmoid": lambda s, b, h, q, k: F.logsigmoid(s) + F.logsigmoid(-3 * s),
    "gelu": lambda s, b, h, q, k: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "silu": lambda s, b, h, q, k: F.silu(s) + F.mish(s) + F.softsign(s) + torch.erf(s) + s.erfc(),
    "likes": lambda s, b, h, q, k: torch.zeros_like(s) + torch.ones_like(s) * s + s.square(),
    "full_like": lambda s, b, h, q, k: (
        torch.where(q < k, s, torch.full_like(s, -5)) - s.reciprocal().isinf()
    ),
    "bools": lambda s, b, h, q, k: s * (q < k) + (q % 2 == 0) + (k == q) * 2 * s.clone(),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=2) + torch.sub(s, s * s, alpha=0.5),
    "isfinite": lambda s, b, h, q, k: torch.where(torch.isfinite(s) & ~s.isnan(), s, 0.0),
    "special": lambda s, b, h, q, k: torch.special.expm1(s) + torch.rsub(s, q) + torch.square(q),
}
FLOATS["full_like"] = lambda s, b, h, q, k: torch.where(q < k, s, torch.full_like(s, -5))
# Natten, dilation, tiles and positions in chunks, as attention-gym writes them
MASKS = {
    "natten": lambda b, h, q, k: (
        ((q // 8).clamp(2, 5) - k // 8).abs() <= 2
    ) & (((q % 8).clamp(2, 5) - k % 8).abs() <= 2),
    "squared distance": lambda b, h, q, k: (q // 8 - k // 8) ** 2 + (q % 8 - k % 8) ** 2 < 9,
    "div": lambda b, h, q, k: torch.div(q - 9, 5, rounding_mode="trunc") == torch.div(
        k - 9, 5, rounding_mode="floor"
    ),
    "methods": lambda b, h, q, k: (q - k).abs().le(7).logical_and(q.ge(k)) | (k.sign() == 0),
    "likes": lambda b, h, q, k: torch.where(q < k, torch.zeros_like(q), q) >= torch.ones_like(k),
    "bools": lambda b, h, q, k: (IDS[q] - IDS[k]).bool().logical_not() | (q == k).long().bool(),
    "powers": lambda b, h, q, k: q & 2 ** (k % 5) == 0,
}  # fmt: skip


def grid():
    return torch.meshgrid(*(torch.arange(n) for n in (2, 3, 9, 40)), indexing="ij")


def scores():
    """Multiples of a quarter, 0 and the whole numbers to 5 among them."""
    return (torch.arange(2 * 3 * 9 * 40) % 41 - 20).view(2, 3, 9, 40) / 4


def with_slope(function, s, *at):
    s = s.clone().requires_grad_()
    out = function(s, *at)
    out = torch.as_tensor(out, dtype=s.dtype).expand(s.shape)
    return out.detach(), torch.autograd.grad(out.sum(), s)[0]


@pytest.mark.parametrize("name", FLOATS)
def test_values_and_derivatives_are_torchs(name):
    function, mod = FLOATS[name], score(FLOATS[name])
    s, indices = scores(), grid()
    expected, slope = with_slope(function, s, *indices)
    torch.testing.assert_close(mod(s, *indices).expand(s.shape), expected, rtol=1e-5, atol=1e-6)
    found = mod.derivative(s, *indices).expand(s.shape)
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_kernels_compute_them(name, run):
    mod = score(FLOATS[name])
    check(mod, run)
    check(mod.derivative, run, turned=True)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_torchs(name):
    mod, indices = mask(MASKS[name]), grid()
    assert torch.equal(mod(*indices).expand(indices[0].shape), MASKS[name](*indices))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_kernels_mask_by_them(name, run):
    check(mask(MASKS[name]), run, q_start=-7)


def test_tables_are_indexed_in_steps():
    at_once = score(lambda s, b, h, q, k: s + TABLE[b, h, q, k])
    for function in (
        lambda s, b, h, q, k: s + TABLE[b][h][q][k],
        lambda s, b, h, q, k: s + TABLE[b, h][q, k],
        lambda s, b, h, q, k: s + TABLE[b][h, q, k],
    ):
        assert score(function).key == at_once.key


def test_the_page_lists_them():
    page = (Path(__file__).parents[2] / "docs/api/mods.md").read_text()
    for name in (*functions.OF_TORCH, *functions.COMPOSITES, *functions.METHODS):
        assert f"`{name}`" in page, name


INFINITE = torch.tensor([-math.inf, math.inf, -1e30, 1e30, -0.0])


@pytest.mark.parametrize(
    "name",
    ["clamp", "relu", "softplus", "logsigmoid", "max", "log1p", "rounding", "relus", "float"],
)
def test_infinite_scores(name):
    mod, (b, h, q, k) = score(FLOATS[name]), (torch.tensor(1) for _ in "bhqk")
    expected = FLOATS[name](INFINITE, b, h, q, k)
    torch.testing.assert_close(mod(INFINITE, b, h, q, k), expected, equal_nan=True)


UNARY = sorted(
    {*functions.OF_TORCH, *functions.COMPOSITES}
    & {*("tanh sigmoid sin cos erf floor ceil trunc round sign relu relu6 elu silu gelu".split())}
    | {"softplus", "logsigmoid", "leaky_relu", "expm1", "log1p", "square", "softsign", "hardtanh"}
)


def programs():
    """Random score functions of them, bounded: `squash` holds what is inside within 3."""
    leaf = st.sampled_from(["s", "s", "s / 2", "(q - k) / 8", "TABLE[b, h, q, k]", "1.5", "h * s"])

    def deeper(x):
        return st.one_of(
            st.builds("call('{}', squash(s * 0 + {}))".format, st.sampled_from(UNARY), x),
            st.builds("({} {} {})".format, x, st.sampled_from("+-*"), x),
            st.builds(
                "torch.{}({} + s * 0, {} + s * 0)".format, st.sampled_from(["max", "fmin"]), x, x
            ),
            st.builds("torch.where(q % 3 < k // 5, {}, {})".format, x, x),
            st.builds("(squash(s * 0 + {}) ** {})".format, x, st.sampled_from(["2", "3", "2.0"])),
            st.builds("(s * 0 + {}).clamp(-1.5, 2).masked_fill(q < k, 0.5)".format, x),
        )

    return st.recursive(leaf, deeper, max_leaves=6).map("(s * 0 + {})".format)


def call(name, x):
    x = x.abs() if name == "log1p" else x
    return getattr(torch, name, None)(x) if hasattr(torch, name) else getattr(F, name)(x)


def program(text):
    around = {
        "torch": torch,
        "TABLE": TABLE,
        "call": call,
        "squash": lambda x: (x * 1.0).clamp(-3, 3),
    }
    return eval(f"lambda s, b, h, q, k: {text}", around)


@given(text=programs())
@settings(max_examples=60, deadline=None, database=None)
def test_random_functions(text):
    """Away from edges, where a rounding may decide: against autograd."""
    function = program(text)
    s = scores()[:, :, :4, :8].double() + 0.0317
    indices = tuple(x[:, :, :4, :8] for x in grid())
    mod = score(function)
    assert isinstance(mod, ScoreMod)
    expected, slope = with_slope(function, s, *indices)
    torch.testing.assert_close(mod(s, *indices).expand(s.shape), expected, rtol=1e-6, atol=1e-6)
    found = mod.derivative(s, *indices).expand(s.shape)
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-5)
