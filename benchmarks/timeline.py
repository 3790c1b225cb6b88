"""What each SM computed and when: runs of tiles drawn in characters and as SVG.

A sequence has a letter and a colour. In characters a tile begins with a capital: `AaaBbb` are two
tiles of different sequences, `AaaAaa` two of the same.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from tilewise.testing.schedule import Run, Tile, makespan

IDLE = "."
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
# Okabe and Ito's colours, distinct in any colour vision; letters say it again.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2")
ROW, LABEL, WIDTH, HEAD = 16, 52, 900, 34  # of the SVG, in its units
LEGEND = 12  # sequences that it names


def letter(batch: int) -> str:
    """The letter of a sequence; after z comes a again.

    >>> letter(0), letter(25), letter(26)
    ('a', 'z', 'a')
    """
    return string.ascii_lowercase[batch % 26]


def columns(total: int, width: int) -> int:
    """How many characters stand for `total` units of time: a whole number a unit where they fit.

    >>> columns(10, 35), columns(100, 35)
    (30, 35)
    """
    return total * (width // total) if 0 < total <= width else width


def bar(mine: Sequence[Run], tiles: Sequence[Tile], total: int, width: int) -> str:
    """One processor's time in `width` characters: what runs in the middle of each.

    >>> tiles = [Tile(0, 0, 0, 0, 0), Tile(1, 1, 0, 0, 0)]
    >>> bar([Run(0, 0, 2, 0), Run(0, 2, 3, 1)], tiles, total=4, width=8)
    'AaaaBb..'
    """
    drawn = [IDLE] * width
    for run in mine:
        # the columns whose middle, (column + 0.5) * total / width, lies in the run
        first, stop = (-(-(2 * t * width - total) // (2 * total)) for t in (run.start, run.stop))
        name = letter(tiles[run.tile].batch)
        drawn[first:stop] = [name] * (stop - first)
        if first < stop:
            drawn[first] = name.upper()
    return "".join(drawn)


def of_processor(runs: Sequence[Run], processor: int) -> list[Run]:
    """What one processor did, in the order of time."""
    return [run for run in runs if run.processor == processor]


def style(character: str) -> str:
    """The colour of a letter in a terminal."""
    if character == IDLE:
        return "dim"
    return STYLES[string.ascii_lowercase.index(character.lower()) % len(STYLES)]


def svg(
    timelines: Mapping[str, Sequence[Run]], tiles: Sequence[Tile], processors: int, subject: str
) -> str:
    """All timelines on one time axis, one below the other, as a picture with a title and a
    description; each tile tells what it is when pointed at.
    """
    total = max(makespan(runs) for runs in timelines.values()) or 1
    panel = HEAD + processors * ROW + 12
    height = 16 + len(timelines) * panel + 30
    spans = "; ".join(f"{name} takes {makespan(runs)}" for name, runs in timelines.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDTH + 20} {height}"'
        ' role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="11">',
        f'<title id="title">Tile schedule of {subject}</title>',
        f'<desc id="desc">Each row is one of {processors} processors, time runs to the right in'
        f" blocks of keys, and each box is a tile in the colour and with the letter of its"
        f" sequence. {spans}.</desc>",
        f'<rect width="{LABEL + WIDTH + 20}" height="{height}" fill="white"/>',
    ]
    for place, (name, runs) in enumerate(timelines.items()):
        parts += _panel(name, runs, tiles, processors, total, 8 + place * panel)
    parts += _legend(sorted({tile.batch for tile in tiles}), height - 22)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    name: str, runs: Sequence[Run], tiles: Sequence[Tile], processors: int, total: int, top: int
) -> list[str]:
    """One timeline: its name, a label a row, its boxes."""
    scale = WIDTH / total
    end = LABEL + makespan(runs) * scale
    parts = [
        f'<text x="{LABEL}" y="{top + 20}" font-size="14" font-weight="bold">{name}:'
        f" {makespan(runs)}</text>"
    ]
    top += HEAD
    bottom = top + processors * ROW
    for processor in range(processors):
        y = top + processor * ROW
        parts.append(f'<text x="4" y="{y + 12}">SM {processor}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{WIDTH}" height="{ROW - 2}" fill="#eee"/>')
    for run in runs:
        tile = tiles[run.tile]
        x, wide = LABEL + run.start * scale, (run.stop - run.start) * scale
        y = top + run.processor * ROW
        parts.append(
            f"<g><title>tile {run.tile}: sequence {tile.batch}, head {tile.head}, block"
            f" {tile.m_block}; SM {run.processor}, {run.start} to {run.stop}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW - 2}"'
            f' fill="{COLOURS[tile.batch % len(COLOURS)]}" stroke="white" stroke-width="0.6"/>'
        )
        if wide >= 10:
            parts.append(f'<text x="{x + 3:.2f}" y="{y + 11}">{letter(tile.batch)}</text>')
        parts.append("</g>")
    parts.append(
        f'<line x1="{end:.2f}" x2="{end:.2f}" y1="{top - 4}" y2="{bottom}" stroke="black"/>'
    )
    return parts


def _legend(batches: list[int], y: int) -> list[str]:
    """What the first letters and colours stand for."""
    parts = []
    for place, batch in enumerate(batches[:LEGEND]):
        x = LABEL + place * 74
        colour = COLOURS[batch % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{letter(batch)}: seq {batch}</text>')
    return parts
