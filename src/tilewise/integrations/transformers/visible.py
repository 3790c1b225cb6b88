"""What a transformers mask says, as attention takes it: a band, and a run of real keys a row.

transformers describes a mask by a predicate over (batch, head, q_idx, k_idx) and a 2D padding mask.
The predicate is probed along diagonals, once per forward: each diagonal of a band is wholly visible
or wholly hidden, and of nothing else that models use (documents, chunks, image blocks) is that so.
Of sequences packed in one row it is so within each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from .opaque import NoTensor

Tensor = torch.Tensor
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NOT_ASSUMED = (
    "the mask is neither causal nor the layer's window, as a compiled graph assumes: rows of a "
    "batch whose position_ids restart, and masks of other kinds, are not supported compiled"
)


class Band(NamedTuple):
    """Keys to the left and right of a query's own position that it sees; None: no limit."""

    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key after its own."""
        return self.right == 0

    @property
    def is_open(self) -> bool:
        """Whether each query sees all keys."""
        return self.left is self.right is None


class Lengths(NamedTuple):
    """How many queries and keys a mask is made for."""

    queries: int
    keys: int


class MaskRequest(NamedTuple):
    """A mask, as transformers describes it: a predicate over some queries and keys."""

    predicate: Predicate
    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor  # the position of the first query
    kv_offset: int
    padding: Tensor | None  # bool (batch, positions)
    local_size: int | None
    device: torch.device | str
    is_causal: bool
    chunk: int | None
    use_vmap: bool  # the predicate may take numbers alone
    is_step: bool  # one query over a cache whose shape stays
    cache_position: Tensor | None  # transformers before 5.4

    @property
    def lengths(self) -> Lengths:
        """How many queries and keys there are."""
        return Lengths(self.q_length, self.kv_length)

    def is_whole(self) -> bool:
        """Whether the queries are the keys, from the first position on, without padding."""
        is_first = all(isinstance(x, int) and x == 0 for x in (self.q_offset, self.kv_offset))
        return is_first and self.padding is None and self.q_length == self.kv_length

    def is_on_device(self) -> bool:
        """Whether the first query's position is a tensor, as over a static cache."""
        return isinstance(self.q_offset, torch.Tensor)

    def is_union(self) -> bool:
        """Whether transformers joined predicates by `or`: blocks of tokens that see each other."""
        return getattr(self.predicate, "__name__", "") == "or_mask"

    def used(self) -> Tensor:
        """int32 (batch,): the keys of a static cache that are written once these queries' are."""
        used = self.q_offset + self.q_length - self.kv_offset
        return torch.as_tensor(used, dtype=torch.int32, device=self.device).expand(self.batch)


class Run(NamedTuple):
    """Keys of a row, one after another."""

    start: int
    stop: int


class Starts(NamedTuple):
    """Where packed sequences begin over all rows, and where the last ends: int32."""

    queries: Tensor
    keys: Tensor


Runs = tuple[Run, ...]  # the real keys of each row
CAUSAL, ALL_KEYS = Band(right=0), Band()
NO_KEYS = Band(-1, -1)  # a window of 0, which models that use none set
HOLES: Runs = ()  # in the place of runs: the real keys of a row are no single one


@dataclasses.dataclass(frozen=True, eq=False)
class Visible(NoTensor):
    """Which keys each query attends to. The model passes it along in the place of a mask."""

    band: Band
    # The first query's key; None: the last query's is the last used one, or nothing depends on it.
    diagonal: int | Tensor | None
    lengths: Lengths
    runs: Runs | None = None
    used: Tensor | None = None  # or int32 (batch,), how many: those from the first on are real
    begins: Tensor | None = None  # of packed sequences: bool (batch, seqlen), where they begin
    starts: Starts | None = None  # the same as numbers; None in a compiled graph
    seqused_k: Tensor | None = None  # int32, keys of each sequence, if they begin as its queries
    chunk: int | None = None  # sequences are cut in pieces of so many tokens
    mask: Tensor | None = None  # bool, joins the band: (batch, 1, 1 or queries, keys)
    # What the model said, also where these keys are too few to show it
    local_size: int | None = None  # keys of a window, its own included
    has_chunks: bool = False
    agreed: list[Tensor] = dataclasses.field(default_factory=list)  # `cu_seq_lens` that say so, too
    position_ids: list[tuple] = dataclasses.field(default_factory=list)  # those read, and starts
    ndim = 4  # models ask a mask for it, and flatten or pad what has less

    def contiguous(self) -> Visible:  # so does `generate`
        return self

    def offset(self) -> int:
        """`diagonal` as a number, which it is with runs."""
        return 0 if self.diagonal is None else int(self.diagonal)


def assert_later(condition: Tensor, message: str) -> None:
    """An asynchronous assertion, as a compiled graph has it."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]


def band_of(
    predicate: Predicate,
    queries: range,
    keys: range,
    batch: int,
    local_size: int | None,
    device: torch.device | str,
    begins: Tensor | None = None,
    is_causal: bool = True,
) -> Band | None:
    """The band that `predicate` is over these queries and keys, or None if it is no band; within
    each of the packed sequences that begin at `begins`.

    In a compiled graph no value can be read: what `is_causal` and `local_size` say is assumed
    there, and asserted as it runs.
    """
    candidates = [CAUSAL, ALL_KEYS]
    offsets = {0, keys.start - queries.start, keys.stop - 1 - queries.start}
    offsets |= {sign << power for power in range(len(keys).bit_length()) for sign in (1, -1)}
    if local_size:
        candidates += [Band(local_size - 1, 0), Band(local_size, local_size)]
        candidates.append(Band(local_size - 1, local_size - 1))
        near = range(local_size - 1, local_size + 2)
        offsets |= {sign * size for size in near for sign in (1, -1)}
    o = torch.tensor(sorted(offsets), device=device)
    q_idx = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k_idx = q_idx + o  # (queries, offsets)
    exists = (k_idx >= keys.start) & (k_idx < keys.stop)
    k_idx = k_idx.clamp(keys.start, keys.stop - 1)
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    sees = predicate(b, torch.zeros_like(b[:1]), q_idx[None, None], k_idx[None, None])

    def fits(band: Band) -> Tensor:
        left, right = (-1 if size is None else size for size in band)
        expected = ((o >= -left) | (left < 0)) & ((o <= right) | (right < 0))
        if begins is not None:
            number = begins.cumsum(1)
            expected = expected & (number[:, q_idx] == number[:, k_idx])[:, None]
        return ((sees == expected) | ~exists).all()

    compiling = torch.compiler.is_compiling()
    if local_size == 0:
        is_hidden = ~(sees & exists).any()
        if compiling:
            assert_later(is_hidden, NOT_ASSUMED)
        if compiling or is_hidden:
            return NO_KEYS
    if compiling:
        assumed = Band(None if local_size is None else local_size - 1, 0)
        if not is_causal:
            assumed = Band(local_size, local_size)
        assert_later(fits(assumed), NOT_ASSUMED)
        return assumed
    matches = torch.stack([fits(band) for band in candidates]).tolist()
    return next((c for c, fit in zip(candidates, matches, strict=True) if fit), None)


def packed_of(
    predicate: Predicate,
    batch: int,
    seqlen: int,
    local_size: int | None,
    device: torch.device | str,
    is_causal: bool = True,
    chunk: int | None = None,
) -> Visible | None:
    """What `predicate` says of rows whose queries are their keys: a band within each of the
    sequences that are packed there, or None if it is nothing of the kind.

    A sequence begins where a query does not see the key before its own.
    """
    place = torch.arange(seqlen, device=device)
    b = torch.arange(batch, device=device).view(batch, 1, 1, 1)
    q_idx = place.view(1, 1, seqlen, 1)
    sees = predicate(b, torch.zeros_like(b[:1]), q_idx, (q_idx - 1).clamp(min=0))
    sees = sees.broadcast_to(batch, 1, seqlen, 1)
    begins = ~sees.reshape(batch, seqlen) | (place == 0)
    rows = range(seqlen)
    band = band_of(predicate, rows, rows, batch, local_size, device, begins, is_causal)
    if band is None:
        return None
    lengths = Lengths(seqlen, seqlen)
    if torch.compiler.is_compiling():
        return Visible(band, 0, lengths=lengths, begins=begins)
    once = starts_from(begins)
    starts = Starts(once, once)
    return Visible(band, 0, lengths=lengths, begins=begins, starts=starts, chunk=chunk)


def starts_from(begins: Tensor) -> Tensor:
    """int32: the places of `begins` over all rows, and behind the last where they end."""
    end = begins.new_tensor([begins.numel()], dtype=torch.long)
    return torch.cat([begins.flatten().nonzero().flatten(), end]).to(torch.int32)


def runs_of(padding: Tensor | None, start: int, stop: int) -> Runs | None:
    """Each row's run of real keys among keys start..stop, from a 2D mask of ones; None if all are,
    HOLES where they are no single run in some row.
    """
    if padding is None:
        return None
    real = padding[:, start:stop].bool()
    missing = stop - start - real.shape[1]
    if missing > 0:  # the mask ends before the keys do: transformers takes the rest as hidden
        real = torch.nn.functional.pad(real, (0, missing))
    first = real.int().argmax(1)
    last = real.shape[1] - real.flip(1).int().argmax(1)
    count = real.sum(1)
    runs = []
    for begin, end, keys in torch.stack([first, last, count], 1).tolist():
        if keys and end - begin != keys:
            return HOLES
        runs.append(Run(begin, end) if keys else Run(0, 0))
    return None if all(run == Run(0, stop - start) for run in runs) else tuple(runs)


def simplest(
    band: Band, diagonal: int, lengths: Lengths, runs: Runs | None, device: torch.device | str
) -> Visible:
    """Runs that start at the first key and differ become lengths: one call serves them."""
    if runs is None or len(set(runs)) == 1 or any(run.start for run in runs):
        return Visible(band, diagonal, lengths=lengths, runs=runs)
    if not band.is_open and not (diagonal == 0 and band.is_causal):
        return Visible(band, diagonal, lengths=lengths, runs=runs)
    used = torch.tensor([run.stop for run in runs], dtype=torch.int32, device=device)
    return Visible(band, 0, lengths=lengths, used=used)
