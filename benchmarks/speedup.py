"""`python -m benchmarks speedup`: how much faster than standard attention, and in how much less
memory, from short sequences on: without a mask, causal, with dropout.

Standard attention draws its own dropout, which no oracle knows: it is held to fp64 without, then
timed with. Ours is held to fp64 with the very mask that it draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click

from tilewise.cli.options import DTYPES, IntList, NameList, OneInt
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, digits, table
from tilewise.explain.modifiers import DROPOUT_P
from tilewise.explain.shapes import Shape

from .bench.providers import PROVIDERS, Provider, standard_attention
from .bench.row import Stamp
from .bench.run import Outcome, Ready, Run, Stage, call_of, time_ready
from .bench.timer import Spread
from .memory import input_bytes
from .options import (
    HeadList,
    fail_if,
    output_options,
    pass_option,
    print_rows,
    progress,
    providers_of,
    round_options,
    sizes_on,
)
from .peak import is_out_of_memory, peak_bytes
from .pictures import lines

CASES = ("no mask", "causal", "dropout")
STANDARD = PROVIDERS["standard"]
GPU = dict(
    seqlens=tuple(128 << n for n in range(6)), tokens=16384, heads=((16, 16, 64),), dtype="fp16"
)
CPU = dict(seqlens=(128, 256, 512, 1024), tokens=1024, heads=((2, 2, 64),), dtype="fp32")
NUMBERS = ("S", "B", "ms", "standard", "speed-up", "MiB", "standard ", "memory")


class Gain(NamedTuple):
    """One shape: both outcomes, and the most memory that each held beside its inputs."""

    case: str
    shape: Shape
    ours: Outcome
    standard: Outcome
    our_peak: int | None
    standard_peak: int | None

    @property
    def speedup(self) -> Spread | None:
        """Standard attention's time over ours, round by round."""
        return self.standard.ratio if self.ours.row is not None else None

    @property
    def memory(self) -> float | None:
        """Its memory over ours."""
        if self.our_peak and self.standard_peak is not None:
            return self.standard_peak / self.our_peak
        return None


@click.command()
@click.option("--seqlens", type=IntList(), help="128 to 4k; on a CPU to 1k.")
@click.option(
    "--cases", type=NameList(lambda: CASES), default="no mask,causal,dropout", show_default=True
)
@pass_option("fwd,fwd+bwd")
@click.option("--tokens", type=OneInt(), help="In the batch: 16k; on a CPU 1k.")
@click.option("--heads", type=HeadList(), help="16x64; on a CPU 2x64. The first counts.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="fp16; on a CPU fp32.")
@click.option("--provider", "ours", default="tilewise", show_default=True)
@round_options
@output_options
def speedup(cases, passes, ours, as_json, png, **options) -> None:
    """Speed-up over standard attention, and its memory over ours, from short sequences on.

    Standard attention is the formula in plain torch, its score matrix in memory. Memory is the most
    that a call holds beside its inputs. Dropout is 0.1; standard attention, whose dropout is
    torch's, is held to fp64 without it.
    """
    sizes, screen = sizes_on(options["device"], GPU, CPU, options), console(as_json)
    sizes |= dict(heads=sizes["heads"][0], dtype=DTYPES[sizes["dtype"]])
    shapes = shapes_of(passes, cases, **sizes)
    done = run_speedup(shapes, *providers_of(ours), show=progress(screen), **options)
    print_rows((x.row for gain in done for x in (gain.ours, gain.standard)), as_json)
    for direction in passes:
        for case in cases:
            mine = [x for x in done if (x.shape.direction, x.case) == (direction, case)]
            screen.print(f"\n{direction}, {case}")
            screen.print(table(NUMBERS, map(line, mine), numbers=NUMBERS))
    if png:
        draw(png, done)
    fail_if(any(gain.ours.wrong for gain in done))


def shapes_of(
    directions: Iterable[str],
    cases: Iterable[str],
    seqlens: Iterable[int],
    tokens: int,
    heads: tuple[int, int, int],
    dtype: str,
) -> list[tuple[str, Shape]]:
    """Every combination, in reading order; batches have `tokens` in all."""
    nheads, nheads_k, headdim = heads
    return [
        (
            case,
            Shape(
                direction,
                max(1, tokens // seqlen),
                *(seqlen, seqlen, nheads, nheads_k, headdim, headdim),
                case == "causal",
                dtype,
                modifier="dropout" if case == "dropout" else "",
            ),
        )
        for direction in directions
        for case in cases
        for seqlen in seqlens
    ]


def run_speedup(
    asked: Iterable[tuple[str, Shape]],
    ours: Provider,
    *,
    device: str = "cpu",
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Gain]:
    """Checks, measures and times both at each shape. Rows are appended to `save` shape by shape."""
    run, done = Run("speedup", device, save, show), []
    for case, shape in asked:
        gain = measure(case, shape, ours, run.common, device, (rounds, round_ms))
        run.keep((gain.ours, gain.standard), [f"{case}, {shape}: {said(gain)}"])
        done.append(gain)
    return done


def measure(
    case: str,
    shape: Shape,
    ours: Provider,
    common: Stamp,
    device: str,
    timing: tuple[int, float],
) -> Gain:
    """One shape."""
    stage = Stage(shape, device)
    tried = {ours.name: stage.ready(ours)}
    if shape.modifier:
        plain = Stage(shape._replace(modifier=""), device)
        tried[STANDARD.name] = dropping(plain, plain.ready(STANDARD))
    else:
        tried[STANDARD.name] = stage.ready(STANDARD)
    peaks = {name: _peak(one, device) for name, one in tried.items()}
    entries = {ours.name: (shape, ours), STANDARD.name: (shape, STANDARD)}
    outcomes = time_ready(entries, tried, common, device, *timing)
    finished = []
    for outcome in outcomes:
        if (row := outcome.row) is not None:
            peak = peaks[outcome.provider]
            extra = {"case": case, "input_bytes": input_bytes(stage)}
            extra |= {} if peak is None else {"peak_bytes": peak}
            if outcome.provider == STANDARD.name and outcome.ratio is not None:
                extra |= {"speedup": outcome.ratio.median}
                extra |= {"checked": "without dropout"} if shape.modifier else {}
            row = dataclasses.replace(row, extra={**row.extra, **extra})
        finished.append(outcome._replace(row=row))
    return Gain(case, shape, *finished, *peaks.values())


def dropping(stage: Stage, ready: Ready | Outcome) -> Ready | Outcome:
    """Standard attention that was right without dropout, with it."""
    if isinstance(ready, Outcome):
        return ready
    causal = stage.shape.causal

    def attend(q, k, v):
        return standard_attention(q, k, v, causal, DROPOUT_P)

    return ready._replace(call=call_of(stage.shape, attend, stage.inputs["bshd"]))


def _peak(one: Ready | Outcome, device: str) -> int | None:
    if isinstance(one, Outcome):
        return None
    try:
        return peak_bytes(one.call, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def said(gain: Gain) -> str:
    """A gain in words."""
    for outcome in (gain.ours, gain.standard):
        if outcome.row is None:
            return f"{outcome.provider}: {outcome.wrong or outcome.refused}"
    return "not timed" if gain.speedup is None else f"{gain.speedup.median:.2f} times as fast"


def line(gain: Gain) -> tuple:
    """A gain's cells; what has no number says why."""
    ms = [digits(x.row.median_ms) if x.row else absent(x) for x in (gain.ours, gain.standard)]
    peaks = ["-" if x is None else f"{x / 2**20:,.1f}" for x in (gain.our_peak, gain.standard_peak)]
    ratio = "-" if gain.speedup is None else f"{gain.speedup.median:.2f}"
    times = "-" if gain.memory is None else f"{gain.memory:.1f} x"
    return gain.shape.seqlen_q, gain.shape.batch, *ms, ratio, *peaks, times


def absent(outcome: Outcome) -> str:
    """Why there is no time, in a word."""
    if outcome.wrong:
        return "WRONG"
    return "no room" if "GiB" in (outcome.refused or "") else "not here"


def draw(path: str, done: list[Gain]) -> None:
    """Speed-ups over lengths."""
    series: dict[str, dict[float, float]] = {}
    for gain in done:
        if gain.speedup is not None:
            name = f"{gain.case}, {gain.shape.direction}"
            series.setdefault(name, {})[gain.shape.seqlen_q] = gain.speedup.median
    one = done[0].shape
    title = f"Speed-up over standard attention, H{one.nheads} D{one.headdim} {one.dtype}"
    lines(path, Axes(title, "sequence length", "times as fast", (True, False)), series)
