"""Parts of long and short sequences: each is handed out once, and both kinds alternate."""

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import NOTHING, features
from helpers.tiers import sample_rows

from tilewise.testing import interpret
from tilewise.tile.split_schedule import (
    Hint,
    SplitCall,
    SplitSizes,
    divide,
    find_alternating,
    find_sequence,
    pieces_of_a_part,
    sequence_at,
    streams_of,
)
from tilewise.tile.types import Numbers

HEADS, GROUP, ROWS = 2, 4, 128
NUMBERS = Numbers(1.0, 1.0, 0.0, 0.0, 0, 0)
FEATURES = features(GROUP=GROUP, SEQUSED_K=True, PACKED=True)


@triton.jit
def parts_kernel(
    out, share, optionals, sizes, numbers, bound, FEATURES: tl.constexpr, ROWS: tl.constexpr
):
    """A program takes part after part and goes on where it was."""
    lane = tl.arange(0, 32)
    call = SplitCall(optionals, sizes, numbers)
    streams = streams_of(lane, share, call, FEATURES, ROWS, 64)
    for number in range(tl.program_id(0), bound, tl.num_programs(0)):
        found, streams = find_alternating(number, streams, lane, share, call, FEATURES, ROWS, 64)
        tl.store(out + 4 * number, found.is_work.to(tl.int32))
        tl.store(out + 4 * number + 1, found.batch)
        tl.store(out + 4 * number + 2, found.within)
        tl.store(out + 4 * number + 3, found.rows)


@triton.jit
def rows_kernel(out, share, optionals, sizes, numbers, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """Partial states before each part, in the order of the batch, and what is known of it."""
    lane = tl.arange(0, 32)
    call = SplitCall(optionals, sizes, numbers)
    number = tl.program_id(0)
    found = find_sequence(number, Hint(0, 0, 0), lane, share, call, False, FEATURES, ROWS, 64)
    first_q, seqlen_q, seqlen_k, piece, pieces = found.sequence
    fields = found.batch, found.rows, first_q, seqlen_q, seqlen_k, piece, pieces, found.parts
    for i in tl.static_range(8):
        tl.store(out + 8 * number + i, fields[i])


@triton.jit
def share_kernel(
    out, programs, optionals, sizes, numbers, FEATURES: tl.constexpr, TOKENS: tl.constexpr
):
    lane, call = tl.arange(0, 32), SplitCall(optionals, sizes, numbers)
    share = pieces_of_a_part(lane, programs, call, FEATURES, TOKENS)
    each, parts = divide(sequence_at(programs * 0, call, FEATURES).pieces, share)
    tl.store(out, each)
    tl.store(out + 1, parts)


BATCHES = [
    ([1] * 40 + [150], [900] * 41),
    ([150, 0, 33] + [1] * 70 + [17, 16, 200], [700] * 73 + [300, 5, 2000]),
    ([1, 2, 3], [400, 4000, 1]),
    ([500], [5000]),
]


CASES = [(*batch, programs) for batch in BATCHES for programs in (1, 3)]


@pytest.mark.parametrize(
    "queries, lengths, programs", sample_rows(CASES, CASES[3], CASES[4], CASES[6])
)
def test_parts_of_both_kinds_alternate(queries, lengths, programs):
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    used = torch.tensor(lengths, dtype=torch.int32)
    optionals = NOTHING._replace(seqused_k=used, cu_seqlens_q=starts)
    sizes = SplitSizes(len(queries), HEADS, int(starts[-1]), 8192, len(queries), 512, 2**20)
    share, tokens = 3, ROWS // GROUP
    expected = []
    for batch, (count, keys) in enumerate(zip(queries, lengths)):
        pieces = -(-keys // 512)
        parts = -(-pieces // share)
        expected += [(batch, i) for i in range(-(-count // tokens) * parts * HEADS)]
    bound = len(expected) + 5
    out = torch.full((bound, 4), -1, dtype=torch.int32)
    asked = share, optionals, sizes, NUMBERS
    interpret(parts_kernel)[(programs,)](out, *asked, bound, FEATURES=FEATURES, ROWS=ROWS)
    assert out[: len(expected), 0].all() and not out[len(expected) :, 0].any()
    found = [(batch, within) for _, batch, within, _ in out[: len(expected)].tolist()]
    assert sorted(found) == expected
    is_long = [queries[batch] * GROUP > 64 for batch, _ in found]
    pairs = min(sum(is_long), len(found) - sum(is_long))
    assert is_long[: 2 * pairs] == [True, False] * pairs
    for kind in (True, False):
        own = [part for part, long in zip(found, is_long) if long == kind]
        assert own == sorted(own)
    # Where a sequence's states lie does not depend on the order
    ordered = torch.empty(len(expected), 8, dtype=torch.int32)
    interpret(rows_kernel)[(len(expected),)](ordered, *asked, FEATURES=FEATURES, ROWS=ROWS)
    for batch, _, *known in ordered.tolist():
        pieces = -(-lengths[batch] // 512)
        of = (int(starts[batch]), queries[batch], lengths[batch], 0, pieces)
        assert known == [*of, -(-pieces // share)]
    rows = dict(ordered[:, :2].tolist())
    assert all(rows[batch] == at for _, batch, _, at in out[: len(expected)].tolist())


@pytest.mark.parametrize(
    "batch, keys, room, expected",
    [
        (1, 8192, 2**20, (1, 16)),  # 128 pieces for 132 programs
        (8, 8192, 2**20, (4, 4)),  # 1,024, of which each has two parts
        (32, 8192, 2**20, (16, 1)),  # whole tiles, two a program, without a fold
        (1, 2**20, 2**20, (4, 512)),  # 124 a program, in parts that are no longer
        (8, 8192, 127, (16, 1)),  # no room for the states of 8 queries times 16 pieces
        (1, 0, 2**20, (1, 1)),
    ],
)
def test_pieces_of_a_part_and_parts_of_a_tile(batch, keys, room, expected):
    used = torch.full((batch,), keys, dtype=torch.int32)
    optionals = NOTHING._replace(seqused_k=used)
    sizes = SplitSizes(0, 8, 1, 2**20, batch, 512, room)
    found = torch.zeros(2, dtype=torch.int32)
    of = features(GROUP=GROUP, SEQUSED_K=True)
    interpret(share_kernel)[(1,)](found, 132, optionals, sizes, NUMBERS, FEATURES=of, TOKENS=16)
    assert tuple(found.tolist()) == expected
