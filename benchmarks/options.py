"""What commands share: their options, sizes by device, what they do with outcomes, how they end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from tilewise.cli.options import (
    DIRECTIONS,
    DTYPES,
    FP8,
    Exit,
    Finite,
    IntList,
    Known,
    Listed,
    NameList,
    NewFile,
    device_option,
    together,
)
from tilewise.cli.picture import png_option
from tilewise.explain.lengths import SETS

if TYPE_CHECKING:
    from .bench.providers import Provider
    from .bench.row import Row
    from .bench.run import Outcome


class HeadList(Listed):
    """`16x128,32:8x128`: query heads, their key heads where these are fewer, headdim."""

    name = "heads"
    such = "such as 16x128,32:8x128 (query:key heads x headdim)"

    def read(self, text: str) -> tuple[int, int, int]:
        heads, headdim = text.split("x")
        nheads, _, nheads_k = heads.partition(":")
        found = int(nheads), int(nheads_k or nheads), int(headdim)
        if min(found) < 1 or found[0] % found[1]:
            raise ValueError(text)
        return found


class LengthSets(click.ParamType):
    """Names of sets of lengths, or one set as numbers: `zipf,equal512` or `160,300`."""

    name = "sets"

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        parts = NameList().convert(value, param, ctx)
        if parts and all(part in SETS for part in parts):
            return parts
        try:
            numbers = IntList().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither sets ({', '.join(SETS)}) nor one as 160,300 or 1k,4k")
        return (",".join(map(str, numbers)),)


def _provider(name: str) -> Provider:
    from .bench.providers import provider

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
save_options = together(
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
row_options = together(device_option, save_options)
run_options = together(round_options, row_options)
output_options = together(row_options, png_option)
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


def pass_option(default: str) -> Callable:
    """`--pass fwd,bwd`."""
    names = NameList(lambda: DIRECTIONS, may_be_empty=False)
    return click.option("--pass", "passes", type=names, default=default, show_default=True)


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


def sizes_on(device: str, gpu: dict, cpu: dict, asked: dict) -> dict:
    """The usual sizes of a GPU or of a CPU, but for what is asked."""
    usual = gpu if device.startswith("cuda") else cpu
    return {name: asked.pop(name) or value for name, value in usual.items()}


def progress(screen) -> Callable[[str], None]:
    """Tells what is done meanwhile."""
    return lambda line: screen.print(line, style="dim")


def fail_if(is_wrong: object) -> None:
    """Exit code 1 where a result of ours is wrong."""
    if is_wrong:
        raise SystemExit(Exit.FAILED)
