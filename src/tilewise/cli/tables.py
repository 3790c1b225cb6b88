"""How commands talk: light tables, numbers to three digits, a mark in words beside every colour."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

OK, FAIL, NO = "ok", "FAIL", "no"
STYLES = {OK: "green", FAIL: "bold red", NO: "yellow"}


def console(to_stderr: bool = False) -> Console:
    """Where a command writes; to stderr where standard output is JSON."""
    return Console(stderr=to_stderr, highlight=False, soft_wrap=False)


def digits(value: float | None) -> str:
    """Three significant digits, a dash for none."""
    return "-" if value is None else f"{value:.3g}"


def mark(ok: bool) -> str:
    """A verdict in words."""
    return OK if ok else FAIL


class Breaking(Text):
    """Text whose words that are wider than the line break after `.`, `_` and `/`."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        """The lines, as rich asks for them."""
        text = re.sub(rf"\S{{{width + 1},}}", lambda word: _broken(word[0], width), self.plain)
        return Text(text, self.style).wrap(console, width, **options)


def _broken(word: str, width: int) -> str:
    """The parts of a word, as many in a line as fit."""
    lines = [""]
    for part in re.findall(r"[^._/]*[._/]*", word):
        if len(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines.append(part)
    return "\n".join(lines).strip("\n")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[str] = ()
) -> Table:
    """A light table; the columns in `numbers` are aligned to the right and never folded."""
    numbers = set(numbers)
    light_table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        header_style="dim",
    )
    for column in columns:
        if column in numbers:
            light_table.add_column(column, justify="right", no_wrap=True)
        else:
            light_table.add_column(column, overflow="fold")
    for row in rows:
        light_table.add_row(*(_cell(value) for value in row))
    return light_table


def error(value: float | None) -> str:
    """An error or a bound, as wide as any other: 1.2e-07."""
    return "-" if value is None else f"{value:.1e}"


def _cell(value: object) -> Text:
    text = digits(value) if isinstance(value, float) else str(value)
    return Breaking(text, style=STYLES.get(text, ""))
