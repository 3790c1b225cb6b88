"""`python -m benchmarks cold`: the first call of a process."""

from __future__ import annotations

import click

from tilewise.cli.bench.options import print_rows, row_options
from tilewise.cli.options import Exit
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, digits, table


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@row_options
@png_option
def cold(rounds, device, save, as_json, png) -> None:
    """How long the first forward and the first backward of a process take.

    Each round starts a process with an empty kernel cache and one that finds it filled; on a CPU,
    where nothing is compiled, one process. Importing tilewise and Triton is in the first forward;
    torch, the device and autograd are awake before the clock starts.
    """
    from ..cold import ChildFailed, run_cold

    screen = console(as_json)
    tell = lambda line: screen.print(line, style="dim")  # noqa: E731
    try:
        found = run_cold(device=device, rounds=rounds, save=save, show=tell)
    except ChildFailed as error:
        raise click.ClickException(str(error)) from error
    if not isinstance(found, list):
        screen.print(f"not timed: {found.wrong or found.refused}")
        raise SystemExit(Exit.FAILED)
    print_rows(found, as_json)
    rows = [
        (row.extra["cache"], row.shape["direction"], *map(digits, seconds(row))) for row in found
    ]
    columns = ["cache", "first", "s", "p20", "p80"]
    screen.print(table(columns, rows, numbers=columns[2:]))
    if png:
        draw(png, found)


def seconds(row) -> tuple[float, float, float]:
    """Median, p20 and p80."""
    return row.median_ms / 1e3, row.p20_ms / 1e3, row.p80_ms / 1e3


def draw(path: str, rows: list) -> None:
    """A bar a pass for each state of the cache."""
    from tilewise.cli.picture import Axes, bars

    caches = list(dict.fromkeys(row.extra["cache"] for row in rows))
    series = {
        f"first {direction}": [seconds(r)[0] for r in rows if r.shape["direction"] == direction]
        for direction in ("fwd", "bwd")
    }
    bars(path, Axes("First call of a process", "kernel cache", "seconds"), caches, series)
