"""SVG, drawn with CSS classes alone, so that a page's colours hold in light and in dark.

A provider has one colour, one marker and one dash wherever it is drawn; the marker and the dash
distinguish it without colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

# Colour class, marker, dash of lines.
STYLES = {
    "tilewise": ("c0", "circle", ""),
    "fa3": ("c1", "square", "7 3"),
    "cudnn": ("c2", "triangle", "2 3"),
    "fa4": ("c6", "diamond", "9 3 2 3"),
    "flash": ("c3", "diamond", "9 3 2 3"),
    "flex": ("c4", "cross", "4 2"),
    "sdpa": ("c2", "triangle", "2 3"),
    "tilewise:deterministic": ("c5", "ring", "5 3"),
}
REST = (("c5", "ring", "5 3"), ("c6", "plus", "3 3"), ("c7", "cross", "1 3"))
PEER = "best peer"


def style_of(provider: str, among: Iterable[str] = ()) -> tuple[str, str, str]:
    """Colour class, marker and dash; providers without their own take the rest in turn."""
    if provider in STYLES:
        return STYLES[provider]
    unnamed = [name for name in dict.fromkeys(among) if name not in STYLES]
    at = unnamed.index(provider) if provider in unnamed else 0
    return REST[at % len(REST)]


class Axis(NamedTuple):
    """Maps values to pixels, linearly or by the logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(max(value, 1e-30)))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.stop - self.start), 1)


class Box(NamedTuple):
    """The drawing's size and the plot's edges within it."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @classmethod
    def of(cls, width: int, height: int, margins: tuple[int, int, int, int]) -> Box:
        """Margins are left, right, top, bottom."""
        left, right, top, bottom = margins
        return cls(width, height, left, width - right, top, height - bottom)


def drawing(box: Box, parts: Iterable[str], words: str) -> str:
    """The whole SVG; `words` is its text alternative."""
    return (
        f'<svg viewBox="0 0 {box.width} {box.height}" role="img" aria-label="{quoted(words)}">'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words at a place; `kind` holds classes such as `end` or `mid`."""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{name}>{html.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


def path(points: Iterable[tuple[float, float]], kind: str, dash: str = "") -> str:
    """A line through points."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path class="{kind}"{dashes} d="M' + "L".join(f"{x:g} {y:g}" for x, y in points) + '"/>'
    )


def outline(marker: str, x: float, y: float, size: float = 4.0) -> str:
    """The path of a marker around a place."""
    s = size
    corners: dict[str, Callable[[], str]] = {
        "square": lambda: f"M{x - s:g} {y - s:g}h{2 * s:g}v{2 * s:g}h{-2 * s:g}z",
        "triangle": lambda: f"M{x:g} {y - s * 1.2:g}l{s * 1.15:g} {s * 2:g}h{-s * 2.3:g}z",
        "diamond": lambda: (
            f"M{x:g} {y - s * 1.3:g}l{s * 1.3:g} {s * 1.3:g}"
            f"l{-s * 1.3:g} {s * 1.3:g}l{-s * 1.3:g} {-s * 1.3:g}z"
        ),
        "cross": lambda: (
            f"M{x - s:g} {y - s:g}l{2 * s:g} {2 * s:g}m0 {-2 * s:g}l{-2 * s:g} {2 * s:g}"
        ),
        "plus": lambda: f"M{x - s:g} {y:g}h{2 * s:g}M{x:g} {y - s:g}v{2 * s:g}",
    }
    if marker in corners:
        return corners[marker]()
    return f"M{x - s:g} {y:g}a{s:g} {s:g} 0 1 0 {2 * s:g} 0a{s:g} {s:g} 0 1 0 {-2 * s:g} 0z"


def mark(style: tuple[str, str, str], x: float, y: float, tip: str, size: float = 4.0) -> str:
    """A marker that says on hovering what it is."""
    colour, marker, _ = style
    title = f"<title>{html.escape(tip)}</title>" if tip else ""
    return f'<path class="m {marker} {colour}" d="{outline(marker, x, y, size)}">{title}</path>'


def swatch(style: tuple[str, str, str], with_line: bool = True) -> str:
    """A legend's sample."""
    parts = [path([(0, 7), (26, 7)], f"l {style[0]}", style[2])] if with_line else []
    parts.append(mark(style, 13, 7, "", 3.6))
    return f'<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true">{"".join(parts)}</svg>'


def round_ticks(high: float, about: int = 4) -> list[float]:
    """0 and round steps up to the first that is not less than `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def spaced(ticks: Iterable[float], axis: Axis, least: float) -> list[float]:
    """Ticks so far apart that their labels do not touch; earlier ones come first."""
    kept: list[float] = []
    for tick in ticks:
        if axis.low <= tick <= axis.high and all(
            abs(axis(tick) - axis(other)) >= least for other in kept
        ):
            kept.append(tick)
    return sorted(kept)


def quoted(words: str) -> str:
    """Words as an attribute's value."""
    return html.escape(words, quote=True)
