"""Options of commands that time providers, and what they do with the outcomes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from tilewise.cli.options import (
    DTYPES,
    FP8,
    Exit,
    Finite,
    Known,
    NameList,
    NewFile,
    device_option,
    together,
)

if TYPE_CHECKING:
    from ..providers import Provider
    from ..row import Row
    from ..run import Outcome


def _provider(name: str) -> Provider:
    from ..providers import provider

    return provider(name)


providers = NameList(each=Known(_provider))
MASKS = {"no": (False,), "yes": (True,), "both": (False, True)}
SCORES = ("window", "softcap", "alibi", "sinks")

causal_option = click.option(
    "--causal", type=click.Choice(list(MASKS)), default="both", show_default=True
)
score_options = together(
    click.option(
        "--window",
        type=click.IntRange(0),
        help="Visible keys before a query's own; needs --causal yes.",
    ),
    click.option("--softcap", type=Finite(0), default=0.0, help="0, the default, means none."),
    click.option(
        "--alibi", is_flag=True, help="ALiBi, with slope 2^(-8 (i + 1) / heads) for head i."
    ),
    click.option("--sinks", is_flag=True, help="One sink per head."),
)
provider_option = click.option(
    "--provider",
    "ours",
    type=Known(_provider),
    default="tilewise",
    show_default=True,
    help="Or tilewise:portable, tilewise:deterministic.",
)


def dtype_option(dtypes: Collection[str]):
    """--dtype, one of these."""
    return click.option(
        "--dtype", type=click.Choice(list(dtypes)), default="bf16", show_default=True
    )


our_options = together(dtype_option(DTYPES), provider_option)
our_options_or_fp8 = together(dtype_option([*DTYPES, *FP8]), provider_option)
round_options = together(
    click.option("--rounds", type=click.IntRange(1), default=5, show_default=True),
    click.option(
        "--round-ms",
        type=Finite(0, min_open=True),
        default=30.0,
        show_default=True,
        help="Time per provider and round.",
    ),
)
row_options = together(
    device_option,
    click.option(
        "--save", type=NewFile(dir_okay=False), help="Append the rows to this JSONL file."
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print rows as JSON lines; the table goes to stderr.",
    ),
)
run_options = together(round_options, row_options)
sustained_options = together(
    click.option(
        "--sustained",
        is_flag=True,
        help="Also time back-to-back calls: spans in at least 8 rounds, after 2 s warm-up.",
    ),
    click.option(
        "--span-ms",
        type=Finite(0, min_open=True),
        help="Minimum time per span; 10 by default on a GPU. Use 1000 to compare dtypes: in short"
        " spans, a provider's time depends on the others.",
    ),
)


def check_span(span_ms: float | None, sustained: bool) -> None:
    """Refuses a span where none is timed."""
    if span_ms is not None and not sustained:
        raise click.UsageError("--span-ms is of --sustained, which is not asked for")


energy_option = click.option(
    "--energy",
    is_flag=True,
    help="--sustained, plus joules per call, by the GPU's counter in two 2 s blocks per provider.",
)
feature_options = together(causal_option, score_options)


def providers_of(ours: str, against: Sequence[str] = ()) -> list[Provider]:
    """The providers that are timed, ours first."""
    return [_provider(name) for name in (ours, *against)]


def show_with(as_json: bool) -> Callable[[str], None]:
    """What tells lines: on stderr where standard output is JSON."""
    return lambda line: click.echo(line, err=as_json)


def print_rows(rows: Iterable[Row | None], as_json: bool) -> None:
    """The rows that there are as JSON lines, if they are asked for."""
    for row in rows if as_json else ():
        if row is not None:
            click.echo(json.dumps(dataclasses.asdict(row)))


def conclude(
    outcomes: Sequence[Outcome], lines: Iterable[str], as_json: bool, ours: Collection[str]
) -> None:
    """The rows as JSON if they are asked for, and the last lines; exit code 1 where a result of
    `ours` is wrong.
    """
    print_rows((outcome.row for outcome in outcomes), as_json)
    show_with(as_json)("\n" + "\n".join(lines))
    if any(outcome.wrong for outcome in outcomes if outcome.provider in ours):
        raise SystemExit(Exit.FAILED)
