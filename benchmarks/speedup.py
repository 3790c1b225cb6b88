"""How much faster than standard attention, and in how much less memory, from short sequences on:
without a mask, causal, with dropout.

Standard attention draws its own dropout, which no oracle knows: it is held to fp64 without, then
timed with. Ours is held to fp64 with the very mask that it draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tilewise.bench.modifiers import DROPOUT_P
from tilewise.bench.providers import PROVIDERS, Provider, standard_attention
from tilewise.bench.row import Stamp, append, stamp
from tilewise.bench.run import Outcome, Ready, Stage, call_of, time_ready
from tilewise.bench.shapes import Shape
from tilewise.bench.timer import Spread

from .memory import input_bytes
from .peak import is_out_of_memory, peak_bytes

CASES = ("no mask", "causal", "dropout")
STANDARD = PROVIDERS["standard"]


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
    common = stamp("speedup", device)
    done = []
    for case, shape in asked:
        gain = measure(case, shape, ours, common, device, (rounds, round_ms))
        if save is not None:
            append(save, [x.row for x in (gain.ours, gain.standard) if x.row is not None])
        show(f"{case}, {shape}: {said(gain)}")
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
