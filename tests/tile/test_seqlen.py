"""A sequence has its own length, and its diagonal ends where the alignment says."""

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import NOTHING, features, sequence

from tilewise.testing import interpret
from tilewise.tile.seqlen import lengths_of, offsets_of, padded_row, sequence_of
from tilewise.tile.types import Sizes


@triton.jit
def lengths_kernel(out, sizes, optionals, FEATURES: tl.constexpr):
    batch = tl.program_id(0)
    lengths = lengths_of(batch, sizes, optionals, FEATURES)
    tl.store(out + 3 * batch, lengths.seqlen_q)
    tl.store(out + 3 * batch + 1, lengths.seqlen_k)
    tl.store(out + 3 * batch + 2, lengths.diagonal)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("used", [None, [5, 0, 9]])
def test_lengths(top_left, used):
    given = None if used is None else torch.tensor(used, dtype=torch.int32)
    out = torch.full((3, 3), -7)
    on = features(TOP_LEFT=top_left, SEQUSED_K=used is not None)
    interpret(lengths_kernel)[(3,)](
        out, Sizes(0, 2, 7, 9), NOTHING._replace(seqused_k=given), FEATURES=on
    )
    expected = [[7, n, 0 if top_left else n - 7] for n in used or [9, 9, 9]]
    assert out.tolist() == expected


@triton.jit
def sequence_kernel(out, sizes, optionals, numbers, FEATURES: tl.constexpr):
    seq = sequence_of(tl.program_id(0), tl.program_id(1), sizes, optionals, 0, numbers, FEATURES)
    at = out + 4 * (tl.program_id(0) * 2 + tl.program_id(1))
    tl.store(at, seq.slope_log2)
    tl.store(at + 1, seq.lengths.seqlen_k)
    tl.store(at + 2, seq.numbers.left)
    tl.store(at + 3, seq.numbers.scale)


def test_a_sequence_holds_what_its_scores_depend_on():
    optionals = NOTHING._replace(
        alibi_slopes=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        alibi_batch=2,
        seqused_k=torch.tensor([6, 3], dtype=torch.int32),
    )
    numbers = sequence(7, 9, left=4, scale=0.5).numbers
    out = torch.zeros(2, 2, 4)
    on = features(ALIBI=True, SEQUSED_K=True, LEFT=True)
    interpret(sequence_kernel)[(2, 2)](out, Sizes(0, 2, 7, 9), optionals, numbers, FEATURES=on)
    slopes = optionals.alibi_slopes * 1.4426950408889634
    torch.testing.assert_close(out[:, :, 0], slopes)
    assert out[:, :, 1].tolist() == [[6, 6], [3, 3]]
    assert out[:, :, 2:].tolist() == [[[4, 0.5]] * 2] * 2


@triton.jit
def place_kernel(out, sizes, optionals, FEATURES: tl.constexpr):
    batch = tl.program_id(0)
    offsets = offsets_of(batch, sizes, optionals, FEATURES)
    lengths = lengths_of(batch, sizes, optionals, FEATURES)
    tl.store(out + 8 * batch, offsets.batch)
    tl.store(out + 8 * batch + 1, offsets.first_q)
    tl.store(out + 8 * batch + 2, offsets.first_k)
    tl.store(out + 8 * batch + 3, offsets.rows_q)
    tl.store(out + 8 * batch + 4, offsets.rows_k)
    tl.store(out + 8 * batch + 5, lengths.seqlen_q)
    tl.store(out + 8 * batch + 6, lengths.seqlen_k)
    tl.store(out + 8 * batch + 7, lengths.diagonal)


def test_where_packed_sequences_lie():
    def int32(*values):
        return torch.tensor(values, dtype=torch.int32)

    optionals = NOTHING._replace(
        cu_seqlens_q=int32(0, 5, 5, 12),
        cu_seqlens_k=int32(0, 9, 13, 15),
        seqused_q=int32(3, 0, 7),
        seqused_k=int32(9, 1, 0),
    )
    out = torch.full((3, 8), -7)
    on = features(PACKED=True, SEQUSED_Q=True, SEQUSED_K=True)
    interpret(place_kernel)[(3,)](out, Sizes(3, 2, 12, 15), optionals, FEATURES=on)
    assert out.tolist() == [
        [0, 0, 0, 5, 9, 3, 9, 6],
        [0, 5, 9, 0, 4, 0, 1, 1],
        [0, 5, 13, 7, 2, 7, 0, -7],
    ]


@triton.jit
def padded_kernel(out, cu_seqlens, ROWS: tl.constexpr):
    sequence = tl.program_id(0)
    tl.store(out + sequence, padded_row(tl.load(cu_seqlens + sequence), sequence, ROWS))


RAGGED = [(5, 0, 130, 128, 1, 70), (0, 0, 0), (128,) * 4, (127, 129, 1), (1,) * 9, (300,)]


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_padded_sequences_share_no_block(lengths):
    """Each has room for its last block, the empty ones too, and none lies past the end."""
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    out = torch.full((len(lengths) + 1,), -7)
    interpret(padded_kernel)[(len(lengths) + 1,)](out, starts, ROWS=128)
    *firsts, end = out.tolist()
    assert not any(first % 128 for first in firsts)
    for first, length, after in zip(firsts, lengths, [*firsts[1:], end], strict=True):
        assert first + -(-length // 128) * 128 <= after
    assert end == padded_row.fn(sum(lengths), len(lengths), 128)
