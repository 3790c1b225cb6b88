"""`python -m benchmarks trace`: one row's online softmax, block by block, in real numbers."""

from __future__ import annotations

import json
import math

import click

from tilewise.cli.options import DTYPES, Exit
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, digits, error, mark, table

COLUMNS = ("keys", "seen", "largest", "m", "alpha", "added", "l", "|o|", "|o / l|", "")


@click.command()
@click.option("--blocks", type=click.IntRange(1, 64), default=6, show_default=True)
@click.option("--block", type=click.IntRange(1), default=16, show_default=True, help="Keys in one.")
@click.option("--headdim", type=click.IntRange(1), default=64, show_default=True)
@click.option("--logits", type=float, default=1.0, show_default=True, help="How large scores are.")
@click.option("--causal", is_flag=True, help="The row sees the keys up to its own.")
@click.option("--row", type=click.IntRange(0), help="Which query; the last, or a middle one.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32")
@click.option("--seed", type=int, default=24, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@png_option
def trace(blocks, block, headdim, logits, causal, row, dtype, seed, as_json, png) -> None:
    """One row's online softmax, block by block, in real numbers.

    m is the largest score so far and l the sum of exp(s - m). A block that raises m makes what was
    summed before too large: l and o are multiplied by alpha = exp(m_before - m). At the end o / l
    is held to the plain softmax in fp64. --logits 100 shows scores whose exp no fp32 holds.
    """
    import torch

    from ..online import make_row, plain, steps

    seqlen = blocks * block
    if row is None:
        row = seqlen * 5 // 8 if causal else seqlen - 1  # a diagonal that some blocks lie behind
    if row >= seqlen:
        raise click.UsageError(f"--row {row}: there are {seqlen} queries, counted from 0")
    asked = dict(size=logits, row=row, is_causal=causal, seed=seed)
    one = make_row(seqlen, headdim, **asked, dtype=getattr(torch, DTYPES[dtype]))
    found = list(steps(one, block))
    exact, lse = plain(one)
    last = found[-1]
    off = float((last.o.double() / last.l - exact).abs().max())
    # P is rounded to a half dtype, a rounding of fp32 comes with each block and a few at the end
    narrow, wide = (torch.finfo(x).eps for x in (one.v.dtype, torch.float32))
    unit = (narrow / 2 if narrow > wide else 0.0) + (blocks + 4) * wide
    bound = unit * float(one.v.double().abs().max())
    lse_off = abs(last.m + math.log(last.l) - lse)
    ends = dict(error=off, bound=bound, lse=lse, lse_error=lse_off, ok=off <= bound)
    if as_json:
        record = dict(row=row, seen=one.seen, blocks=list(map(as_record, found)), **ends)
        click.echo(json.dumps(record, indent=1))
    else:
        show(console(), one, found, ends)
    if png:
        draw(png, found)
    if off > bound:
        raise SystemExit(Exit.FAILED)


def show(screen, row, found: list, ends: dict) -> None:
    """The table, and how the end compares."""
    screen.print(table(COLUMNS, [cells(x) for x in found], numbers=COLUMNS[:-1]))
    skipped, raised = sum(x.is_skipped for x in found), sum(x.is_rescaled for x in found)
    read = len(found) - skipped
    behind = f", {skipped} skipped, which lie behind the diagonal" if skipped else ""
    rose = f"m rose in {raised} after the first, and only there l and o are multiplied by alpha"
    screen.print(f"{read} blocks read{behind}; {rose}.")
    largest = float(row.s[: row.seen].max())
    without = "inf in fp32: without m there were no result" if largest > 88.7 else "held by fp32"
    screen.print(f"largest score {digits(largest)}: its exp is {without}.")
    screen.print(
        f"o / l against the plain softmax in fp64: off by {error(ends['error'])}, of "
        f"{error(ends['bound'])} allowed: {mark(ends['ok'])}; LSE = m + log l = "
        f"{ends['lse']:.6g}, off by {error(ends['lse_error'])}."
    )


def cells(x) -> tuple:
    """A block's line."""
    keys = f"{x.start}-{x.stop - 1}"
    if x.is_skipped:
        state = f"{x.m:.4g}", "", "", f"{x.l:.4g}", digits(norm(x.o)), digits(norm(x.o / x.l))
        return keys, 0, "", *state, "skipped"
    note = ""
    if x.is_rescaled:
        note = "rescaled"
    elif x.alpha == 0.0 and x.start == 0:
        note = "first"
    numbers = f"{x.largest:.4g}", f"{x.m:.4g}", digits(x.alpha), digits(x.added), f"{x.l:.4g}"
    return keys, x.seen, *numbers, digits(norm(x.o)), digits(norm(x.o / x.l)), note


def as_record(x) -> dict:
    """A block as JSON takes it: a skipped one has no largest score."""
    largest = None if x.is_skipped else x.largest
    return {**x._asdict(), "largest": largest, "o": x.o.tolist()}


def norm(o) -> float:
    """Length of a vector."""
    return float(o.norm())


def draw(path: str, found: list) -> None:
    """m, l and alpha after each block."""
    from tilewise.cli.picture import Axes, lines

    read = [x for x in found if not x.is_skipped]
    series = {
        "m": {x.stop: x.m for x in read},
        "l": {x.stop: x.l for x in read},
        "alpha": {x.stop: x.alpha for x in read},
        "|o / l|": {x.stop: norm(x.o / x.l) for x in read},
    }
    lines(path, Axes("One row's online softmax", "keys seen", "value"), series)
