"""One row's online softmax in plain Python, a block of keys at a time, with every number kept.

What `tile/softmax.py` does for a tile of rows, here for a single one and with e in place of 2;
`tilewise trace` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

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
