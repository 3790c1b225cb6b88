"""What a report says, apart from how it is written: sections of text, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BEHIND = "▼"  # beside a figure: the other is faster


class Cell(NamedTuple):
    """A table's cell; `tone` is "behind", "ahead" or ""."""

    text: str
    tone: str = ""


class Table(NamedTuple):
    """A caption, columns (those in `numbers` are aligned to the right) and rows of str or Cell."""

    caption: str
    columns: list[str]
    rows: list[list]
    numbers: frozenset[str] = frozenset()
    folded: bool = False  # long ones open on a click


class Chart(NamedTuple):
    """An SVG with its title, and in words what it shows. `legend` names classes and labels."""

    title: str
    svg: str
    words: str
    legend: Sequence[tuple[str, str]] = ()
    narrow: str = ""  # the same for a phone, where the chart is a wide one


class Charts(NamedTuple):
    """Charts side by side."""

    charts: list[Chart]


class Code(NamedTuple):
    """Command lines."""

    text: str


class Card(NamedTuple):
    """One figure of the page's head."""

    figure: str
    label: str
    note: str
    tone: str = ""


class Heading(NamedTuple):
    """A heading within a section."""

    text: str


class Section(NamedTuple):
    """A heading and what stands under it: str is a paragraph."""

    title: str
    blocks: list

    @property
    def anchor(self) -> str:
        """The name that a link to it has."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


class Page(NamedTuple):
    """The whole report."""

    title: str
    lead: list[str]
    cards: list[Card]
    sections: list[Section]


def number(value: float | None) -> str:
    """Three significant digits without an exponent where that is short; a dash for none."""
    if value is None:
        return "–"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(value: float) -> str:
    """A ratio to two digits behind the point, three where two would hide on which side of 1."""
    close = round(value, 2) == 1 and value < 1
    return f"{value:.3f}" if close else f"{value:.2f}"


def ratio_cell(value: float | None) -> Cell:
    """A ratio of which less than 1 is marked, in words that need no colour."""
    if value is None:
        return Cell("–")
    return Cell(f"{times(value)} {BEHIND}", "behind") if value < 1 else Cell(times(value))


def length(tokens: int) -> str:
    """512, 1Ki, 16Ki."""
    return f"{tokens // 1024}Ki" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def plural(count: int, word: str) -> str:
    """1 row, 2 rows."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
