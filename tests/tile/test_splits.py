"""Pieces on tiles: the fold is that of `tilewise.tile.split_kv`, and no piece that a query sees is
left out.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import features
from helpers.tiers import sample

from tilewise.testing import interpret
from tilewise.tile import split_kv
from tilewise.tile.splits import SplitState, fold, keys_seen
from tilewise.tile.types import Numbers

ROWS, DIMS = 16, 8
LN_2 = math.log(2)


@triton.jit
def fold_kernel(acc_o, m_i, l_i, pieces, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Folds consecutive pieces; the result takes the place of the first."""
    rows = tl.arange(0, ROWS)
    tile = rows[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    state = SplitState(tl.load(acc_o + tile), tl.load(m_i + rows), tl.load(l_i + rows))
    for i in range(1, pieces):
        at = i * ROWS + rows
        acc = tl.load(acc_o + i * ROWS * DIMS + tile)
        state = fold(state, SplitState(acc, tl.load(m_i + at), tl.load(l_i + at)))
    tl.store(acc_o + tile, state.acc_o)
    tl.store(m_i + rows, state.m_i)
    tl.store(l_i + rows, state.l_i)


def folded(acc_o, m_i, l_i):
    """What the kernel makes of pieces (pieces, rows, ...), in base 2."""
    found = acc_o.clone(), m_i.clone(), l_i.clone()
    interpret(fold_kernel)[(1,)](*found, len(acc_o), ROWS=ROWS, DIMS=DIMS)
    return tuple(x[0] for x in found)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_the_fold_is_that_of_torch(pieces):
    acc_o, m_i = torch.randn(pieces, ROWS, DIMS), torch.randn(pieces, ROWS) * 9
    l_i = torch.rand(pieces, ROWS) + 0.5
    for i, row in ((0, 0), (0, 1), (pieces - 1, 1)):  # a piece without a key, a row without any
        m_i[i, row], l_i[i, row], acc_o[i, row] = -math.inf, 0, 0
    state = split_kv.empty_state(acc_o[0].double())
    for parts in zip(m_i.double() * LN_2, l_i.double(), acc_o.double()):
        m, total, acc = parts
        state = split_kv.fold(state, split_kv.SplitState(acc, m.unsqueeze(1), total.unsqueeze(1)))
    acc, m, total = folded(acc_o, m_i, l_i)
    torch.testing.assert_close(acc.double(), state.acc_o, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(m.double() * LN_2, state.m_i.squeeze(1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(total.double(), state.l_i.squeeze(1), atol=1e-5, rtol=1e-5)


def test_a_piece_without_keys_changes_no_bit():
    acc_o, m_i, l_i = torch.randn(3, ROWS, DIMS), torch.randn(3, ROWS), torch.rand(3, ROWS)
    for i in (0, 2):
        acc_o[i], m_i[i], l_i[i] = 0, -math.inf, 0
    for mine, some in zip(folded(acc_o, m_i, l_i), (acc_o, m_i, l_i)):
        assert torch.equal(mine, some[1])


@triton.jit
def keys_kernel(found, q_first, q_last, seqlen_k, numbers, split_size, FEATURES: tl.constexpr):
    zero = tl.program_id(0)
    keys = keys_seen(zero + q_first, zero + q_last, zero + seqlen_k, numbers, split_size, FEATURES)
    tl.store(found, keys.first)
    tl.store(found + 1, keys.last)
    tl.store(found + 2, keys.piece)
    tl.store(found + 3, keys.stop)


@pytest.mark.parametrize("left, right", [(-1, -1), (0, 0), (5, 0), (3, 9), (-1, 0), (20, -1)])
@pytest.mark.parametrize("split_size", sample([1, 7, 16, 100], 7, 16))
def test_keys_and_pieces_that_are_seen(left, right, split_size):
    flags = features(LEFT=left >= 0, RIGHT=right >= 0)
    numbers = Numbers(1.0, 1.0, 0.0, 0.0, left, right)
    for seqlen_k in (0, 1, 30, 64):
        for first, last in ((-4, -2), (-3, 2), (0, 0), (seqlen_k - 4, seqlen_k - 1), (20, 23)):
            found = torch.zeros(4, dtype=torch.int32)
            arguments = first, last, seqlen_k, numbers, split_size
            interpret(keys_kernel)[(1,)](found, *arguments, FEATURES=flags)
            seen = [
                j
                for j in range(seqlen_k)
                for i in range(first, last + 1)
                if (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
            ]
            a, b, piece, stop = found.tolist()
            assert all(a <= j < b for j in seen)
            assert (a, b) == (min(seen), max(seen) + 1) if seen else a <= b
            assert all(piece <= j // split_size < stop for j in seen)
            if seen:
                assert range(piece, stop) == split_kv.pieces(a, b, split_size)
