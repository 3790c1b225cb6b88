"""The kinds of chart: speed against length, figures in strips around 1, the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.explain.cards import Roof

from .page import length, number
from .svg import Axis, Box, drawing, line, mark, path, round_ticks, spaced, style_of, swatch, text

SMALL = (420, 264)
DOT = 3.2
MARKERS = {"fwd": "circle", "bwd": "triangle", "fwd+bwd": "square"}
RATIO_TICKS = (1, 0.5, 2, 0.1, 0.2, 5, 10, 20, 50, 0.05, 0.02, 0.8, 1.2, 0.7, 1.5, 0.9, 1.1, 3)
LIMIT_TICKS = (1, 0.1, 0.01, 0.001, 0.5, 0.2, 0.05, 0.02, 0.005, 0.002)


class Series(NamedTuple):
    """A provider's figures."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(series: Sequence[Series], unit: str, words: str, log: bool = False) -> str:
    """Figures over lengths that double, from 0 up, or on a logarithmic axis."""
    box = Box.of(*SMALL, (52 if log else 44, 14, 26, 40))
    lengths = sorted({x for one in series for x, _ in one.points})
    across = Axis(lengths[0], lengths[-1] * 1.0001, box.left + 14, box.right - 14, log=True)
    up, ticks = _upwards([y for one in series for _, y in one.points], box, log)
    parts = [text(2, 13, unit, "axis"), line(box.left, box.bottom, box.right, box.bottom, "base")]
    for tick in ticks:
        parts.append(line(box.left, up(tick), box.right, up(tick), "grid"))
        parts.append(text(box.left - 6, up(tick) + 4, f"{tick:g}", "end"))
    for x in spaced(lengths, across, 30):
        parts.append(line(across(x), box.bottom, across(x), box.bottom + 4, "base"))
        parts.append(text(across(x), box.bottom + 18, length(int(x)), "mid"))
    parts.append(text((box.left + box.right) / 2, box.height - 5, "sequence length", "axis mid"))
    names = [one.name for one in series]
    for one in reversed(series):  # the first lies on top
        style = style_of(one.name, names)
        at = [(across(x), up(y)) for x, y in one.points]
        parts.append(path(at, f"l {style[0]}", style[2]))
        for (x, y), place in zip(one.points, at):
            parts.append(mark(style, *place, f"{one.name}, {length(int(x))}: {number(y)} {unit}"))
    return drawing(box, parts, words)


def _upwards(values: Sequence[float], box: Box, log: bool) -> tuple[Axis, list[float]]:
    """The axis of figures, and its ticks."""
    if log:
        up = Axis(min(values) / 1.5, max(values) * 1.5, box.bottom, box.top, log=True)
        return up, spaced(_decades(up), up, 22)
    ticks = round_ticks(max(values, default=0.0))
    return Axis(0.0, ticks[-1], box.bottom, box.top), ticks


class Strip(NamedTuple):
    """One line of a strip chart: figures with what each of them is."""

    name: str
    figures: list[tuple[float, str]]
    style: str = ""  # the provider whose colour it has


def strips(rows: Sequence[Strip], words: str, below: str, is_limit: bool = False) -> str:
    """A dot a figure on a logarithmic axis; 1 is marked, and the geometric mean of each line.

    With `is_limit` figures are to stay below 1.
    """
    left = min(max(max(len(row.name) for row in rows) * 7.2 + 12, 60), 170)
    tall = 27
    box = Box.of(SMALL[0], 24 + tall * len(rows) + 42, (int(left), 44, 20, 42))
    values = [value for row in rows for value, _ in row.figures]
    low, high = min(*values, 0.95), max(*values, 1.05)
    across = Axis(low / 1.05, high * 1.05, box.left, box.right, log=True)
    ticks = spaced(LIMIT_TICKS if is_limit else RATIO_TICKS, across, 32)
    parts = []
    for tick in ticks:
        kind = "one" if tick == 1 else "grid"
        parts.append(line(across(tick), box.top - 6, across(tick), box.bottom + 4, kind))
        parts.append(text(across(tick), box.bottom + 18, f"{tick:g}", "mid"))
    parts.append(text((box.left + box.right) / 2, box.height - 5, below, "axis mid"))
    names = [row.style or row.name for row in rows]
    for place, row in enumerate(rows):
        y = box.top + tall * (place + 0.5)
        colour = style_of(row.style or row.name, names)[0]
        parts.append(text(box.left - 10, y + 4, row.name, "end label"))
        for number_of, (value, tip) in enumerate(row.figures):
            at = y + (number_of % 5 - 2) * 3
            said = f"{row.name}, {tip}: {number(value)}"
            parts.append(mark((f"{colour} soft", "circle", ""), across(value), at, said, DOT))
        mean = math.exp(sum(math.log(value) for value, _ in row.figures) / len(row.figures))
        parts.append(line(across(mean), y - 10, across(mean), y + 10, "mean"))
        parts.append(text(box.right + 6, y + 4, f"{mean:.2f}" if mean >= 0.1 else f"{mean:.1g}"))
    return drawing(box, parts, words)


class Point(NamedTuple):
    """A row under the roofline."""

    provider: str
    direction: str
    intensity: float
    tflops: float
    tip: str


def roofline(points: Sequence[Point], peak: Roof | None, words: str, narrow: bool = False) -> str:
    """Every row by its FLOPs a byte and its rate, under what the device can do."""
    box = Box.of(*((420, 380) if narrow else (1000, 460)), (48, 14, 26, 44))
    rates = [point.tflops for point in points]
    spots = [point.intensity for point in points]
    high = max([*rates, peak.tflops if peak else 0.0]) * 1.25
    right = max(*spots, peak.ridge * 2 if peak else 0) * 1.3
    across = Axis(min(spots) / 1.3, right, box.left, box.right, log=True)
    up = Axis(min(rates) / 1.4, high, box.bottom, box.top, log=True)
    parts = [text(2, 13, "TFLOP/s", "axis")]
    for tick in spaced(_decades(up), up, 22):
        parts.append(line(box.left, up(tick), box.right, up(tick), "grid"))
        parts.append(text(box.left - 6, up(tick) + 4, f"{tick:g}", "end"))
    for tick in spaced((2.0**n for n in range(0, 24, 2 if narrow else 1)), across, 44):
        parts.append(line(across(tick), box.top, across(tick), box.bottom, "grid"))
        parts.append(text(across(tick), box.bottom + 18, length(int(tick)), "mid"))
    parts.append(line(box.left, box.bottom, box.right, box.bottom, "base"))
    parts.append(
        text((box.left + box.right) / 2, box.height - 6, "FLOP a byte, of the least bytes", "mid")
    )
    if peak:
        parts += _roof(peak, across, up, box)
    names = [point.provider for point in points]
    ordered = sorted(points, key=lambda point: point.provider == "tilewise")  # ours on top
    for point in ordered:
        colour = style_of(point.provider, names)[0]
        style = f"{colour} {'dot' if point.provider == 'tilewise' else 'hollow'}"
        place = across(point.intensity), up(point.tflops)
        tip = "" if narrow else point.tip
        parts.append(mark((style, MARKERS[point.direction], ""), *place, tip, 3.4))
    return drawing(box, parts, words)


def _roof(peak: Roof, across: Axis, up: Axis, box: Box) -> list[str]:
    left = max(across.low, up.low / peak.bandwidth)
    corners = [(left, peak.most(left)), (peak.ridge, peak.tflops), (across.high, peak.tflops)]
    at = [(across(x), up(y)) for x, y in corners if x >= left]
    said = f"{peak.tflops:.0f} TFLOP/s, {peak.bandwidth:g} TB/s"
    return [path(at, "roof"), text(box.right - 2, up(peak.tflops) - 7, said, "end roofed")]


def _decades(axis: Axis) -> list[float]:
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    return [m * 10.0**power for m in (1, 5, 2) for power in powers]


def legend(names: Sequence[str], with_line: bool = True) -> list[tuple[str, str]]:
    """A sample and a name for each provider."""
    return [(swatch(style_of(name, names), with_line), name) for name in names]


def roofline_legend(names: Sequence[str], directions: Sequence[str]) -> list[tuple[str, str]]:
    """Colours are providers, shapes are directions; ours are filled."""
    found = []
    for name in names:
        kind = "dot" if name == "tilewise" else "hollow"
        style = (f"{style_of(name, names)[0]} {kind}", "circle", "")
        found.append((swatch(style, False), name))
    return found + [(swatch(("plain hollow", MARKERS[x], ""), False), x) for x in directions]
