"""Parts of tiles: each piece is handed out once, in parts that become shorter towards the end; of
long and short sequences both kinds alternate.
"""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import NOTHING, features
from helpers.tiers import sample_rows

from tilewise.kernels.hopper.decode.numbers import rates_of
from tilewise.testing import interpret
from tilewise.tile.split_schedule import (
    Hint,
    Share,
    SplitSizes,
    decoding_programs,
    divide_equally,
    find_alternating,
    find_sequence,
    is_sliced,
    pieces_of_part,
    sequence_at,
    share_of,
    streams_of,
)
from tilewise.tile.types import Numbers, Optionals

HEADS, GROUP, ROWS = 2, 4, 128
NUMBERS = Numbers(1.0, 1.0, 0.0, 0.0, 0, 0)
FEATURES = features(GROUP=GROUP, SEQUSED_K=True, PACKED=True)


class SplitCall(NamedTuple):
    """What the work depends on, in the place of a kernel's own record."""

    optionals: Optionals
    sizes: SplitSizes
    numbers: Numbers


@triton.jit
def parts_kernel(
    out, share, optionals, sizes, numbers, bound, FEATURES: tl.constexpr, ROWS: tl.constexpr
):
    """A program takes part after part and goes on where it was."""
    lane = tl.arange(0, 32)
    call, share = SplitCall(optionals, sizes, numbers), Share(share, share, share)
    streams = streams_of(lane, share, call, FEATURES, ROWS, 64)
    for number in range(tl.program_id(0), bound, tl.num_programs(0)):
        found, streams = find_alternating(number, streams, lane, share, call, FEATURES, ROWS, 64)
        tl.store(out + 4 * number, found.is_work.to(tl.int32))
        tl.store(out + 4 * number + 1, found.batch)
        tl.store(out + 4 * number + 2, found.within)
        tl.store(out + 4 * number + 3, found.rows)


@triton.jit
def rows_kernel(
    out, share, optionals, sizes, numbers, EQUALLY: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Partial states before each part, in the order of the batch, and what is known of it."""
    lane = tl.arange(0, 32)
    call, share = SplitCall(optionals, sizes, numbers), Share(share, share, share)
    number, none = tl.program_id(0), Hint(0, 0, 0, 0)
    found = find_sequence(number, none, lane, share, call, False, EQUALLY, FEATURES, ROWS, 64)
    first_q, seqlen_q, seqlen_k, piece, pieces = found.sequence
    fields = found.batch, found.rows, first_q, seqlen_q, seqlen_k, piece, pieces
    for i in tl.static_range(7):
        tl.store(out + 8 * number + i, fields[i])
    tl.store(out + 8 * number + 7, found.division.parts)


@triton.jit
def share_kernel(
    out, sms, optionals, sizes, numbers, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
    PER_SM: tl.constexpr,
):  # fmt: skip
    """How a tile of the first sequence is divided equally."""
    lane, call = tl.arange(0, 32), SplitCall(optionals, sizes, numbers)
    share = share_of(lane, sms, call, FEATURES, TOKENS, PER_SM=PER_SM)
    of = sequence_at(sms * 0, call, FEATURES)
    found = divide_equally(of.pieces, share)
    tl.store(out, found.length)
    tl.store(out + 1, found.parts)
    rows = TOKENS * FEATURES.GROUP
    tl.store(out + 2, is_sliced(of.pieces, found, of.seqlen_q, FEATURES, rows).to(tl.int32))


@triton.jit
def sms_kernel(
    out, sms, optionals, sizes, numbers, FEATURES: tl.constexpr, RATES: tl.constexpr
):  # fmt: skip
    """How many SMs decode."""
    lane, call = tl.arange(0, 32), SplitCall(optionals, sizes, numbers)
    tl.store(out, decoding_programs(lane, sms, call, FEATURES, TOKENS=4, RATES=RATES))


@triton.jit
def order_kernel(
    out, programs, optionals, sizes, numbers, bound, FEATURES: tl.constexpr, ROWS: tl.constexpr
):
    """A program takes all parts, one after the other: sequence, place in it, pieces."""
    lane, call = tl.arange(0, 32), SplitCall(optionals, sizes, numbers)
    share = share_of(lane, programs, call, FEATURES, ROWS // FEATURES.GROUP, 1)
    hint = Hint(share.pieces * 0, share.pieces * 0, share.pieces * 0, share.pieces * 0)
    for number in range(bound):
        found = find_sequence(number, hint, lane, share, call, False, False, FEATURES, ROWS, 64)
        hint = found.hint
        tiles = tl.cdiv(found.sequence.seqlen_q, ROWS // FEATURES.GROUP) * sizes.nheads
        part = found.within // tl.maximum(tiles, 1)
        first, count = pieces_of_part(part, found.division)
        fields = found.is_work.to(tl.int32), found.batch, found.within - part * tiles, first, count
        for i in tl.static_range(5):
            tl.store(out + 8 * number + i, fields[i])
        tl.store(out + 8 * number + 5, found.division.parts)
        tl.store(out + 8 * number + 6, found.division.length)


BATCHES = [
    ([1] * 40 + [150], [900] * 41),
    ([150, 0, 33] + [1] * 70 + [17, 16, 200], [700] * 73 + [300, 5, 2000]),
    ([1, 2, 3], [400, 4000, 1]),
    ([500], [5000]),
]


CASES = [(*batch, programs) for batch in BATCHES for programs in (1, 3)]


@pytest.mark.parametrize("queries, lengths, programs", sample_rows(CASES, CASES[4], CASES[7]))
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
    interpret(rows_kernel)[(len(expected),)](
        ordered, *asked, EQUALLY=True, FEATURES=FEATURES, ROWS=ROWS
    )
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
        (8, 8192, 2**20, (8, 2)),  # 1,024, of which each has one part
        (9, 8192, 2**20, (4, 4)),  # 1,152, of which each has two or three
        (32, 8192, 2**20, (16, 1)),  # whole tiles, two a program, without a fold
        (1, 2**20, 2**20, (4, 512)),  # 124 a program, in parts that are no longer
        (8, 8192, 127, (16, 1)),  # no room for the states of 8 queries times 16 pieces
        (1, 0, 2**20, (1, 1)),
    ],
)
def test_equal_parts_of_a_tile(batch, keys, room, expected):
    assert equal_parts(batch, keys, 1, room)[:2] == list(expected)


@pytest.mark.parametrize(
    "batch, sms, expected",
    [
        (1, 64, (1, 16)),  # 128 pieces, and as many programs
        (8, 132, (4, 4)),  # 1,024, of which each program has one part
        (9, 132, (4, 4)),
        (32, 132, (16, 1)),
    ],
)
def test_equal_parts_where_an_sm_has_two_programs(batch, sms, expected):
    """All of them have work."""
    assert equal_parts(batch, 8192, 1, 2**20, sms=sms, per_sm=2)[:2] == list(expected)


@pytest.mark.parametrize(
    "tokens, batch, expected",
    [
        (8, 16, (16, 1)),  # 128 tiles of 32 rows are whole: their states would be an eighth more
        (4, 16, (4, 4)),
        (16, 16, (4, 4)),
        (8, 8, (8, 2)),
    ],
)
def test_tiles_of_32_rows_are_whole_where_each_program_has_one(tokens, batch, expected):
    assert equal_parts(batch, 8192, tokens, 2**20, tokens=tokens)[:2] == list(expected)


def equal_parts(batch, keys, queries, room, sms=132, per_sm=1, tokens=16):
    """What `share_kernel` finds."""
    used = torch.full((batch,), keys, dtype=torch.int32)
    optionals = NOTHING._replace(seqused_k=used)
    sizes = SplitSizes(0, 8, queries, 2**20, batch, 512, room)
    found = torch.zeros(3, dtype=torch.int32)
    of = features(GROUP=GROUP, SEQUSED_K=True)
    interpret(share_kernel)[(1,)](
        found, sms, optionals, sizes, NUMBERS, FEATURES=of, TOKENS=tokens, PER_SM=per_sm
    )
    return found.tolist()


@pytest.mark.parametrize(
    "batch, queries, expected",
    [
        (1, 8, True),  # 15 pieces behind the first of 16 parts
        (1, 4, False),
        (8, 8, False),  # 8 behind the first of two parts, which are the programs' only ones
        (32, 8, False),  # whole
    ],
)
def test_which_tiles_are_folded_in_slices(batch, queries, expected):
    assert equal_parts(batch, 8192, queries, 2**20)[2] == expected


STEPS = {
    "alike": ([1] * 63 + [2048], 8192, [48, 58, 68]),
    "equal parts": ([1] * 28 + [512] * 4, 8192, [28, 32, 41]),
    "one decode": ([1, 2048], 8192, [2, 2, 2]),
    "a short chunk": ([1] * 63 + [64], 8192, [82, 104, 95]),
    "decodes alone": ([1] * 40 + [63], 8192, [132, 132, 132]),
    "a chunk alone": ([2048], 8192, [2, 2, 1]),
}


@pytest.mark.parametrize("name", STEPS)
def test_how_many_sms_decode_beside_chunks(name):
    """A key costs as much as it does of 16 bits, of 8, and where an SM has one program."""
    queries, keys, expected = STEPS[name]
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    used = torch.full((len(queries),), keys, dtype=torch.int32)
    optionals = NOTHING._replace(seqused_k=used, cu_seqlens_q=starts)
    sizes = SplitSizes(len(queries), 8, int(starts[-1]), keys, len(queries), 512, 2**20)
    of = FEATURES._replace(CHUNK=64)
    found = torch.zeros(3, dtype=torch.int32)
    for i, rates in enumerate((rates_of("", 2), rates_of("e4m3", 2), rates_of("", 1))):
        interpret(sms_kernel)[(1,)](
            found[i:], 132, optionals, sizes, NUMBERS, FEATURES=of, RATES=rates
        )
    assert found.tolist() == expected


def in_order(queries, lengths, programs, heads=2, room=2**20):
    """What `order_kernel` finds, up to the end, as lists of the fields of each part."""
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    used = torch.tensor(lengths, dtype=torch.int32)
    optionals = NOTHING._replace(seqused_k=used, cu_seqlens_q=starts)
    sizes = SplitSizes(len(queries), heads, int(starts[-1]), 2**20, len(queries), 512, room)
    pieces = [-(-n // 512) for n in lengths]
    tiles = [-(-n // 16) * heads for n in queries]
    bound = sum(max(a, 1) * b for a, b in zip(pieces, tiles)) + 2
    out = torch.zeros(bound, 8, dtype=torch.int32)
    interpret(order_kernel)[(1,)](
        out, programs, optionals, sizes, NUMBERS, bound, FEATURES=FEATURES, ROWS=64
    )
    found = out[: int(out[:, 0].sum())].tolist()
    assert all(is_work for is_work, *_ in found) and not out[len(found) :, 0].any()
    return found, pieces, tiles


ORDERS = [  # and whether programs have many tiles
    ([1] * 8, [8192] * 8, 2, True),
    ([1] * 8, [8192] * 8, 33, False),
    ([1], [2**16], 16, False),
    ([1], [100], 132, False),
    ([1] * 40, [512 * (1 + 7 * i % 5) for i in range(40)], 5, True),
    ([1, 0, 17, 40, 1], [3000, 700, 0, 9000, 513], 1, None),
]


@pytest.mark.parametrize(
    "queries, lengths, programs, has_many", sample_rows(ORDERS, ORDERS[3], *ORDERS[4:])
)
def test_parts_cover_each_piece_once(queries, lengths, programs, has_many):
    found, pieces, tiles = in_order(queries, lengths, programs)
    covered = {}
    for _, batch, tile, first, count, parts, each, _ in found:
        assert first > 0 or count == each or not pieces[batch]  # that the fold begins with
        covered.setdefault((batch, tile), []).append((first, count, parts))
    assert sorted(covered) == [(b, t) for b, n in enumerate(tiles) for t in range(n)]
    for (batch, _), of_tile in covered.items():
        stops = [first + count for first, count, _ in of_tile]
        assert [first for first, _, _ in of_tile] == [0, *stops[:-1]]
        assert stops[-2] < pieces[batch] if len(stops) > 1 else True
        assert stops[-1] >= max(pieces[batch], 1) and {n for *_, n in of_tile} == {len(of_tile)}
    if has_many is None:
        return
    counts = [min(count, pieces[batch]) for _, batch, _, _, count, *_ in found]
    if not has_many:
        assert len(set(counts)) == 1
        return
    # Those that begin last have one piece; tiles are whole only while more is left than one each
    behind = sum(a * b for a, b in zip(pieces, tiles))
    for count, (_, batch, _, _, _, parts, *_) in zip(counts, found):
        assert behind > 2 * programs or count == 1
        assert parts > 1 or pieces[batch] == 1 or behind > programs * pieces[batch]
        behind -= count
    assert behind == 0


@pytest.mark.parametrize("is_uneven", [False, True])
def test_uneven_tiles_end_in_short_parts(is_uneven):
    """Whole tiles of 6 pieces, or parts of four of longer ones, would end late; where one tile has
    almost all, parts are equal.
    """
    lengths = [512 * (1 + n * n // 8) for n in range(16)] if is_uneven else [512] * 15 + [2**15]
    found, _, _ = in_order([1] * 16, lengths, 16)
    counts = [count for *_, count, _, _, _ in found]
    assert (set(counts[-32:]) == {1}) == is_uneven
    assert is_uneven or set(counts) == {1, 4}


def test_tiles_are_whole_without_room_for_states():
    found, _, _ = in_order([1] * 4, [8192] * 4, 33, room=63)
    assert len(found) == 8 and all(count == 16 and parts == 1 for *_, count, parts, _, _ in found)


@pytest.mark.slow
def test_what_is_left_for_the_end():
    """32 sequences of 16 pieces and 2 heads: whole tiles, all but about one for each program, then
    parts of four, and about the last three pieces of each program are parts of their own.
    """
    found, _, _ = in_order([1] * 32, [8192] * 32, 7)
    counts = [count for *_, count, _, _, _ in found]
    assert counts == sorted(counts, reverse=True)
    assert [counts.count(n) for n in (16, 4, 1)] == [56, 26, 24]
