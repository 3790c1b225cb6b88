"""Peak memory against length: whose grows with S, and whose with S squared.

A peak is what a call holds at once beside its inputs: results, gradients and whatever it keeps in
between. Out of memory is a result, not an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.bench.providers import Provider
from tilewise.bench.row import Row, append, stamp
from tilewise.bench.run import Outcome, Stage
from tilewise.bench.shapes import Shape

from .peak import is_out_of_memory, peak_bytes

NO_ROOM = ("OutOfMemoryError", "MemoryError")
BY_SIZE = "its score matrices need"  # as `providers.too_large` begins


class Peak(NamedTuple):
    """What one provider's call took: a number, no room, or why it was not measured."""

    shape: Shape
    provider: str
    peak: int | None
    no_room: str = ""
    refused: str = ""
    wrong: str = ""
    row: Row | None = None  # of a number, or of no room


def shapes_of(
    directions: Iterable[str],
    seqlens: Iterable[int],
    heads: tuple[int, int, int],
    dtype: str,
    is_causal: bool = False,
) -> list[Shape]:
    """One sequence at a time, so that nothing but its length changes."""
    nheads, nheads_k, headdim = heads
    return [
        Shape(direction, 1, s, s, nheads, nheads_k, headdim, headdim, is_causal, dtype)
        for direction in directions
        for s in seqlens
    ]


def run_memory(
    shapes: Iterable[Shape],
    providers: Sequence[Provider],
    *,
    device: str = "cpu",
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Peak]:
    """Checks and measures each provider at each shape. Rows are appended to `save` shape by shape;
    `show` is told of each.
    """
    common = stamp("memory", device)
    done = []
    for shape in shapes:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        stage = Stage(shape, device)
        found = [measure(stage, one, common) for one in providers]
        if save is not None:
            append(save, [one.row for one in found if one.row is not None])
        show(f"{shape}: {', '.join(said(one) for one in found)}")
        done += found
    return done


def measure(stage: Stage, one: Provider, common: dict) -> Peak:
    """A provider's peak, once its result is right."""
    shape, device = stage.shape, stage.device
    tried = stage.ready(_trying(one, device))
    if isinstance(tried, Outcome):
        reason = tried.refused or ""
        if reason.startswith((*NO_ROOM, BY_SIZE)):
            return _no_room(shape, one.name, reason, common)
        return Peak(shape, one.name, None, refused=reason, wrong=tried.wrong or "")
    try:
        peak = peak_bytes(tried.call, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _no_room(shape, one.name, str(error).splitlines()[0], common)
    errors = tried.verdict.max_error, tried.verdict.bound
    extra = {"peak_bytes": peak, "input_bytes": input_bytes(stage)}
    return Peak(shape, one.name, peak, row=_row(shape, one.name, errors, extra, common))


def _trying(one: Provider, device: str) -> Provider:
    """On a GPU the same, but tried where it thinks that there is no room: that ends in an error,
    where a CPU's process would be killed.
    """

    def refuse(shape: Shape, device: str) -> str | None:
        reason = one.refuse(shape, device)
        return None if reason is not None and reason.startswith(BY_SIZE) else reason

    return one._replace(refuse=refuse) if device.startswith("cuda") else one


def _no_room(shape: Shape, name: str, reason: str, common: dict) -> Peak:
    row = _row(shape, name, (None, None), {"out_of_memory": reason[:200]}, common)
    return Peak(shape, name, None, no_room=reason, row=row)


def _row(shape: Shape, name: str, errors: tuple, extra: dict, common: dict) -> Row:
    """A row that times nothing."""
    max_error, bound = errors
    return Row(
        **common,
        shape=shape._asdict(),
        provider=name,
        median_ms=0.0,
        p20_ms=0.0,
        p80_ms=0.0,
        rounds_ms=[0.0],
        tflops=0.0,
        max_error=max_error,
        bound=bound,
        extra=extra,
    )


def input_bytes(stage: Stage) -> int:
    """Of q, k and v, and of dout where there is a backward."""
    inputs = stage.inputs["bshd"]
    tensors = inputs[:3] if stage.shape.direction == "fwd" else inputs[:4]
    return sum(x.numel() * x.element_size() for x in tensors)


def said(one: Peak) -> str:
    """A peak in words."""
    if one.peak is not None:
        return f"{one.provider} {one.peak / 2**20:,.1f} MiB"
    if one.no_room:
        return f"{one.provider} out of memory"
    return f"{one.provider} {'WRONG' if one.wrong else 'not here'}"


def exponent(points: dict[int, int]) -> float | None:
    """The slope of log(bytes) over log(S), by least squares; None with fewer than two points.

    >>> exponent({1024: 10, 2048: 40, 4096: 160})
    2.0
    """
    logs = [(math.log2(x), math.log2(y)) for x, y in points.items() if y > 0]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs))
    above = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return above / sum((x - mean_x) ** 2 for x, _ in logs)


def curves(done: Sequence[Peak]) -> dict[tuple[str, str], dict[int, int]]:
    """For each direction and provider: peak by length."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for one in done:
        if one.peak is not None:
            key = one.shape.direction, one.provider
            found.setdefault(key, {})[one.shape.seqlen_q] = one.peak
    return found
