"""A step of decoding: the last queries of sequences, and the KV cache that they attend to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .lengths import sequences

INT32 = torch.int32
FP32_BYTES = torch.float32.itemsize
BY_ROW = ":row"
DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
KINDS = tuple(
    name + suffix for name in DTYPES for suffix in ("", BY_ROW)
)  # a scale a head, or a row


class Decode(NamedTuple):
    """A step of decoding: `seqlen_q` queries of each sequence, the last ones, beside its keys.

    `page_size` 0 is a cache without pages. `lengths` are those of a ragged batch; its seqlen_k is
    the longest. `cache` is "" for keys and values of `dtype`; else it is one of KINDS, of 8 bits.
    `chunk` is how many queries the last sequence has, or the last `chunks`, of prompts that come in
    chunks; -1: as many as the others. With one, queries are packed. A step that `appends` is passed
    the keys and values of its queries, rotates those keys and its queries, and writes them into the
    cache first.
    """

    direction: str  # "decode"
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    causal: bool  # bottom-right
    dtype: str
    page_size: int = 0
    lengths: str = ""
    cache: str = ""
    chunk: int = -1
    split_size: int = 0  # of ours; 0: none is asked for
    appends: bool = False
    chunks: int = 1

    @property
    def queries(self) -> tuple[int, ...]:
        """How many queries each sequence has."""
        last = self.seqlen_q if self.chunk < 0 else self.chunk
        return (self.seqlen_q,) * (self.batch - self.chunks) + (last,) * self.chunks

    @property
    def sequences(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        return sequences(self.lengths) if self.lengths else (self.seqlen_k,) * self.batch

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that queries see, and of their rows' scales."""
        itemsize = 1 if self.cache else getattr(torch, self.dtype).itemsize
        row = (self.headdim + self.headdim_v) * itemsize
        if self.cache.endswith(BY_ROW):
            row += 2 * FP32_BYTES
        rows = sum(keys for keys, queries in zip(self.sequences, self.queries) if queries)
        return rows * self.nheads_k * row

    @property
    def other_bytes(self) -> int:
        """Bytes of queries, out, LSE, lengths and page table."""
        row = (self.headdim + self.headdim_v) * getattr(torch, self.dtype).itemsize + FP32_BYTES
        total = self.batch * self.seqlen_q * self.nheads * row + self.batch * FP32_BYTES
        if self.page_size:
            total += sum(-(-keys // self.page_size) for keys in self.sequences) * FP32_BYTES
        return total

    @property
    def pairs(self) -> int:
        """Queries with a key, in all heads, less what the causal mask hides."""
        return self.nheads * sum(
            queries * keys - queries * (queries - 1) // 2
            for queries, keys in zip(self.queries, self.sequences)
        )

    @property
    def flops(self) -> float:
        """2 (D + Dv) for each query head and key that it sees."""
        return 2.0 * self.pairs * (self.headdim + self.headdim_v)

    @property
    def sizes(self) -> str:
        """B32 S8192, or of a ragged batch zipf B64 S<=16416."""
        if self.lengths:
            return f"{self.lengths} B{self.batch} S<={self.seqlen_k}"
        return f"B{self.batch} S{self.seqlen_k}"

    def __str__(self) -> str:
        heads = f"{self.nheads}" + (f":{self.nheads_k}" if self.nheads_k != self.nheads else "")
        name = "append and decode" if self.appends else "decode"
        return f"{name} {self.sizes} H{heads} D{self.headdim} {self.dtype}"

    @property
    def pages(self) -> str:
        """The pages, and the cache where it has 8 bits."""
        pages = f"page {self.page_size}" if self.page_size else "contiguous"
        return f"{pages}, {self.cache}" if self.cache else pages


class Pieces(NamedTuple):
    """How the keys of a step are cut, and where their sums lie until they are folded."""

    split_size: int
    of_longest: int
    total: int  # over the batch
    room: int  # of a sequence: as many as the cache has room for
    slots: int  # states of a piece and row in the workspace; 0: one program walks all its pieces
    slot_bytes: int
    idle: int  # programs of the first launch that find no piece
    are_all_used: bool  # or only those of tiles that several programs share
    written: int  # states of a row over the batch: one of the pieces that a program walks

    @property
    def workspace(self) -> int:
        """Bytes between the launches."""
        return self.slots * self.slot_bytes

    def state_bytes(self, step: Decode) -> int:
        """Bytes of states between the launches, written once and read once."""
        states = self.written * step.seqlen_q * step.nheads
        return 2 * states * self.slot_bytes if self.slots and self.are_all_used else 0


def decode(
    batch: int,
    seqlen_k: int,
    heads: tuple[int, int, int],
    *,
    queries: int = 1,
    lengths: str = "",
    dtype: str = "bfloat16",
    **options: Any,
) -> Decode:
    """One step; `heads` are nheads, nheads_k, headdim. `lengths` replace batch and seqlen_k;
    `options` are the other fields of `Decode`.
    """
    if lengths:
        counts = sequences(lengths)
        batch, seqlen_k = len(counts), max(counts)
    nheads, nheads_k, headdim = heads
    step = Decode(
        direction="decode",
        batch=batch,
        seqlen_q=queries,
        seqlen_k=seqlen_k,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        headdim_v=headdim,
        causal=True,
        dtype=dtype,
        lengths=lengths,
        **options,
    )
    if step.cache and step.cache not in KINDS:
        raise ValueError(f"cache {step.cache!r} is none of {', '.join(KINDS)}")
    for count, keys in zip(step.queries, step.sequences):
        if count > keys:
            raise ValueError(f"{count} queries are more than a sequence of {keys}")
    if step.chunks > step.batch:
        raise ValueError(f"{step.chunks} chunks are more than {step.batch} sequences")
    if not sum(step.queries):
        raise ValueError("no sequence has a query")
    if step.appends and (step.cache or step.chunk >= 0):
        raise ValueError("a step that appends has a cache of its queries' dtype and no chunk")
    return step
