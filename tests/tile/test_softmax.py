"""Online softmax over blocks in any cut and order is the softmax of the whole row."""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import NOTHING, features
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.testing import interpret
from tilewise.tile.softmax import finish, load_sink, lse_to_log2, online_step

ROWS, COLUMNS = 16, 32
LOG2E = math.log2(math.e)


@triton.jit
def softmax_kernel(
    s,
    values,
    out,
    lse,
    cuts,
    blocks,
    exp_scale,
    optionals,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows of scores against one value a key, in blocks of keys that end at cuts[1:]."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    for i in range(blocks):
        start, stop = tl.load(cuts + i), tl.load(cuts + i + 1)
        is_here = (columns >= start) & (columns < stop)
        s_tile = tl.load(
            s + rows[:, None] * WIDTH + columns[None, :], mask=is_here[None, :], other=float("-inf")
        )
        step = online_step(s_tile, m_i, l_i, exp_scale, MASKED)
        acc = acc * step.alpha + tl.sum(step.p * tl.load(values + columns)[None, :], 1)
        m_i, l_i = step.m_i, step.l_i
    rescale, row_lse = finish(m_i, l_i, load_sink(optionals, 1, FEATURES), FEATURES)
    tl.store(out + rows, acc * rescale)
    tl.store(lse + rows, row_lse)


def online(s, values, cuts, sink=None, scale=1.0, masked=True):
    out, lse = torch.full((2, ROWS), math.nan)
    sinks = None if sink is None else torch.tensor([9.0, sink])
    interpret(softmax_kernel)[(1,)](
        s / scale,
        values,
        out,
        lse,
        torch.tensor(cuts, dtype=torch.int32),
        len(cuts) - 1,
        scale * LOG2E,
        NOTHING._replace(sinks=sinks),
        FEATURES=features(SINKS=sink is not None),
        ROWS=ROWS,
        MASKED=masked,
        WIDTH=COLUMNS,
    )
    return out, lse


def whole(s, values, sink=None):
    """Softmax in fp64; a row without keys gives 0."""
    s = s.double()
    extra = torch.full((len(s), 1), -math.inf if sink is None else sink, dtype=torch.float64)
    lse = torch.cat([s, extra], 1).logsumexp(1)
    p = (s - lse.where(lse.isfinite(), 0.0)[:, None]).exp()
    return p @ values.double(), lse


def check(found, expected, largest=0.0):
    """Equal but for fp32 sums, and for what rounding the exponent s - m costs: half of eps |s| for
    each of the two, which is a relative error of P.
    """
    allowed = 2e-6 + torch.finfo(torch.float32).eps * largest
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine.double(), theirs, rtol=allowed, atol=allowed)


@settings(max_examples=25, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**20),
    inner=st.lists(st.integers(0, COLUMNS), max_size=4),
    size=st.sampled_from([0.1, 3.0, 100.0]),
    hidden=st.sampled_from([0.0, 0.5, 0.97]),
    sink=st.sampled_from([None, 0.3, -50.0, 80.0]),
)
def test_any_cut_gives_the_whole(seed, inner, size, hidden, sink):
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(ROWS, COLUMNS, generator=generator) * size
    s[torch.rand(ROWS, COLUMNS, generator=generator) < hidden] = -math.inf
    values = torch.randn(COLUMNS, generator=generator)
    cuts = [0, *sorted(inner), COLUMNS]
    largest = s[s.isfinite()].abs().max().item() if s.isfinite().any() else 0.0
    check(online(s, values, cuts, sink), whole(s, values, sink), largest)


@pytest.mark.parametrize("direction", [1, -1], ids=["max-last", "max-first"])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_from_minus_to_plus_100(direction, masked):
    s = torch.linspace(-100, 100, COLUMNS).mul(direction).expand(ROWS, COLUMNS).contiguous()
    values = torch.randn(COLUMNS)
    check(online(s, values, [0, 8, 16, 24, COLUMNS], masked=masked), whole(s, values))


@pytest.mark.parametrize("level", [-100.0, 100.0])
def test_rows_of_one_extreme_level(level):
    s, values = torch.full((ROWS, COLUMNS), level), torch.randn(COLUMNS)
    check(online(s, values, [0, 16, COLUMNS], masked=False), whole(s, values))


def test_the_unit_scales_scores():
    s, values = torch.randn(ROWS, COLUMNS) * 4, torch.randn(COLUMNS)
    check(online(s, values, [0, 16, COLUMNS], scale=0.125), whole(s, values))


def test_rows_that_see_nothing():
    s, values = torch.full((ROWS, COLUMNS), -math.inf), torch.randn(COLUMNS)
    s[1, 20], s[2, 3], s[3, 31] = 1.0, -90.0, 90.0  # keys only in the last, first, last block
    out, lse = online(s, values, [0, 16, COLUMNS])
    check((out, lse), whole(s, values))
    assert out[4:].eq(0).all() and lse[4:].eq(-math.inf).all()
    torch.testing.assert_close(out[1:4], values[[20, 3, 31]])


@pytest.mark.parametrize("sink", [-3.0, 0.0, 70.0])
def test_a_sink_alone_is_the_lse(sink):
    s, values = torch.full((ROWS, COLUMNS), -math.inf), torch.randn(COLUMNS)
    out, lse = online(s, values, [0, 16, COLUMNS], sink)
    assert out.eq(0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, sink))


def test_a_sink_of_minus_infinity_is_none():
    s, values = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)
    s[0] = -math.inf
    check(online(s, values, [0, COLUMNS], -math.inf), whole(s, values))


@triton.jit
def lse_kernel(lse, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(lse + offs, lse_to_log2(tl.load(lse + offs)))


def test_an_empty_row_has_no_probabilities_in_the_backward():
    lse = torch.tensor([0.0, 1.0, -100.0, -math.inf])
    expected = torch.tensor([0.0, LOG2E, -100 * LOG2E, math.inf])
    interpret(lse_kernel)[(1,)](lse, BLOCK=4)
    torch.testing.assert_close(lse, expected)
