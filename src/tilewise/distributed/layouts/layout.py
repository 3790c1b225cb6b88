"""Which rank has which tokens of a sequence: a `Layout`, made on the host from lengths alone, so
that all ranks make the same one without asking each other.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, a_type
from ...frontend.checks import check_tensor
from ...frontend.scalars import Window
from .work import KeyRun, Run, Span, band_of, pairs

Tensor = torch.Tensor
IGNORED = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True)
class Layout:
    """Which rank has which tokens, and in which order.

    Example:
        >>> import tilewise.distributed as td
        >>> layout = td.zigzag(8, 2)  # 8 tokens, 2 ranks; in a program, the process group
        >>> layout.runs
        (((0, 2), (6, 8)), ((2, 6),))
        >>> layout.positions
        tensor([0, 1, 6, 7])

    Create one with `contiguous`, `zigzag`, `striped`, `documents` or `from_positions`, for any
    length and any number of ranks: the last shards may be shorter or empty, and nothing is padded.
    Layouts with equal tokens, rank and documents are equal; the group is not compared.
    """

    kind: str
    seqlen: int
    runs: tuple[tuple[Run, ...], ...]  # of every rank, in the order in which it has them
    rank: int = 0
    cu_seqlens: tuple[int, ...] | None = None  # where packed documents begin, and the end
    group: Any = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        """Hashes runs, which may be thousands, once: calls are looked up by their layout."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.seqlen, self.runs, self.rank, self.cu_seqlens))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the hash out: strings have other hashes in another process."""
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The tokens of each rank."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @cached_property
    def placed(self) -> tuple[KeyRun, ...]:
        """The runs of this rank, with the rows that they are here."""
        runs = self.runs[self.rank]
        rows = itertools.accumulate((stop - start for start, stop in runs), initial=0)
        return tuple(KeyRun(row, a, stop=b) for row, (a, b) in zip(rows, runs))

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest document, or of the sequence."""
        return max((b - a for a, b in itertools.pairwise(self.starts)), default=0)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where documents, or the sequence, begin, and the end."""
        return (0, self.seqlen) if self.cu_seqlens is None else self.cu_seqlens

    @property
    def tokens(self) -> int:
        """How many tokens this rank has."""
        return self.counts[self.rank]

    @cached_property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens, int64, for example for rotary embeddings. Each document
        starts at 0.
        """
        rows = [torch.arange(x.start - x.first, x.stop - x.first) for x in self.spans]
        return torch.cat(rows) if rows else torch.arange(0)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The runs of this rank, cut at the ends of documents."""
        starts, spans = self.starts, []
        for row, start, end in self.placed:
            while start < end:
                i = bisect.bisect_right(starts, start)
                stop = min(end, starts[i])
                spans.append(Span(row, start, stop=stop, first=starts[i - 1], last=starts[i]))
                row, start = row + stop - start, stop
        return tuple(spans)

    @cached_property
    def table(self) -> Tensor:
        """The layout as int64 numbers, for the operators, which read it."""
        named = f"{self.kind}\n{'' if self.group is None else self.group.group_name}".encode()
        starts = () if self.cu_seqlens is None else self.cu_seqlens
        counts = len(named), self.seqlen, self.rank, self.ranks, len(starts), *map(len, self.runs)
        places = (x for runs in self.runs for run in runs for x in run)
        return torch.tensor([*counts, *named, *starts, *places])

    def at(self, rank: int) -> Layout:
        """Returns the layout as another rank sees it.

        >>> import tilewise.distributed as td
        >>> td.contiguous(5, 2).at(1).positions
        tensor([3, 4])
        """
        if not 0 <= rank < self.ranks:
            raise ArgumentError(
                f"rank={rank}: it must be at least 0 and below the number of ranks, {self.ranks}"
            )
        return replace(self, rank=rank)

    def packed(self, cu_seqlens: Sequence[int] | Tensor) -> Layout:
        """Returns the layout of packed documents, which do not attend to each other.

        >>> import tilewise.distributed as td
        >>> td.contiguous(5, 2).packed([0, 2, 5]).positions
        tensor([0, 1, 0])
        """
        return made(replace(self, cu_seqlens=check_starts(cu_seqlens, self.seqlen)))

    def shard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Returns this rank's part of a whole tensor, along `dim`: by default 1, or 0 if there is
        only one.

        >>> import torch, tilewise.distributed as td
        >>> td.zigzag(8, 2).shard(torch.arange(8))
        tensor([0, 1, 6, 7])
        """
        dim = self._dim(x, dim)
        if x.shape[dim] != self.seqlen:
            raise ArgumentError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension "
                f"{dim}: this layout deals {self.seqlen}; name the dimension of tokens with dim="
            )
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.runs[self.rank]]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, x: Tensor | Sequence[Tensor], dim: int | None = None) -> Tensor:
        """Inverts `shard`, from a list with all ranks' parts or from this rank's part. With the
        latter, all ranks must call it, because they exchange parts; that has no gradient.

        >>> import torch, tilewise.distributed as td
        >>> layout = td.striped(6, 2, block=1)
        >>> layout.unshard([layout.at(rank).shard(torch.arange(6)) for rank in (0, 1)])
        tensor([0, 1, 2, 3, 4, 5])
        """
        parts = self._gathered(x, dim) if isinstance(x, Tensor) else list(x)
        if len(parts) != self.ranks:
            raise ArgumentError(
                f"the number of parts is {len(parts)}: it must be the number of ranks, {self.ranks}"
            )
        dim = self._dim(parts[0], dim)
        for rank, (part, count) in enumerate(zip(parts, self.counts)):
            if part.shape[dim] != count:
                raise ArgumentError(
                    f"the part of rank {rank} has shape {tuple(part.shape)}, {part.shape[dim]} "
                    f"tokens in dimension {dim}: this layout deals it {count}"
                )
        shape = list(parts[0].shape)
        shape[dim] = self.seqlen
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            for row, start, stop in self.at(rank).placed:
                whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, row, stop - start))
        return whole

    def shifted(self, labels: Tensor, dim: int | None = None, ignored: int = IGNORED) -> Tensor:
        """Labels shifted to the tokens that predict them. Call it before `shard`, because the next
        token may be on another rank. The last token in the sequence and in each document gets
        `ignored`.

        >>> import torch, tilewise.distributed as td
        >>> td.contiguous(5, 2).packed([0, 2, 5]).shifted(torch.arange(5))
        tensor([   1, -100,    3,    4, -100])
        """
        dim = self._dim(labels, dim)
        if labels.shape[dim] != self.seqlen:
            raise ArgumentError(
                f"labels have shape {tuple(labels.shape)}, {labels.shape[dim]} in dimension {dim}: "
                f"they must be those of all {self.seqlen} tokens, before they are dealt"
            )
        last = [stop - 1 for start, stop in itertools.pairwise(self.starts) if start < stop]
        moved = labels.roll(-1, dim)
        return moved.index_fill(dim, torch.tensor(last, device=labels.device).long(), ignored)

    def work(self, causal: bool = False, window: Window = None) -> tuple[int, ...]:
        """Counts the query-key pairs that each rank computes.

        >>> import tilewise.distributed as td
        >>> td.contiguous(8, 2).work(causal=True), td.zigzag(8, 2).work(causal=True)
        ((10, 26), (18, 18))
        """
        visible = band_of(window, causal)
        return tuple(
            sum(pairs(span, visible) for span in self.at(rank).spans) for rank in range(self.ranks)
        )

    def explain(self, causal: bool = True, window: Window = None) -> str:
        """Writes a table with each rank's tokens, runs and work. All ranks wait for the slowest.

        >>> import tilewise.distributed as td
        >>> print(td.zigzag(64, 2).explain())
        zigzag, 64 tokens over 2 ranks, causal
        rank  tokens  runs  pairs  of the mean
           0      32     2   1040        1.000
           1      32     1   1040        1.000
        """
        work = self.work(causal, window)
        mean = sum(work) / self.ranks or 1
        rows = [("rank", "tokens", "runs", "pairs", "of the mean")]
        for rank, (count, n_pairs) in enumerate(zip(self.counts, work)):
            runs = len(self.at(rank).spans)
            rows.append((str(rank), str(count), str(runs), str(n_pairs), f"{n_pairs / mean:.3f}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(x.rjust(n) for x, n in zip(row, widths)) for row in rows]
        title = [f"{self.kind}, {self.seqlen} tokens over {self.ranks} ranks"]
        if self.cu_seqlens is not None:
            title.append(f"{len(self.cu_seqlens) - 1} documents")
        title += ["causal"] * causal + ([] if window is None else [f"window {tuple(window)}"])
        return "\n".join([", ".join(title), *lines])

    def _dim(self, x: Tensor, dim: int | None) -> int:
        check_tensor("what a layout deals", x)
        if not x.dim() or (dim is not None and dim not in range(-x.dim(), x.dim())):
            raise ArgumentError(
                f"dim={dim}: a tensor of shape {tuple(x.shape)} has no such dimension; name that "
                "of tokens"
            )
        return min(1, x.dim() - 1) if dim is None else dim % x.dim()

    def _gathered(self, x: Tensor, dim: int | None) -> list[Tensor]:
        """Gathers the parts of all ranks, in their order."""
        if self.group is None:
            if self.ranks == 1:
                return [x]
            raise ArgumentError(
                "this layout has no process group: make it with one to exchange parts, or pass a "
                "list of all parts"
            )
        dim = self._dim(x, dim)
        x = x.detach().movedim(dim, 0)
        padded = x.new_zeros((max(self.counts), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:count].movedim(0, dim) for part, count in zip(parts, self.counts)]


def made(layout: Layout) -> Layout:
    """Computes a layout's table now, so that torch.compile does not trace how."""
    _ = layout.table
    return layout


def check_starts(cu_seqlens: Sequence[int] | Tensor, seqlen: int | None = None) -> tuple[int, ...]:
    """Checks where documents begin and the last one ends, and returns ints."""
    if isinstance(cu_seqlens, Tensor):
        starts = tuple(cu_seqlens.tolist())
    elif not hasattr(cu_seqlens, "__iter__"):
        raise ArgumentError(f"cu_seqlens is {a_type(cu_seqlens)}: it must be a list or a tensor")
    else:
        starts = tuple(int(x) for x in cu_seqlens)
    seqlen = starts[-1] if seqlen is None and starts else seqlen
    rises = all(a <= b for a, b in itertools.pairwise(starts))
    if not starts or starts[0] != 0 or starts[-1] != seqlen or not rises:
        raise ArgumentError(
            f"cu_seqlens={list(starts)}: it must begin with 0, never decrease, and end with the "
            f"number of tokens{'' if seqlen is None else f', {seqlen}'}"
        )
    return starts
