"""`python -m benchmarks speedup`: faster than standard attention, and in less memory."""

from __future__ import annotations

from typing import NamedTuple

import click

from tilewise.cli.bench.options import print_rows, providers_of, round_options, row_options
from tilewise.cli.options import DTYPES, Exit, HeadList, IntList, NameList, OneInt, pass_option
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, digits, table


class Sizes(NamedTuple):
    """Those of the calls that are timed."""

    seqlens: tuple[int, ...]
    tokens: int
    heads: tuple[tuple[int, int, int], ...]


GPU = Sizes(seqlens=tuple(128 << n for n in range(6)), tokens=16384, heads=((16, 16, 64),))
CPU = Sizes(seqlens=(128, 256, 512, 1024), tokens=1024, heads=((2, 2, 64),))
NUMBERS = ("S", "B", "ms", "standard", "speed-up", "MiB", "standard ", "memory")


@click.command()
@click.option("--seqlens", type=IntList(), help="128 to 4k; on a CPU to 1k.")
@click.option("--cases", type=NameList(), default="no mask,causal,dropout", show_default=True)
@pass_option("fwd,fwd+bwd")
@click.option("--tokens", type=OneInt(), help="In the batch: 16k; on a CPU 1k.")
@click.option("--heads", type=HeadList(), help="16x64; on a CPU 2x64. The first counts.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="fp16; on a CPU fp32.")
@click.option("--provider", "ours", default="tilewise", show_default=True)
@round_options
@row_options
@png_option
def speedup(
    cases, passes, dtype, ours, device, rounds, round_ms, save, as_json, png, **sizes
) -> None:
    """Speed-up over standard attention, and its memory over ours, from short sequences on.

    Standard attention is the formula in plain torch, its score matrix in memory. Memory is the most
    that a call holds beside its inputs. Dropout is 0.1; standard attention, whose dropout is
    torch's, is held to fp64 without it.
    """
    from ..speedup import CASES, run_speedup, shapes_of

    if unknown := [case for case in cases if case not in CASES]:
        raise click.UsageError(f"--cases {unknown[0]!r} is none of {', '.join(CASES)}")
    on_gpu = device.startswith("cuda")
    usual = GPU if on_gpu else CPU
    asked = usual._replace(**{name: value for name, value in sizes.items() if value})
    dtype = DTYPES[dtype or ("fp16" if on_gpu else "fp32")]
    screen = console(as_json)
    tell = lambda line: screen.print(line, style="dim")  # noqa: E731
    shapes = shapes_of(passes, cases, asked.seqlens, asked.tokens, asked.heads[0], dtype)
    done = run_speedup(
        *(shapes, *providers_of(ours)),
        device=device,
        rounds=rounds,
        round_ms=round_ms,
        save=save,
        show=tell,
    )
    print_rows((x.row for gain in done for x in (gain.ours, gain.standard)), as_json)
    for direction in passes:
        for case in cases:
            mine = [x for x in done if (x.shape.direction, x.case) == (direction, case)]
            screen.print(f"\n{direction}, {case}")
            screen.print(table(NUMBERS, map(line, mine), numbers=NUMBERS))
    if png:
        draw(png, done)
    if any(gain.ours.wrong for gain in done):
        raise SystemExit(Exit.FAILED)


def line(gain) -> tuple:
    """A gain's cells; what has no number says why."""
    ms = [digits(x.row.median_ms) if x.row else absent(x) for x in (gain.ours, gain.standard)]
    peaks = [mib(peak) for peak in (gain.our_peak, gain.standard_peak)]
    ratio = "-" if gain.speedup is None else f"{gain.speedup.median:.2f}"
    times = "-" if gain.memory is None else f"{gain.memory:.1f} x"
    return gain.shape.seqlen_q, gain.shape.batch, *ms, ratio, *peaks, times


def absent(outcome) -> str:
    """Why there is no time, in a word."""
    return "WRONG" if outcome.wrong else "no room" if "GiB" in outcome.refused else "not here"


def mib(peak: int | None) -> str:
    """Bytes as MiB."""
    return "-" if peak is None else f"{peak / 2**20:,.1f}"


def draw(path: str, done: list) -> None:
    """Speed-ups over lengths."""
    from tilewise.cli.picture import Axes, lines

    series: dict[str, dict[float, float]] = {}
    for gain in done:
        if gain.speedup is not None:
            name = f"{gain.case}, {gain.shape.direction}"
            series.setdefault(name, {})[gain.shape.seqlen_q] = gain.speedup.median
    one = done[0].shape
    title = f"Speed-up over standard attention, H{one.nheads} D{one.headdim} {one.dtype}"
    lines(path, Axes(title, "sequence length", "times as fast", (True, False)), series)
