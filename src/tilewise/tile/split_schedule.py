"""Which part of attention with a KV cache a program works on, when the device knows the lengths.

A tile of queries sees some pieces of split_size keys. Programs share them in parts, each a run of
neighbours, and a tile of more than one part is folded afterwards. Parts, and slices of folds
behind them, are numbered sequence by sequence, and this module finds the sequence of a number, as
`varlen` does for tiles of packed sequences: the lanes of a warp hold the counts of 32 sequences,
and prefix sums say which of them the number lies in. What it is of that sequence the caller knows.

SMs do not read memory equally fast, so an equal share each would end with the slowest. Where each
program has many tiles, parts become shorter towards the end of all (guided self-scheduling:
Polychronopoulos and Kuck, 1987): whole tiles, then LONGEST_PART pieces, then one. Where it has few,
parts are equal: the end of a part costs more than the wait for the slowest.

How many parts a tile has decides no bit of the result: pieces are folded from left to right,
whichever programs compute them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .bounds import clamp
from .seqlen import rows_of
from .splits import keys_seen, longest_alone

GROUP = tl.constexpr(32)  # sequences that are looked at together: the lanes of a warp
PARTS_A_PROGRAM = tl.constexpr(2)  # of equal parts: more write more states, fewer end less evenly
LONGEST_PART = tl.constexpr(4)  # pieces of a tile that is divided
LAST_PIECES = tl.constexpr(3)  # of each program, which are parts of their own
MANY_TILES = tl.constexpr(8)  # of each program: parts become shorter
UNEVEN = tl.constexpr(0.75)  # pieces of the mean tile over the longest's: parts become shorter
LONGEST_UNEVEN = tl.constexpr(8)  # equal parts of that: a longer one ends last in any order
MANY_STATES = tl.constexpr(256)  # of a tile, pieces behind the first part times rows: all fold
LAST = tl.constexpr(2**31 - 1)  # a number past all parts
MOST, MANY = tl.constexpr(2**15), tl.constexpr(2**25)
LONG_ROWS = tl.constexpr(64)  # with more, tiles wait for tensor cores rather than for memory
CHUNK_ROWS = tl.constexpr(128)  # of a tile of the training forward
FOLD_ROWS, FOLD_COLUMNS = tl.constexpr(8), tl.constexpr(32)  # of a slice of the output


class SplitSizes(NamedTuple):
    """Runtime lengths of attention with a KV cache."""

    packed: int  # how many sequences; 0 where they are rows of a batch
    nheads: int  # key heads
    seqlen_q: int
    seqlen_k: int  # that a sequence has room for
    batch: int
    split_size: int
    room: int  # queries, each times its pieces, whose partial states there is memory for


class SplitSequence(NamedTuple):
    """What parts are made of, of one sequence or of each of 32."""

    first_q: tl.tensor  # where its queries begin, if they are packed
    seqlen_q: tl.tensor
    seqlen_k: tl.tensor
    piece: tl.tensor  # the first piece that any of its queries sees
    pieces: tl.tensor


class Share(NamedTuple):
    """What division into parts depends on, of all tiles."""

    pieces: tl.tensor  # of an equal part, at most
    total: tl.tensor  # pieces of all tiles
    programs: tl.tensor
    is_uneven: tl.tensor = False  # whether some tiles have far more than others
    longest: tl.tensor = LONGEST_PART  # pieces of a part of a tile that is divided equally


class Division(NamedTuple):
    """A tile's parts: `count` of `length` pieces, but for the last one, then parts of one."""

    length: tl.tensor
    count: tl.tensor
    parts: tl.tensor


class Hint(NamedTuple):
    """Where to begin to look: the first sequence of a group, and what comes before it. It serves
    every number from there on.
    """

    batch: tl.tensor
    before: tl.tensor
    rows: tl.tensor
    pieces: tl.tensor


class Found(NamedTuple):
    """The sequence of a number, and the number within it."""

    is_work: tl.tensor
    batch: tl.tensor
    sequence: SplitSequence
    division: Division  # of its tiles
    within: tl.tensor
    rows: tl.tensor  # of partial states, of the sequences before it
    hint: Hint
    stop: tl.tensor  # numbers up to and with its group of sequences; all, where it is none


class Streams(NamedTuple):
    """Parts of long sequences and of the others, each numbered by itself."""

    long: Hint
    short: Hint
    longs: tl.tensor  # how many
    shorts: tl.tensor


@triton.jit
def lengths_at(batch, call, FEATURES: tl.constexpr):
    """Where a sequence's queries begin, how many there are, and how many keys."""
    first_q, seqlen_q = batch * 0, call.sizes.seqlen_q + batch * 0
    if FEATURES.PACKED:
        first_q, seqlen_q = rows_of(
            call.optionals.cu_seqlens_q, batch, following=batch + 1, total=call.sizes.seqlen_q
        )
    seqlen_k = call.sizes.seqlen_k + batch * 0
    if FEATURES.SEQUSED_K:
        seqlen_k = clamp(tl.load(call.optionals.seqused_k + batch), 0, high=call.sizes.seqlen_k)
    return first_q, seqlen_q, seqlen_k


@triton.jit
def sequence_at(batch, call, FEATURES: tl.constexpr):
    """Sequences; of none past the last any queries."""
    of = tl.minimum(batch, call.sizes.batch - 1)
    first_q, seqlen_q, seqlen_k = lengths_at(of, call, FEATURES=FEATURES)
    numbers, split_size = call.numbers, call.sizes.split_size
    first = seqlen_k - seqlen_q
    keys = keys_seen(first, seqlen_k - 1, seqlen_k, numbers, split_size, FEATURES)
    if FEATURES.CHUNK > 0:  # which another launch computes
        seqlen_q = tl.where(seqlen_q < FEATURES.CHUNK, seqlen_q, 0)
    seqlen_q = tl.where(batch < call.sizes.batch, seqlen_q, 0)
    return SplitSequence(first_q, seqlen_q, seqlen_k, keys.piece, keys.stop - keys.piece)


@triton.jit
def decoding_programs(
    lane, programs, call, FEATURES: tl.constexpr, TOKENS: tl.constexpr, RATES: tl.constexpr
):
    """How many SMs decode, by a launch's `Rates`, so that both kinds end at about the same time."""
    decodes, chunks, first = programs * 0.0, programs * 0.0, programs * 0
    while first < call.sizes.batch:
        batch = first + lane
        _, queries, keys = lengths_at(tl.minimum(batch, call.sizes.batch - 1), call, FEATURES)
        if FEATURES.LEFT:
            keys = tl.minimum(keys, queries + call.numbers.left)
        queries = tl.where(batch < call.sizes.batch, queries, 0)
        is_chunk = queries >= FEATURES.CHUNK
        decoded = tl.where(is_chunk, 0, tl.cdiv(queries, TOKENS)).to(tl.float32) * keys
        mean_keys = tl.maximum(keys - queries // 2, 0)  # that a query of a chunk sees
        walked = tl.where(is_chunk, tl.cdiv(queries, CHUNK_ROWS), 0).to(tl.float32) * mean_keys
        decodes += tl.sum(decoded, 0)
        chunks += tl.sum(walked, 0)
        first += GROUP
    chunks *= RATES.COST_OF_CHUNK * FEATURES.GROUP
    share = programs * (decodes / tl.maximum(decodes + chunks, 1.0))
    # SMs that memory has no bytes for delay chunks, by what they ask of the L2 cache
    share = tl.minimum(share, 0.5 * (share + RATES.ENOUGH * programs)) / RATES.STEP
    share = clamp((share + 0.5).to(tl.int32) * RATES.STEP, RATES.STEP, high=programs)
    share = tl.where(chunks > 0, share, programs)
    return tl.sum(tl.where(lane == 0, share, 0), 0)  # the warp's, to the compiler too


@triton.jit
def share_of(lane, sms, call, FEATURES: tl.constexpr, TOKENS: tl.constexpr, PER_SM: tl.constexpr):
    """What the parts of all tiles depend on; of `pieces` no end, if not all states have room. Parts
    are as long as if an SM had one program in place of PER_SM, unless each program has one part.
    """
    total, queries, first = sms * 0, sms * 0, sms * 0
    tiles, most = sms * 0, sms * 0
    while first < call.sizes.batch:
        of = sequence_at(first + lane, call, FEATURES=FEATURES)
        tiles_of = tl.cdiv(of.seqlen_q, TOKENS)
        total += tl.sum(tiles_of * of.pieces, 0)
        tiles += tl.sum(tiles_of, 0)
        most = tl.maximum(most, tl.max(tl.where(tiles_of > 0, of.pieces, 0), 0))
        # 32-bit sums, which the whole warp has at once; none may overflow
        few = tl.minimum(of.seqlen_q, MOST) * tl.minimum(of.pieces, MOST)
        queries = tl.minimum(queries + tl.sum(tl.minimum(few, MANY), 0), MANY)
        first += GROUP
    is_uneven = total < UNEVEN * tiles.to(tl.float32) * most
    total, tiles = total * call.sizes.nheads, tiles * call.sizes.nheads
    has_room = queries <= call.sizes.room
    pieces = tl.maximum(tl.cdiv(total, sms * PARTS_A_PROGRAM), 1)
    is_uneven = has_room & is_uneven & (most <= LONGEST_UNEVEN * pieces)
    alone = tl.maximum(tl.cdiv(total, sms * PER_SM), 1)
    LONGEST: tl.constexpr = longest_alone(TOKENS * FEATURES.GROUP)
    fits = has_room & (alone <= LONGEST) & (tiles * tl.cdiv(most, alone) <= sms * PER_SM)
    longest = tl.where(fits, alone, LONGEST_PART)
    pieces = tl.where(fits, alone, tl.where(has_room, pieces, MANY))
    return Share(pieces, tl.where(has_room, total, LAST), sms, is_uneven, longest=longest)


@triton.jit
def divide_equally(pieces, share):
    """Parts that are all alike but the last. A tile of at most `share.pieces` is one part, which
    needs no fold.
    """
    most = tl.where(pieces <= share.pieces, share.pieces, tl.minimum(share.pieces, share.longest))
    parts = tl.maximum(tl.cdiv(pieces, most), 1)
    return Division(tl.maximum(tl.cdiv(pieces, parts), 1), parts, parts=parts)


@triton.jit
def divide(pieces, tiles, before, share):
    """Parts of each of `tiles`, behind `before` pieces of others. Where programs have many: whole
    tiles as long as each program has as much left to do afterwards, and of the last pieces of all
    parts of one.
    """
    left, a_tile_each = share.total - before, share.programs * pieces
    is_whole = left - tiles * pieces >= a_tile_each
    longer = tl.maximum(left - share.programs * LAST_PIECES, 0) // tl.maximum(tiles, 1)
    count = tl.minimum(longer, pieces) // LONGEST_PART
    length = tl.where(count > 0, LONGEST_PART, 1)
    parts = count + pieces - count * length
    equal = divide_equally(pieces, share)
    is_equal = (share.total // MANY_TILES < a_tile_each) & (share.is_uneven == 0)
    length = tl.where(is_whole, tl.maximum(pieces, 1), length)
    count = tl.where(is_whole, 1, count)
    parts = tl.where(is_whole, 1, tl.maximum(parts, 1))
    return Division(
        tl.where(is_equal, equal.length, length),
        tl.where(is_equal, equal.count, count),
        tl.where(is_equal, equal.parts, parts),
    )


@triton.jit
def pieces_of_part(part, division):
    """The first piece of a part and how many it has, of a tile's."""
    behind = part - division.count
    first = tl.where(behind < 0, part * division.length, division.count * division.length + behind)
    return first, tl.where(behind < 0, division.length, 1)


@triton.jit
def is_sliced(pieces, division, seqlen_q, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """Whether a sequence's tiles are folded in slices."""
    rows = tl.minimum(seqlen_q * FEATURES.GROUP, ROWS)
    return (division.parts > 1) & ((pieces - division.length) * rows > MANY_STATES)


@triton.jit
def slices_of(seqlen_q, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """How many slices of its output a tile of up to ROWS rows is folded in."""
    rows = tl.minimum(seqlen_q * FEATURES.GROUP, ROWS)
    return tl.cdiv(rows, FOLD_ROWS) * (BLOCK_DV // FOLD_COLUMNS)


@triton.jit
def find_sequence(
    number, hint, lane, share, call,
    IS_FOLD: tl.constexpr, EQUALLY: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, is_long=None,
):  # fmt: skip
    """The sequence of a part, or of a slice of a fold; `lane` is 0 .. 31 in the caller's layout.
    EQUALLY: parts are as long from the first to the last. `is_long`: numbers are of long sequences
    alone, or of the others.
    """
    TOKENS: tl.constexpr = ROWS // FEATURES.GROUP
    first = hint.batch - GROUP
    after, rows_after, pieces_after = hint.before, hint.rows, hint.pieces
    works, rows, pieces = lane * 0, lane * 0, lane * 0
    of, division = SplitSequence(works, works, works, works, works), Division(works, works, works)
    # The sums before a group are no variables of the loop: see `varlen.varlen_tile`
    while (after <= number) & (first + GROUP < call.sizes.batch):
        first += GROUP
        of = sequence_at(first + lane, call, FEATURES=FEATURES)
        tiles = tl.cdiv(of.seqlen_q, TOKENS) * call.sizes.nheads
        if EQUALLY:
            division = divide_equally(of.pieces, share)
        else:
            pieces = tiles * of.pieces
            before = pieces_after + tl.cumsum(pieces, 0) - pieces
            division = divide(of.pieces, tiles, before=before, share=share)
            pieces_after += tl.sum(pieces, 0)
        parts, times = division.parts, division.parts
        if IS_FOLD:
            slices = slices_of(of.seqlen_q, FEATURES, ROWS=ROWS, BLOCK_DV=BLOCK_DV)
            has_slices = is_sliced(of.pieces, division, of.seqlen_q, FEATURES, ROWS)
            times = tl.where(has_slices, slices, 0)
        works = tiles * times
        if is_long is not None:
            works = tl.where((of.seqlen_q * FEATURES.GROUP > LONG_ROWS) == is_long, works, 0)
        rows = tl.where(parts > 1, of.seqlen_q * of.pieces, 0)
        rows *= call.sizes.nheads * FEATURES.GROUP
        after += tl.sum(works, 0)
        rows_after += tl.sum(rows, 0)
    before, rows_before = after - tl.sum(works, 0), rows_after - tl.sum(rows, 0)
    pieces_before = pieces_after - tl.sum(pieces, 0)

    ends = before + tl.cumsum(works, 0)
    is_passed = ends <= number
    place = tl.sum(is_passed.to(tl.int32), 0)
    start = tl.max(tl.where(is_passed, ends, before), 0)
    of_passed = tl.sum(tl.where(is_passed, rows, 0), 0)
    return Found(
        number < after,
        tl.minimum(first + place, call.sizes.batch - 1),
        sequence_in(of, lane, place=place, call=call, FEATURES=FEATURES),
        division_in(division, lane, place=place),
        number - start,
        rows_before + of_passed,
        Hint(first, before, rows=rows_before, pieces=pieces_before),
        after,
    )


@triton.jit
def division_in(division, lane, place):
    """The one that a lane holds."""
    is_here = lane == place
    return Division(
        tl.maximum(tl.sum(tl.where(is_here, division.length, 0), 0), 1),
        tl.sum(tl.where(is_here, division.count, 0), 0),
        tl.maximum(tl.sum(tl.where(is_here, division.parts, 0), 0), 1),
    )


@triton.jit
def sequence_in(of, lane, place, call, FEATURES: tl.constexpr):
    """The one that a lane holds: a sum over the warp, where its lengths again would be loads and
    divisions.
    """
    is_here = lane == place
    first_q, seqlen_q = place * 0, call.sizes.seqlen_q + place * 0
    if FEATURES.PACKED:
        first_q = tl.sum(tl.where(is_here, of.first_q, 0), 0)
        seqlen_q = tl.sum(tl.where(is_here, of.seqlen_q, 0), 0)
    return SplitSequence(
        first_q,
        seqlen_q,
        seqlen_k=tl.sum(tl.where(is_here, of.seqlen_k, 0), 0),
        piece=tl.sum(tl.where(is_here, of.piece, 0), 0),
        pieces=tl.sum(tl.where(is_here, of.pieces, 0), 0),
    )


@triton.jit
def streams_of(
    lane, share, call, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """The parts of all sequences, from the first on."""
    zero = share.pieces * 0
    none, end = Hint(zero, zero, rows=zero, pieces=zero), zero + LAST
    longs = find_sequence(end, none, lane, share, call, False, True, FEATURES, ROWS, BLOCK_DV, True)
    shorts = find_sequence(
        end, none, lane, share, call, False, True, FEATURES, ROWS, BLOCK_DV, False
    )
    return Streams(none, none, longs=longs.stop, shorts=shorts.stop)


@triton.jit
def find_alternating(
    number, streams, lane, share, call,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The sequence of a part, where parts of long sequences and of the others alternate as long as
    there are both: at all times some programs then wait for tensor cores, and some for memory.
    """
    pairs = tl.minimum(streams.longs, streams.shorts)
    is_long = tl.where(number < 2 * pairs, number % 2 == 0, streams.longs > streams.shorts)
    index = tl.where(number < 2 * pairs, number // 2, number - pairs)
    long, short = streams.long, streams.short
    hint = Hint(
        tl.where(is_long, long.batch, short.batch),
        tl.where(is_long, long.before, short.before),
        tl.where(is_long, long.rows, short.rows),
        number * 0,
    )
    part = find_sequence(
        index, hint, lane, share, call, False, True, FEATURES, ROWS, BLOCK_DV, is_long
    )
    batch, before, rows, pieces = part.hint
    long = Hint(
        tl.where(is_long, batch, long.batch),
        tl.where(is_long, before, long.before),
        tl.where(is_long, rows, long.rows),
        pieces,
    )
    short = Hint(
        tl.where(is_long, short.batch, batch),
        tl.where(is_long, short.before, before),
        tl.where(is_long, short.rows, rows),
        pieces,
    )
    stop = streams.longs + streams.shorts
    part = Found(
        part.is_work, part.batch, part.sequence, part.division, part.within, part.rows,
        part.hint, stop,
    )  # fmt: skip
    return part, Streams(long, short, longs=streams.longs, shorts=streams.shorts)
