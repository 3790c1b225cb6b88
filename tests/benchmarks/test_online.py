"""One row's online softmax in plain Python gives the softmax, whatever the blocks."""

import math

import pytest
import torch

import tilewise
from benchmarks.online import make_row, plain, steps


@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("block", [1, 7, 16, 200])
def test_the_end_is_the_softmax(size, block):
    row = make_row(96, 8, size=size, seed=3)
    *_, last = steps(row, block)
    exact, lse = plain(row)
    torch.testing.assert_close(last.o / last.l, exact.float(), rtol=1e-5, atol=1e-6)
    assert math.isclose(last.m + math.log(last.l), lse, rel_tol=1e-6)


def test_every_number_follows_from_the_one_before():
    row = make_row(64, 8, size=5.0, seed=24)
    before = None
    for x in steps(row, 8):
        s = row.s[: x.stop]
        assert x.m == float(s.max()) and math.isclose(
            x.l, float(torch.exp(s - x.m).sum()), rel_tol=1e-5
        )
        if before is not None:
            assert math.isclose(x.l, x.alpha * before.l + x.added, rel_tol=1e-5)
            assert x.is_rescaled == (x.m > before.m)
        before = x


def test_blocks_behind_the_diagonal_change_nothing():
    found = list(steps(make_row(64, 8, row=20, is_causal=True), 16))
    assert [x.seen for x in found] == [16, 5, 0, 0]
    assert [x.is_skipped for x in found] == [False, False, True, True]
    assert found[-1].l == found[1].l and torch.equal(found[-1].o, found[1].o)


def test_it_is_what_attention_computes():
    """A key of one column with q = 1 makes its scores the keys themselves."""
    row = make_row(64, 8, seed=1)
    q, k, v = torch.ones(1, 1, 1, 1), row.s.reshape(1, 64, 1, 1), row.v.reshape(1, 64, 1, 8)
    out, lse = tilewise.attention(q, k, v, scale=1.0, return_lse=True)
    *_, last = steps(row, 16)
    torch.testing.assert_close(out.flatten(), last.o / last.l)
    assert math.isclose(lse.item(), last.m + math.log(last.l), rel_tol=1e-6)
