"""`python -m benchmarks host`: microseconds of the host a call."""

from __future__ import annotations

from typing import NamedTuple

import click

from tilewise.cli.bench.options import print_rows, providers_of, round_options, row_options
from tilewise.cli.explain_tables import plain
from tilewise.cli.options import DTYPES, Exit, HeadList, NameList, OneInt
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, table


class Sizes(NamedTuple):
    """Those of the call that is timed."""

    seqlen: int
    heads: tuple[tuple[int, int, int], ...]
    dtype: str


GPU = Sizes(seqlen=128, heads=((16, 16, 128),), dtype="bf16")
CPU = Sizes(seqlen=16, heads=((2, 2, 32),), dtype="fp32")


@click.command()
@click.option("--modes", type=NameList(), help="Of no_grad,autograd,fwd+bwd,compile,graph; all.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seqlen", type=OneInt(), help="128; on a CPU 16.")
@click.option("--heads", type=HeadList(), help="16x128; on a CPU 2x32. The first counts.")
@click.option("--causal/--full", default=True, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="bf16; on a CPU fp32.")
@click.option("--provider", "ours", default="tilewise", show_default=True)
@click.option(
    "--against", type=NameList(), default="flash,cudnn", show_default=True, help="As for `bench`."
)
@round_options
@row_options
@png_option
def host(
    modes, batch, causal, ours, against, device, rounds, round_ms, save, as_json, png, **sizes
) -> None:
    """What a call costs the host: microseconds until Python may go on.

    On a GPU that is checks, choice and launch, and not the kernel's own time; the shape is small,
    so that the queue never fills. On a CPU the work itself is in it, on one thread. All take turns;
    each mode's result is held to fp64 first.

    no_grad: eager, where no gradient is wanted. autograd: an eager forward that records its graph.
    fwd+bwd: that and the gradients. compile: under torch.compile, no gradient wanted. graph: the
    replay of a CUDA graph of one call.
    """
    from tilewise.bench.shapes import Shape

    from ..host import MODES, run_host

    modes = modes or tuple(MODES)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise click.UsageError(f"--modes {unknown[0]!r} is none of {', '.join(MODES)}")
    usual = GPU if device.startswith("cuda") else CPU
    asked = usual._replace(**{name: value for name, value in sizes.items() if value})
    nheads, nheads_k, headdim = asked.heads[0]
    lengths = asked.seqlen, asked.seqlen
    shape = Shape(
        *("fwd", batch, *lengths, nheads, nheads_k, headdim, headdim),
        causal,
        DTYPES[asked.dtype],
    )
    chosen = providers_of(ours, against)
    screen = console(as_json)
    done = run_host(
        shape, chosen, modes, device=device, rounds=rounds, round_ms=round_ms, save=save
    )
    print_rows((one.outcome.row for one in done), as_json)
    show(screen, done, str(shape._replace(direction="")).strip())
    if png:
        draw(png, done, str(shape._replace(direction="")).strip())
    if any(one.outcome.wrong for one in done if one.provider == chosen[0].name):
        raise SystemExit(Exit.FAILED)


def show(screen, done: list, title: str) -> None:
    """Modes down, providers across; then why some have no time."""
    names = list(dict.fromkeys(one.provider for one in done))
    modes = list(dict.fromkeys(one.mode for one in done))
    by_place = {(one.mode, one.provider): one for one in done}
    rows = [(mode, *(cell(by_place[mode, name]) for name in names)) for mode in modes]
    screen.print(f"\n{title}: host microseconds a call, median (p20-p80)")
    screen.print(table(["call", *names], rows, numbers=["call", *names]))
    for one in done:
        if one.outcome.row is None:
            why = one.outcome.wrong or one.outcome.refused
            screen.print(f"{one.provider}, {one.mode}: {why}", style="dim")


def cell(one) -> str:
    """A cost in microseconds."""
    row = one.outcome.row
    if row is None:
        return "WRONG" if one.outcome.wrong else "-"
    low, middle, high = (plain(x * 1e3) for x in (row.p20_ms, row.median_ms, row.p80_ms))
    return f"{middle} ({low}-{high})"


def draw(path: str, done: list, title: str) -> None:
    """A bar a provider in each mode."""
    from tilewise.cli.picture import Axes, bars

    modes = list(dict.fromkeys(one.mode for one in done))
    series = {
        name: [
            one.microseconds if one.microseconds is not None else float("nan")
            for one in done
            if one.provider == name
        ]
        for name in dict.fromkeys(one.provider for one in done)
    }
    bars(path, Axes(f"Host time, {title}", "", "microseconds a call"), modes, series)
