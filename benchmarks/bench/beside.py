"""Modifiers and their baselines in interleaved rounds: FlexAttention with the same mask or score
function, our packed path over the same documents, our own call without the bias or the dropout.

All of a table do the same work, the pairs that the mask keeps, so that a ratio of times is one of
rates. The figure is our rate over the other's: above 1 where the modified call is the faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.explain.lengths import documents
from tilewise.explain.modifiers import BIASES, MASKS
from tilewise.explain.shapes import Shape

from .modifiers import bytes_of
from .providers import Provider, free_memory, provider
from .run import Outcome, Run, run_entries
from .shapes import packed
from .standings import counted
from .sustained import plan_for
from .table import aligned, table_of
from .timer import Spread

FLEX, PACKED, WITHOUT = LANES = ("flex", "packed", "without")
AIMS = {  # what our rate is to be of another's; docs/design/masks.md
    **{(name, FLEX): 1.6 for name in ("window", "prefix")},
    **{(name, PACKED): 0.9 for name in ("documents", "causal-documents")},
    ("dropout", WITHOUT): 0.75,
    **{(name, WITHOUT): 0.8 for name in BIASES},
}


class Comparison(NamedTuple):
    """A modifier, and the calls of interleaved rounds by name: the modified one, its baselines."""

    modifier: str
    lanes: dict[str, tuple[Shape, Provider]]

    @property
    def shape(self) -> Shape:
        """The shape of the modified call."""
        return next(iter(self.lanes.values()))[0]


class Compared(NamedTuple):
    """What became of a comparison: an outcome a lane."""

    comparison: Comparison
    outcomes: dict[str, Outcome]

    @property
    def rates(self) -> dict[str, Spread]:
        """Our rate over that of each other lane that was timed, round by round, sustained where
        that was asked for; nothing where ours was not.
        """
        first, *others = self.outcomes
        if self.outcomes[first].row is None:
            return {}
        timed = {name: self.outcomes[name] for name in others}
        ratios = {name: one.sustained or one.ratio for name, one in timed.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def comparison(
    modifier: str,
    direction: str,
    seqlen: int,
    ours: Provider,
    against: Iterable[str] = LANES,
    *,
    tokens: int,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
) -> Comparison:
    """A modifier at `seqlen`; documents lie in one row of all the tokens, whatever it is. Of
    `against` those are taken that the modifier is held against.
    """
    has_documents = modifier in ("documents", "causal-documents")
    if has_documents:
        seqlen = tokens
    nheads, nheads_k, headdim = heads
    batch = max(tokens // seqlen, 1)
    sizes = (batch, seqlen, seqlen, nheads, nheads_k, headdim, headdim)
    shape = Shape(direction, *sizes, False, dtype, modifier=modifier)
    others = {}
    if modifier in MASKS or modifier == "score":
        others[FLEX] = (shape, provider("flex"))
    else:
        others[WITHOUT] = (shape._replace(modifier=""), ours)
    if has_documents:
        lengths = ",".join(map(str, documents(tokens)))
        is_causal = modifier == "causal-documents"
        others[PACKED] = (packed(direction, lengths, heads, is_causal, dtype=dtype), ours)
    chosen = {name: others[name] for name in LANES if name in others and name in against}
    return Comparison(modifier, {ours.name: (shape, ours), **chosen})


def comparisons(
    names: Iterable[str],
    directions: Iterable[str],
    seqlens: Iterable[int],
    ours: Provider,
    against: Iterable[str] = LANES,
    **common,
) -> list[Comparison]:
    """Every combination that there is, in reading order: a learned bias is one of backwards, and
    documents have one length.
    """
    asked = [
        comparison(name, direction, seqlen, ours, against, **common)
        for direction in directions
        for name in names
        for seqlen in seqlens
        if name != "learned-bias" or direction != "fwd"
    ]
    return list({one.shape: one for one in asked}.values())


def run_comparisons(
    asked: Sequence[Comparison],
    *,
    device: str = "cpu",
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
    sustained: bool = False,
) -> list[Compared]:
    """Checks and times each comparison, `sustained` also under load. Rows are appended to `save` as
    each ends.
    """
    plan = plan_for(device, rounds) if sustained else None
    run = Run("modifiers", device, save, show)
    run.begin(rounds)
    done = []
    for one in asked:
        if (reason := too_large(one.shape, device)) is not None:
            refused = (
                Outcome(shape, lane.name, None, refused=reason)
                for shape, lane in one.lanes.values()
            )
            found = dict(zip(one.lanes, refused))
        else:
            timed = run_entries(one.lanes, run.common, device, rounds, round_ms, plan)
            found = dict(zip(one.lanes, timed))
        compared = with_rates(Compared(one, found))
        run.keep(compared.outcomes.values(), lines_of(compared))
        done.append(compared)
    return done


def too_large(shape: Shape, device: str) -> str | None:
    """Why a bias of every pair, its gradient and the check of both do not fit."""
    need = bytes_of(shape)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # so that the memory that is free is known
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
    if need <= 0.6 * free:
        return None
    return f"its bias needs {need / 2**30:.0f} GiB and {free / 2**30:.0f} GiB are free"


def with_rates(compared: Compared) -> Compared:
    """Rows, each with the work of the modified call and what it ran as; ours with the
    medians of its rates over the others'.
    """
    shape, rates = compared.comparison.shape, compared.rates
    outcomes = {}
    for number, (name, outcome) in enumerate(compared.outcomes.items()):
        if (row := outcome.row) is not None:
            extra = {**row.extra, "modifier": shape.modifier, "pairs": int(shape.pairs)}
            if number == 0:
                extra["rate_over"] = {other: rate.median for other, rate in rates.items()}
            else:
                extra["lane"] = name
            tflops = shape.flops / row.median_ms / 1e9
            outcome = outcome._replace(row=dataclasses.replace(row, tflops=tflops, extra=extra))
        outcomes[name] = outcome
    return compared._replace(outcomes=outcomes)


def lines_of(compared: Compared) -> list[str]:
    """The lines of one comparison. All in it do the same work, so that the last column is our rate
    over that of the line.
    """
    shape = compared.comparison.shape
    title = f"{shape}, {int(shape.pairs):,} pairs a head"
    return table_of(title, compared.outcomes, f"rate of {next(iter(compared.outcomes))} / its")


def summary(done: Sequence[Compared]) -> list[str]:
    """A line a figure: our rate over another's, and the aim where there is one."""
    rows = [("", "rate", "spread", "aim")]
    for compared in done:
        shape = compared.comparison.shape
        for name, rate in compared.rates.items():
            what = f"{shape.direction} {shape.modifier} {shape.sizes} / {name}"
            spread = f"{rate.p20:.3f}-{rate.p80:.3f}"
            aim = AIMS.get((shape.modifier, name), "")
            rows.append((what, f"{rate.median:.3f}", spread, str(aim)))
    outcomes = [outcome for compared in done for outcome in compared.outcomes.values()]
    return [*aligned(rows), counted(outcomes)]
