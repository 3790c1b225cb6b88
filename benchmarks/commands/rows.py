"""What the experiments behind `tilewise bench` share: their options, and rows as JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from tilewise.cli.bench import together
from tilewise.cli.picture import png_option

if TYPE_CHECKING:
    from tilewise.bench.row import Row

output_options = together(
    click.option("--device", help="cuda or cpu; the GPU if there is one."),
    click.option(
        "--save", type=click.Path(dir_okay=False), help="Append the rows to this JSONL file."
    ),
    click.option(
        "--json", "as_json", is_flag=True, help="Rows as JSON lines; the table to stderr."
    ),
    png_option,
)
round_options = together(
    click.option("--rounds", type=click.IntRange(1), default=5, show_default=True),
    click.option(
        "--round-ms", default=30.0, show_default=True, help="Time of each call in a round."
    ),
)


def print_rows(rows: Iterable[Row | None], as_json: bool) -> None:
    """The rows that there are as JSON lines, if they are asked for."""
    for row in rows if as_json else ():
        if row is not None:
            click.echo(json.dumps(dataclasses.asdict(row)))
