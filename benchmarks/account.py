"""The IO account: FLOPs, bytes and time of standard attention and of ours, pass by pass, beside the
table of FlashAttention's paper (Dao et al. 2022, arXiv 2205.14135, figure 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise import dispatch
from tilewise.bench.call import call_of
from tilewise.bench.explain import MATMULS
from tilewise.bench.launches import launches_of
from tilewise.bench.providers import provider
from tilewise.bench.row import append, stamp
from tilewise.bench.run import Outcome, run_entries
from tilewise.bench.shapes import SUITES, Shape
from tilewise.bench.traffic import PASSES, moved, standard_steps
from tilewise.kernels.cpu import tiles

from .counters import Counted, Unavailable, count

PAPER_SHAPE = SUITES["gpt2-medium"][0]
STANDARD, OURS = "standard", "tilewise"
STANDARD_MATMULS = {"fwd": 2, "bwd": 4}  # backward: dV, dP, dQ, dK


# Queries and keys of a tile, forward and backward
Blocks = tuple[tuple[int, int], tuple[int, int]]


class Published(NamedTuple):
    """A line of the paper's table: forward and backward on an A100."""

    name: str
    gflop: float
    gigabytes: float
    ms: float


PAPER = (Published("standard", 66.6, 40.3, 41.7), Published("flash", 75.2, 4.4, 7.3))


class Entry(NamedTuple):
    """A line of ours. `tiled` is None for standard attention, which has no tiles."""

    name: str
    shape: Shape
    matmuls: int
    gflop: float  # of these matmuls
    moved: float  # bytes by formula; ours: each tensor once a kernel
    tiled: float | None  # ours, were there no cache
    counted: Counted | None = None
    uncounted: str = ""  # why not, where it was asked
    outcome: Outcome | None = None  # of a run

    @property
    def ms(self) -> float | None:
        """The measured time, if there is one."""
        row = self.outcome.row if self.outcome else None
        return row.median_ms if row else None


def account(shape: Shape, name: str, backend: str, blocks: Blocks) -> Entry:
    """The formulas for a shape; `backend` and its tiles are those of ours."""
    passes = PASSES[shape.direction]
    if name == STANDARD:
        total = sum(step.read + step.written for step in standard_steps(shape))
        matmuls = sum(STANDARD_MATMULS[direction] for direction in passes)
        whole = shape._replace(causal=False)  # it computes what it then masks
        return Entry(name, shape, matmuls, matmuls * matmul_gflop(whole), total, None)
    ours = moved(shape, blocks[0], backend, blocks[1])
    matmuls = sum(MATMULS[backend][direction] for direction in passes)
    return Entry(name, shape, matmuls, matmuls * matmul_gflop(shape), *ours)


def matmul_gflop(shape: Shape) -> float:
    """Of one matmul over all pairs: 2 FLOPs a pair and column."""
    return shape.pairs * shape.nheads * (shape.headdim + shape.headdim_v) / 1e9


def served_by(shape: Shape, device: str) -> tuple[str, Blocks]:
    """Our backend on a device, and its tiles forward and backward; of the CPU's fused kernel those
    of the blockwise one. Without a device, "", those of an H200.
    """
    call = call_of(shape._replace(batch=1))
    if not device:
        backend, target = "hopper", "sm90"
    else:
        where = torch.device(device)
        backend = dispatch.choose(call.problem, where).NAME
        target = _target(where)
    launches = launches_of(call, backend, target, ("fwd", "bwd"))
    if launches:
        first, *_, last = launches
        return backend, ((first.block_m, first.block_n), (last.block_m, last.block_n))
    own = tiles.BLOCK_M, tiles.BLOCK_N
    return backend, (own, own)


def _target(device: torch.device) -> str:
    from tilewise.tuning.select import architecture

    return architecture(device)


def run_account(
    shape: Shape,
    directions: Iterable[str] = ("fwd", "bwd", "fwd+bwd"),
    *,
    device: str = "",
    with_counters: bool = False,
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Entry]:
    """The account of each pass; timed and counted on a device, by formula alone without one."""
    backend, blocks = served_by(shape, device)
    common = stamp("io", device) if device else None
    done = []
    for direction in directions:
        at = shape._replace(direction=direction)
        entries = [account(at, name, backend, blocks) for name in (STANDARD, OURS)]
        if common is not None:
            turns = {name: (at, provider(name)) for name in (OURS, STANDARD)}
            outcomes = run_entries(turns, common, device, rounds, round_ms)
            by_name = {outcome.provider: outcome for outcome in outcomes}
            entries = [_finished(one, by_name[one.name], device, with_counters) for one in entries]
            if save is not None:
                append(save, [x.outcome.row for x in entries if x.outcome and x.outcome.row])
            show(f"{at}: measured")
        done += entries
    return done


def _finished(entry: Entry, outcome: Outcome, device: str, with_counters: bool) -> Entry:
    """With its time and, where they are asked for, its counters; its row says all of it."""
    counted, why = None, ""
    if with_counters and outcome.row is not None:
        try:
            counted = count(entry.shape, entry.name, device)
        except Unavailable as reason:
            why = str(reason)
    if outcome.row is not None:
        extra = {"matmuls": entry.matmuls, "gflop": entry.gflop, "bytes": entry.moved}
        if entry.tiled is not None:
            extra["bytes_tiled"] = entry.tiled
        if counted is not None:
            extra |= {"bytes_read": counted.read, "bytes_written": counted.written}
        row = dataclasses.replace(outcome.row, extra={**outcome.row.extra, **extra})
        outcome = outcome._replace(row=row)
    return entry._replace(outcome=outcome, counted=counted, uncounted=why)


def explanation(entries: list[Entry]) -> list[str]:
    """Why the counts of operations differ, here and in the paper."""
    whole = {x.name: x for x in entries if x.shape.direction == "fwd+bwd"}
    lines = []
    if whole:
        standard, ours = whole[STANDARD], whole[OURS]
        more = ours.matmuls - standard.matmuls
        what = "S = Q K^T once more" if more == 1 else "S = Q K^T twice more and dP once more"
        one = standard.gflop / standard.matmuls
        lines.append(
            f"Ours does {ours.matmuls} matmuls for {standard.matmuls}: it keeps no score matrix, "
            f"so that its backward computes {what}, {one:,.1f} GFLOP each over all pairs."
        )
    first, flash = PAPER
    shape = PAPER_SHAPE
    difference = flash.gflop - first.gflop
    one = matmul_gflop(shape)
    lines.append(
        f"In the paper {flash.gflop} - {first.gflop} = {difference:.1f} GFLOP, too, are one such "
        f"matmul, but over {shape.batch} heads of {shape.seqlen_q}: over the {shape.batch} x "
        f"{shape.nheads} of its caption one has {one:.1f} ({one / difference:.0f} times that), and "
        f"6 have {6 * one:.0f}. So compare its two counts with each other, not with ours."
    )
    bent = shape._replace(causal=True, modifier="dropout")
    plain, both = (
        sum(step.read + step.written for step in standard_steps(x)) / 1e9 for x in (shape, bent)
    )
    lines.append(
        f"Its {first.gigabytes} GB lie between {plain:.1f} GB by formula, without mask and dropout,"
        f" and {both:.1f} GB with both: each of these reads and writes the matrix again."
    )
    return lines
