"""`python -m benchmarks schedule`: which SM runs which tile of a packed batch when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.text import Text

from tilewise.cli.options import IntList
from tilewise.cli.tables import console, digits, table
from tilewise.testing.schedule import Run, Tile, busy, key_blocks, makespan, simulate, tiles

from .timeline import bar, columns, letter, of_processor, style, svg

SMALL = 32  # tiles that a table still shows
LISTED = 12  # sequences that a table still shows


class Work(NamedTuple):
    """The batch and its tiles, each with what it costs."""

    lengths: Sequence[int]
    nheads: int
    block: int
    tiles: list[Tile]
    costs: list[int]


@click.command()
@click.option("--lengths", type=IntList(least=0), default="160,300", show_default=True)
@click.option("--nheads", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--block",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Queries a tile, and keys a block that it visits.",
)
@click.option(
    "--processors", type=click.IntRange(1), default=8, show_default=True, help="SMs that work."
)
@click.option("--causal", is_flag=True, help="Early blocks visit fewer keys.")
@click.option(
    "--longest-first/--no-longest-first",
    default=None,
    help="Last blocks of a head first. The default: where --causal is given.",
)
@click.option("--svg", "path", type=click.Path(dir_okay=False), help="Draws both timelines there.")
def schedule(
    lengths: tuple[int, ...],
    nheads: int,
    block: int,
    processors: int,
    causal: bool,
    longest_first: bool | None,
    path: str | None,
) -> None:
    """Which SM runs which tile of a packed batch when: a simulation, no GPU is used.

    Tiles are numbered by batch, head and block. Static: tile i runs on SM i % processors. Dynamic:
    the next tile goes to the SM that is free first. A tile costs as many units of time as it visits
    blocks of keys, in the self-attention of its sequence.
    """
    screen = console()
    longest_first = causal if longest_first is None else longest_first
    numbered = list(tiles(lengths, nheads, block, longest_first=longest_first))
    if not numbered:
        screen.print("no tiles: every sequence is empty")
        return
    costs = [key_blocks(lengths[tile.batch], tile.m_block, block, causal) for tile in numbered]
    work = Work(lengths, nheads, block, numbered, costs)
    runs = {
        name: simulate(costs, processors, dynamic=name == "dynamic")
        for name in ("static", "dynamic")
    }
    screen.print(sequences(work))
    if len(lengths) > LISTED:
        screen.print(f"... and {len(lengths) - LISTED} sequences more")
    if len(numbered) <= SMALL:
        screen.print(tile_table(work, runs))
    else:
        screen.print(f"{len(numbered)} tiles: a table shows them up to {SMALL}")
    draw(screen, work, runs, processors)
    screen.print(verdict(runs, processors))
    if path:
        subject = f"{len(lengths)} sequences with {nheads} heads, {'causal' if causal else 'full'}"
        Path(path).write_text(svg(runs, numbered, processors, subject), encoding="utf-8")
        screen.print(f"picture: {path}")


def sequences(work: Work):
    """A line a sequence: its blocks, its tiles, and what they cost."""
    rows = []
    for batch, length in enumerate(work.lengths[:LISTED]):
        mine = [tile.tile for tile in work.tiles if tile.batch == batch]
        blocks = len(mine) // work.nheads
        numbers = f"{mine[0]} to {mine[-1]}" if mine else "none"
        cost = sum(work.costs[tile] for tile in mine)
        rows.append((f"{batch} ({letter(batch)})", length, blocks, numbers, cost))
    columns = ("sequence", "length", "blocks a head", "tiles", "blocks of keys")
    return table(columns, rows, numbers=columns[1:])


def tile_table(work: Work, runs: dict[str, list[Run]]):
    """A line a tile: what it stands for, and where and when it runs."""
    rows = []
    for tile, cost in zip(work.tiles, work.costs):
        times = [
            f"SM {run.processor}, {run.start} to {run.stop}"
            for run in (runs["static"][tile.tile], runs["dynamic"][tile.tile])
        ]
        sequence = f"{tile.batch} ({letter(tile.batch)})"
        rows.append((tile.tile, sequence, tile.head, tile.m_block, cost, *times))
    columns = ("tile", "sequence", "head", "block", "cost", "static", "dynamic")
    return table(columns, rows, numbers=("tile", "head", "block", "cost"))


def draw(screen: Console, work: Work, runs: dict[str, list[Run]], processors: int) -> None:
    """Both timelines side by side on one scale."""
    total = max(makespan(each) for each in runs.values())
    label = len(f"SM {processors - 1} ")
    width = columns(total, max((screen.width - label - 2) // 2, 8))
    heads = [name.ljust(width) for name in runs]
    screen.print(Text(" " * label + "  ".join(heads).rstrip(), style="bold"), overflow="crop")
    for processor in range(processors):
        line = Text(f"SM {processor} ".ljust(label))
        for place, each in enumerate(runs.values()):
            line.append("  " * (place > 0))
            for character in bar(of_processor(each, processor), work.tiles, total, width):
                line.append(character, style(character))
        screen.print(line, overflow="crop", no_wrap=True)
    scale = digits(total / width)
    text = f"{scale} blocks of keys a character; a tile begins with a capital, . is idle"
    screen.print(text, style="dim")


def verdict(runs: dict[str, list[Run]], processors: int):
    """Until when each works, how busy it is, and how much faster the dynamic one is."""
    static = makespan(runs["static"])
    rows = [
        (
            name,
            makespan(each),
            f"{100 * busy(each, processors):.1f} %",
            f"{static / makespan(each):.2f}",
        )
        for name, each in runs.items()
    ]
    columns = ("schedule", "makespan", "busy", "speed-up")
    return table(columns, rows, numbers=columns[1:])
