"""Host side of quantising: `quantize` and `transposed_values` of `kernels/cpu/quantize.py`, by
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ...tile.rotary import Rotary
from ...tile.types import Strided
from ...tuning.select import architecture
from ..common.arguments import strided
from ..common.quantized import (
    COLUMNS,
    FP8,
    TWO_LEVELS,
    Lengths,
    Quantized,
    Scales,
    columns_of,
    empty_values,
    packed_columns,
)
from ..common.relaunch import Launches, addresses_of, distinct_views
from .decode_launch import SplitPlan, run
from .fp8_launch import has_product, of_head
from .hadamard import Rotation, tiles_at_once
from .quantize_kernels import (
    SHARE,
    WARPS,
    Rounding,
    Statistics,
    chunks_of,
    quantize_amax_kernel,
    quantize_cast_kernel,
    quantize_loss_kernel,
    quantize_means_kernel,
    quantize_statistics_kernel,
    transpose_values_kernel,
)
from .quantize_rows import RowBlocks, Tables

Tensor = torch.Tensor
Given = Sequence[Tensor | None]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDE, STAGES = 8, 1
# The word of drift, as compiled graphs want outputs at multiples of 16 bytes; then those of the
# largest magnitudes
FIRST = 4
UNIT = 4  # fp32 numbers, at multiples of which tensors begin that share memory


class Side(NamedTuple):
    """What is done to q, to k or to v."""

    group: int  # heads that share a scale
    rotates: bool
    smooths: bool
    transposes: bool


class Memory(NamedTuple):
    """What kernels write of one tensor."""

    out: Tensor  # codes, or V^T: e4m3, or its bits where a GPU has no conversion
    scale: Tensor | None  # where none is given
    mean: Tensor | None
    statistics: Statistics  # of each block of rows
    rounding: Rounding
    reach: Tensor | None
    drift: Tensor | None  # by its bits: ()
    largest: Tensor | None  # magnitude, by its bits: (sequences, nheads_k)


class Room(NamedTuple):
    """The memory that calls of one signature need; of q, k and v where there are three."""

    dtype: torch.dtype  # of codes: e4m3, or bytes where a GPU has no conversion
    scale: tuple[int, int]  # its shape
    asks: tuple[bool, ...]  # whether the scale is of the data
    means: tuple[tuple[int, ...] | None, ...]
    blocks: tuple[tuple[int, ...], ...]  # the shape of sums of blocks
    # Where in `Made.numbers` there are sums, highs, lows, lost, squares and reach
    places: tuple[tuple[int | None, ...], ...]
    drifts: bool  # whether that of v is measured
    numbers: int
    words: int


class Made(NamedTuple):
    """That of one call: tensors that are returned, and one for all others of a dtype, as each costs
    the host 2 us and its views as much.
    """

    outs: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]
    means: tuple[Tensor | None, ...]
    numbers: Tensor | None  # fp32, that kernels leave for those behind them
    words: Tensor | None  # fp32 or its bits, 0: that of drift, and the largest magnitudes


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Any,
    scales: Given,
    of: Lengths,
    rotary: Rotary | None = None,
) -> Quantized:
    """Of 4-dimensional tensors; `steps` has rotate, smooth_k and smooth_v, and `scales` those that
    are given, (batch, nheads_k).
    """
    return prepare_quantize(steps)(q, k, v, scales, of, rotary)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    return prepare_transposed()(v, seqused_k, cu_seqlens_k)


class Quantizing(Launches):
    """`quantize` of one signature."""

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.room: Room | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scales: Given, of: Lengths, rotary: Rotary | None
    ) -> Quantized:
        starts = of.cu_seqlens_q, of.cu_seqlens_k, of.cu_seqlens_k
        room = self.room
        if room is None:
            sides = sides_of(q, k, self.steps)
            room = self.room = room_of((q, k, v), sides, starts, scales)
        made = make(room, (q, k, v), starts)
        tables = (None, None) if rotary is None else rotary[:2]
        read = q, k, v, *scales, *of, *tables
        if not self.again_at(addresses_of(read) + addresses_in(room, made)):
            sides, memory = sides_of(q, k, self.steps), memory_in(room, made)
            written = [x for one in memory for x in tensors_of(one)]
            views = distinct_views(read)
            inputs, given, lengths = views[:3], views[3:6], Lengths(*views[6:10])
            turns = None if rotary is None else rotary._replace(cos=views[10], sin=views[11])
            plans = plans_of(inputs, sides, given, lengths, turns, memory)
            self.record([run(plan, q.device) for plan in plans], (*views, *written), q)
        q8, k8, v_t = (x if x.dtype == FP8 else x.view(FP8) for x in made.outs)
        found = Scales(*(x if one is None else one for x, one in zip(made.scales, scales)))
        drift = made.words[0] if room.drifts and made.words is not None else None
        return Quantized(q8, k8, v_t, found, *made.means[1:], drift)


class Transposing(Launches):
    """`transposed_values` of one signature."""

    def __call__(self, v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
        v_t = empty_values(v, cu_seqlens_k)
        if not self.again((v, seqused_k, cu_seqlens_k, v_t)):
            views = distinct_views((v.view(torch.uint8), seqused_k, cu_seqlens_k))
            launched = [run(plan, v.device) for plan in transposing(*views, v_t)]
            self.record(launched, (*views, v_t), v)
        return v_t.view(FP8)


prepare_quantize, prepare_transposed = Quantizing, Transposing


def sides_of(q: Tensor, k: Tensor, steps: Any) -> tuple[Side, Side, Side]:
    """Of q, k and v."""
    return (
        Side(q.shape[2] // k.shape[2], steps.rotate, False, False),
        Side(1, steps.rotate, steps.smooth_k, False),
        Side(1, False, steps.smooth_v, True),
    )


def memory_of(
    tensors: Sequence[Tensor], sides: Sequence[Side], starts: Sequence[Tensor | None], scales: Given
) -> list[Memory]:
    """Of a call's kernels; `starts` are where packed sequences of q, k and v begin."""
    room = room_of(tensors, sides, starts, scales)
    return memory_in(room, make(room, tensors, starts))


def room_of(
    tensors: Sequence[Tensor], sides: Sequence[Side], starts: Sequence[Tensor | None], scales: Given
) -> Room:
    """What a call needs."""
    q, k, _ = tensors
    sequences = q.shape[0] if starts[0] is None else starts[0].shape[0] - 1
    asks = tuple(x is None for x in scales)
    drifts = sides[2].smooths and tensors[2].shape[3] > TWO_LEVELS
    means, blocks, places, numbers = [], [], [], 0
    for x, side, of, is_asked in zip(tensors, sides, starts, asks):
        block = (count_of(x, of), *x.shape[2:])
        mean = (sequences, *x.shape[2:])
        is_rounded = side.smooths and side.transposes
        is_walked = is_rounded and drifts
        kinds = [(block, side.smooths), *[(block, side.smooths and is_asked)] * 2]
        found: list[int | None] = []
        for shape, is_there in [*kinds, (block, is_rounded), (block, is_walked), (mean, is_walked)]:
            found.append(numbers if is_there else None)
            numbers += is_there * -(-math.prod(shape) // UNIT) * UNIT
        means.append(mean if side.smooths else None)
        blocks.append(block)
        places.append(tuple(found))
    heads = sequences * k.shape[2]
    words = FIRST + any(asks) * 3 * heads if drifts or any(asks) else 0
    dtype = FP8 if has_product(architecture(q.device)) else torch.uint8
    of_all = tuple(means), tuple(blocks), tuple(places)
    return Room(dtype, (sequences, k.shape[2]), asks, *of_all, drifts, numbers, words)


def make(room: Room, tensors: Sequence[Tensor], starts: Sequence[Tensor | None]) -> Made:
    """The memory of a call."""
    q, k, v = tensors
    outs = []
    for x, of in zip((q, k), starts):
        if of is None:
            outs.append(torch.empty(x.shape, device=x.device, dtype=room.dtype))
        else:  # rows of no packed sequence are 0
            out = torch.zeros(x.shape, device=x.device, dtype=torch.uint8)
            outs.append(out if room.dtype == torch.uint8 else out.view(FP8))
    v_t = empty_values(v, starts[2])
    outs.append(v_t if room.dtype == torch.uint8 else v_t.view(FP8))
    number: Any = dict(device=q.device, dtype=torch.float32)
    scales = [torch.empty(room.scale, **number) if asked else None for asked in room.asks]
    means = [None if shape is None else torch.empty(shape, **number) for shape in room.means]
    numbers = torch.empty(room.numbers, **number) if any(room.means) else None
    words = torch.zeros(room.words, **number) if room.words else None
    return Made(tuple(outs), tuple(scales), tuple(means), numbers, words)


def memory_in(room: Room, made: Made) -> list[Memory]:
    """Of q, k and v, with views of what they share."""
    words = None if made.words is None else made.words.view(torch.int32)
    found = []
    for i, (out, scale, mean) in enumerate(zip(made.outs, made.scales, made.means)):
        block = room.blocks[i]
        shapes = *[block] * 5, room.means[i]
        views = [
            None if at is None else _view(made.numbers, at, shape)
            for at, shape in zip(room.places[i], shapes)
        ]
        drift = None if words is None or views[5] is None else words[0]
        largest = None
        if scale is not None:
            largest = _view(words, _largest_at(room, i), room.scale)
        of_blocks = Statistics(*views[:3]), Rounding(*views[3:5])
        found.append(Memory(out, scale, mean, *of_blocks, views[5], drift, largest))
    return found


def _view(x: Any, at: int, shape: Any) -> Tensor:
    return x[at : at + math.prod(shape)].view(shape)


def _largest_at(room: Room, i: int) -> int:
    return FIRST + i * room.scale[0] * room.scale[1]


def tensors_of(memory: Memory) -> list[Tensor | None]:
    """What kernels write of one tensor, as many whatever it is."""
    return [*memory[:3], *memory.statistics, *memory.rounding, *memory[5:]]


def addresses_in(room: Room, made: Made) -> list[int]:
    """Those of `tensors_of` of q, k and v, without the views."""
    numbers, words = addresses_of((made.numbers, made.words))
    found = []
    for i, (out, scale, mean) in enumerate(zip(made.outs, made.scales, made.means)):
        found += addresses_of((out, scale, mean))
        places = room.places[i]
        found += [0 if at is None else numbers + 4 * at for at in places]
        found.append(0 if places[5] is None else words)
        found.append(0 if scale is None else words + 4 * _largest_at(room, i))
    return found


def plans_of(
    tensors: Sequence[Any],
    sides: Sequence[Side],
    scales: Given,
    of: Lengths,
    rotary: Rotary | None,
    memory: Sequence[Memory],
) -> list[SplitPlan]:
    """The launches of a call."""
    q, k, v = tensors
    of_q = row_blocks(q, of.cu_seqlens_q, of.seqused_q)
    of_k = row_blocks(k, of.cu_seqlens_k, of.seqused_k)
    blocks = of_q, of_k, of_k._replace(nheads=v.shape[2])
    tables = tables_of(rotary, of_k)
    each = zip(tensors, sides, blocks, (tables, tables, None), scales, memory)
    return [plan for one in each for plan in plans_of_one(*one)]


def plans_of_one(
    x: Tensor,
    side: Side,
    blocks: RowBlocks,
    tables: tuple[Tables, int, bool] | None,
    scale: Tensor | None,
    into: Memory,
) -> list[SplitPlan]:
    """The launches of q, k or v."""
    x = x if x.dtype in DTYPES else x.float()
    x = x if x.stride(3) == 1 else x.contiguous()
    headdim, group = x.shape[3], side.group
    mixed = headdim & -headdim if side.rotates else 0
    rotation = Rotation(headdim, mixed, mixed**-0.5 if mixed else 1.0)
    angles = None
    if tables is not None:
        angles, half, is_interleaved = tables
        rotation = rotation._replace(HALF=half, INTERLEAVED=is_interleaved)
    constants = dict(ROTATION=rotation)
    of_x, programs = (strided(x), angles), count_of(x, blocks.cu_seqlens) * x.shape[2]
    heads = blocks.sequences * blocks.nheads
    # Rows that are not aligned come through more registers
    warps = WIDE if headdim % 16 else WARPS.value
    warps_of_sums = warps if mixed else 1
    mean, reach = (None if t is None else of_head(t) for t in (into.mean, into.reach))
    launches = []
    if mean is not None:
        args = *of_x, into.statistics, blocks
        parts = programs * chunks_of(headdim, mixed)
        launches.append((quantize_statistics_kernel, parts, args, constants, warps_of_sums))
        args = into.statistics, mean, reach, into.largest, blocks
        means = heads * triton.cdiv(headdim, SHARE.value)
        launches.append((quantize_means_kernel, means, args, dict(D=headdim), WIDE))
    elif scale is None:
        args = *of_x, into.largest, blocks, headdim
        of_amax = constants | dict(GROUP=group)
        launches.append((quantize_amax_kernel, programs, args, of_amax, warps_of_sums))
    out = _of_values(into.out) if side.transposes else strided(into.out)
    scale = of_head(into.scale if scale is None else scale)
    constants = constants | dict(GROUP=group, TRANSPOSED=side.transposes)
    args = *of_x, mean, into.largest, scale, into.rounding, out, blocks
    # At least the 64 rows of a product on Hopper, of all tiles that are computed together
    warps = WIDE if tiles_at_once(mixed) > 2 else warps
    programs *= chunks_of(headdim, mixed)
    launches.append((quantize_cast_kernel, programs, args, constants, warps))
    if into.rounding.lost is not None:
        columns = dict(D=headdim, BLOCK_D=triton.next_power_of_2(headdim))
        args = into.rounding, mean, reach, scale, into.drift, blocks
        launches.append((quantize_loss_kernel, heads, args, columns, WIDE))
    return _plans(blocks, launches)


def transposing(
    v: Any, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None, v_t: Tensor
) -> list[SplitPlan]:
    """The launch that writes V^T, of bits."""
    v = v if v.stride(3) == 1 else v.contiguous()
    blocks = row_blocks(v, cu_seqlens_k, seqused_k)
    programs, args = count_of(v, cu_seqlens_k) * v.shape[2], (strided(v), _of_values(v_t), blocks)
    return _plans(blocks, [(transpose_values_kernel, programs, args, dict(D=v.shape[3]), WIDE)])


def _plans(blocks: RowBlocks, launches: list[tuple]) -> list[SplitPlan]:
    """Those that have a program; without sequences there is nothing to write."""
    there = [x for x in launches if x[1] and blocks.sequences]
    return [SplitPlan(*launch, STAGES) for launch in there]


def tables_of(rotary: Rotary | None, keys: RowBlocks) -> tuple[Tables, int, bool] | None:
    """Rotary tables, the pairs that they turn, and whether these are neighbours; None where nothing
    is turned.
    """
    if rotary is None or 0 in rotary.cos.shape:
        return None
    cos, sin = (x.contiguous() for x in rotary[:2])
    return Tables(cos, sin, cos.shape[0], keys), cos.shape[1], bool(rotary.interleaved)


def row_blocks(x: Tensor, starts: Tensor | None, used: Tensor | None) -> RowBlocks:
    """The rows of q, k or v, by its cu_seqlens and seqused."""
    starts, used = (None if t is None else t.contiguous() for t in (starts, used))
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    return RowBlocks(starts, used, sequences, x.shape[1], x.shape[2])


def count_of(x: Tensor, starts: Tensor | None) -> int:
    """Blocks of rows of all sequences."""
    if starts is None:
        return x.shape[0] * max(1, columns_of(x.shape[1]) // COLUMNS)
    return packed_columns(x.shape[1], starts.shape[0] - 1) // COLUMNS


def _of_values(v_t: Tensor) -> Strided:
    """V^T as kernels take it: rows are the dims of a head, and as long as there are columns."""
    _, nheads, headdim, columns = v_t.shape
    return Strided(v_t, nheads * headdim * columns, columns, headdim * columns)
