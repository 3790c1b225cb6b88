"""One row's online softmax in plain Python, a block of keys at a time, with every number kept.

What `tile/softmax.py` does for a tile of rows, here for a single one and with e in place of 2;
`python -m benchmarks trace` prints it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import click
import torch

from tilewise.cli.options import DTYPES
from tilewise.cli.picture import Axes, png_option
from tilewise.cli.tables import console, digits, error, mark, table

from .options import fail_if
from .pictures import lines

Tensor = torch.Tensor


class BlockState(NamedTuple):
    """The state after a block of keys [start, stop), of which the row sees `seen`."""

    start: int
    stop: int
    seen: int
    largest: float  # score of the block
    m: float  # the largest so far
    alpha: float  # what l and o of before were multiplied by
    added: float  # sum of exp(s - m) of the block
    l: float  # noqa: E741  sum of exp(s - m) so far
    o: Tensor  # sum of exp(s - m) v so far, not yet divided by l
    is_skipped: bool  # the row sees none of its keys, so nothing is read

    @property
    def is_rescaled(self) -> bool:
        """Whether the block raised m, and something was there to be rescaled."""
        return not self.is_skipped and self.alpha not in (0.0, 1.0)


class Row(NamedTuple):
    """A query's scaled scores, the values, and how many keys it sees."""

    s: Tensor  # (seqlen_k,)
    v: Tensor  # (seqlen_k, headdim)
    seen: int


def make_row(
    seqlen: int,
    headdim: int,
    *,
    size: float = 1.0,
    row: int | None = None,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Row:
    """Random q, k and v; scores are about `size` large. `row` is the query's number, the last if
    none is given.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(headdim, generator=generator).to(dtype)
    k, v = (torch.randn(seqlen, headdim, generator=generator).to(dtype) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    s = size * headdim**-0.5 * (k.to(wide) @ q.to(wide))
    last = seqlen - 1 if row is None else row
    return Row(s, v, last + 1 if is_causal else seqlen)


def steps(row: Row, block: int) -> Iterator[BlockState]:
    """The row's state after each block.

    Scores 1 and 3 come before 2: the second raises m from 1 to 3, so what was summed is multiplied
    by exp(1 - 3).

    >>> row = Row(torch.tensor([1.0, 3.0, 2.0]), torch.ones(3, 1), 3)
    >>> [(x.m, round(x.alpha, 4), round(x.l, 4)) for x in steps(row, 1)]
    [(1.0, 0.0, 1.0), (3.0, 0.1353, 1.1353), (3.0, 1.0, 1.5032)]
    """
    m, l = row.s.new_tensor(-math.inf), row.s.new_tensor(0.0)  # noqa: E741
    o = torch.zeros(row.v.shape[1], dtype=row.s.dtype)
    for start in range(0, len(row.s), block):
        stop = min(start + block, len(row.s))
        s = row.s[start : min(stop, row.seen)]
        if len(s) == 0:
            yield BlockState(
                start, stop, 0, -math.inf, float(m), 1.0, 0.0, float(l), o.clone(), True
            )
            continue
        m_new = torch.maximum(m, s.max())
        alpha = torch.exp(m - m_new)
        p = torch.exp(s - m_new)
        l = alpha * l + p.sum()  # noqa: E741
        # As the kernels do: P is rounded to the dtype of V, products are summed wide
        o = alpha * o + p.to(row.v.dtype).to(o.dtype) @ row.v[start : start + len(s)].to(o.dtype)
        m = m_new
        figures = float(s.max()), float(m), float(alpha), float(p.sum()), float(l)
        yield BlockState(start, stop, len(s), *figures, o.clone(), False)


def plain(row: Row) -> tuple[Tensor, float]:
    """Out and the log-sum-exp by the formula, in fp64."""
    s, v = row.s[: row.seen].double(), row.v[: row.seen].double()
    return torch.softmax(s, 0) @ v, float(torch.logsumexp(s, 0))


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
    fail_if(off > bound)


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
    read = [x for x in found if not x.is_skipped]
    series = {
        "m": {x.stop: x.m for x in read},
        "l": {x.stop: x.l for x in read},
        "alpha": {x.stop: x.alpha for x in read},
        "|o / l|": {x.stop: norm(x.o / x.l) for x in read},
    }
    lines(path, Axes("One row's online softmax", "keys seen", "value"), series)
