"""What the kernels that quantise write: tensors that are returned, and what one leaves to the
next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...tuning.select import architecture
from ..common.quantized import (
    COLUMNS,
    FP8,
    TWO_LEVELS,
    WHOLE,
    columns_of,
    empty_values,
    packed_columns,
)
from ..common.relaunch import addresses_of
from .fp8_launch import has_product
from .quantize_kernels import Rounding
from .quantize_statistics import Statistics

Tensor = torch.Tensor
Given = Sequence[Tensor | None]
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
    # Magnitudes, by their bits: (sequences, nheads_k)
    largest: Tensor | None
    beyond: Tensor | None  # of those that are larger than what was found in some blocks


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
    samples: tuple[bool, ...]  # whether means and maxima are of some blocks
    numbers: int
    words: int


class Made(NamedTuple):
    """The memory of one call: tensors that are returned, and one per dtype for all others, as each
    costs the host 2 us and its views as much.
    """

    outs: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]
    means: tuple[Tensor | None, ...]
    numbers: Tensor | None  # fp32, that kernels leave for those behind them
    words: Tensor | None  # fp32 or its bits, 0: that of drift, and the largest magnitudes


def room_of(
    tensors: Sequence[Tensor], sides: Sequence[Side], starts: Sequence[Tensor | None], scales: Given
) -> Room:
    """What a call needs."""
    q, k, _ = tensors
    sequences = q.shape[0] if starts[0] is None else starts[0].shape[0] - 1
    asks = tuple(x is None for x in scales)
    drifts = sides[2].smooths and tensors[2].shape[3] > TWO_LEVELS
    means, blocks, places, samples, numbers = [], [], [], [], 0
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
        samples.append(is_sampled(x, is_walked))
    heads = sequences * k.shape[2]
    words = FIRST + any(asks) * 6 * heads if drifts or any(asks) else 0
    dtype = FP8 if has_product(architecture(q.device)) else torch.uint8
    of_all = tuple(means), tuple(blocks), tuple(places)
    of_some = drifts, tuple(samples)
    return Room(dtype, (sequences, k.shape[2]), asks, *of_all, *of_some, numbers, words)


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
    """The memory of q, k and v, with views of shared tensors."""
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
        largest, beyond = (
            None if at is None else _view(words, at, room.scale) for at in _largest_at(room, i)
        )
        of_blocks = Statistics(*views[:3]), Rounding(*views[3:5])
        found.append(Memory(out, scale, mean, *of_blocks, views[5], drift, largest, beyond))
    return found


def _view(x: Any, at: int, shape: Any) -> Tensor:
    return x[at : at + math.prod(shape)].view(shape)


def _largest_at(room: Room, i: int) -> tuple[int | None, int | None]:
    """Where in `Made.words` those of one tensor are."""
    if not room.asks[i]:
        return None, None
    heads = room.scale[0] * room.scale[1]
    return FIRST + i * heads, FIRST + (3 + i) * heads if room.samples[i] else None


def is_sampled(x: Tensor, is_walked: bool) -> bool:
    """Whether a sequence may be so long that means and maxima are of some of its blocks. Of those
    that are walked, from each block to the next, they are of all.
    """
    return x.shape[1] > WHOLE and not is_walked


def tensors_of(memory: Memory) -> list[Tensor | None]:
    """What kernels write of one tensor, as many whatever it is."""
    return [*memory[:3], *memory.statistics, *memory.rounding, *memory[5:]]


def addresses_in(room: Room, made: Made) -> list[int]:
    """The addresses of `tensors_of` for q, k and v, without the views."""
    numbers, words = addresses_of((made.numbers, made.words))
    found = []
    for i, (out, scale, mean) in enumerate(zip(made.outs, made.scales, made.means)):
        found += addresses_of((out, scale, mean))
        places = room.places[i]
        found += [0 if at is None else numbers + 4 * at for at in places]
        found.append(0 if places[5] is None else words)
        found += [0 if at is None else words + 4 * at for at in _largest_at(room, i)]
    return found


def count_of(x: Tensor, starts: Tensor | None) -> int:
    """Blocks of rows of all sequences."""
    if starts is None:
        return x.shape[0] * max(1, columns_of(x.shape[1]) // COLUMNS)
    return packed_columns(x.shape[1], starts.shape[0] - 1) // COLUMNS
