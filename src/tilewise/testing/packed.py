"""Packed sequences in the matrix: one call for all of them, judged by what each is alone."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .cases import Case, Record, on_cpu, records, run, standards
from .inputs import Features, Inputs, Sizes, guarded, make_inputs, poisoned

Tensor = torch.Tensor
ROW_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # the dimension of sequences
OF_QUERIES = ("out", "lse", "dq")


class PackedCase(NamedTuple):
    """One call of packed sequences. Each has the lengths of `queries` and `keys`, and behind them
    as many rows that are not used as `spare` says, and `tail` more rows lie behind all of them.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    features: Features
    sizes: Sizes = Sizes(nheads=4, nheads_k=2)
    spare: int = 0
    tail: int = 0

    @property
    def tiles(self) -> int:
        """How many 64 x 64 tiles of scores the call has, hidden ones included."""
        return sum(part.tiles for part in self.parts)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @property
    def parts(self) -> list[Case]:
        """Each sequence as a call of its own."""
        return [
            Case(f"{self.name}-{i}", self.sizes._replace(seqlen_q=m, seqlen_k=n), self.features)
            for i, (m, n) in enumerate(zip(self.queries, self.keys, strict=True))
        ]

    def run(self, backend, device, dtype: torch.dtype, seed: int | None = None) -> list[Record]:
        """Judges the call as `cases.run_case` does."""
        from .. import attention

        parts = [make_inputs(x.sizes, x.features, dtype, device, seed=x.seed) for x in self.parts]
        parts = [part._replace(sinks=parts[0].sinks) for part in parts]  # of heads, not sequences
        packed, lengths = self.pack(parts)
        with on_cpu(backend, device, seed=self.seed if seed is None else seed), poisoned():
            results = run(attention, self, inputs=packed, backend=backend, **lengths)
        oracle, *plain = map(self.join, zip(*map(standards, self.parts, parts)))
        return records(results, oracle, *plain)

    def pack(self, parts: list[Inputs]) -> tuple[Inputs, dict[str, Tensor]]:
        """The tensors of one call, and the arguments that say where its sequences are."""
        joined = {}
        for name in ("q", "k", "v", "dout", "dlse"):
            tensors = [getattr(part, name) for part in parts]
            if tensors[0] is not None:
                dim = 2 if name == "dlse" else 1
                value = 0.0 if name == "dlse" else math.nan  # padding must not be read
                joined[name] = guarded(self._cat(tensors, dim, value=value).squeeze(0))
        slopes = parts[0].alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = torch.cat([x for x in (part.alibi_slopes for part in parts) if x is not None])
        packed = parts[0]._replace(**joined, alibi_slopes=slopes)
        lengths = {}
        for tensor, rows in (("q", self.queries), ("k", self.keys)):
            used = torch.tensor(rows, dtype=torch.int32, device=packed.q.device)
            starts = F.pad((used + self.spare).cumsum(0, dtype=torch.int32), (1, 0))
            lengths[f"cu_seqlens_{tensor}"] = starts
            if self.spare:
                lengths[f"seqused_{tensor}"] = used
        return packed, lengths

    def join(self, runs: tuple[dict[str, Tensor], ...]) -> dict[str, Tensor]:
        """The results of all sequences as those of one call."""
        joined = {}
        for name in runs[0]:
            tensors = [results[name] for results in runs]
            if name in ROW_DIM:
                value = -math.inf if name == "lse" else 0.0
                joined[name] = self._cat(tensors, ROW_DIM[name], value=value).squeeze(0)
            else:  # the gradient of the sinks, which all sequences share
                joined[name] = sum(tensors)
        return joined

    def _cat(self, tensors: list[Tensor], dim: int, value: float) -> Tensor:
        """Concatenates the sequences, each followed by its padding rows, and all by the tail."""
        before = [0, 0] * (tensors[0].dim() - 1 - dim)
        padded = [F.pad(x, [*before, 0, self.spare], value=value) for x in tensors]
        return F.pad(torch.cat(padded, dim), [*before, 0, self.tail], value=value)


PACKED = (
    PackedCase("packed-lengths", (5, 0, 70, 33), (7, 4, 60, 50), Features(lse_grad=True)),
    PackedCase("packed-causal", (160, 300), keys=(160, 300), features=Features(causal=True)),
    PackedCase("packed-one", (65,), keys=(130,), features=Features(causal=True, window=(40, 0))),
    PackedCase("packed-no-keys", (9, 20), (0, 30), Features(causal="top_left", lse_grad=True)),
    PackedCase("packed-many", (1,) * 40 + (100,), (3,) * 40 + (90,), Features(softcap=3.0)),
    PackedCase(
        "packed-everything",
        (20, 64, 9, 130),
        keys=(25, 64, 12, 100),
        features=Features(True, (50, 0), softcap=3.0, alibi="batch", sinks=True, lse_grad=True),
        spare=5,
    ),
    PackedCase(
        "packed-padded-heads", (50, 20), (70, 20), Features(), Sizes(1, 1, 1, 3, 3, 24, 40), 3
    ),
    PackedCase(
        "packed-d100", (50, 0, 20), (70, 9, 20), Features(True), Sizes(1, 1, 1, 2, 1, 100, 65), 3
    ),
    PackedCase(
        "packed-tail",
        (20, 64, 9, 100),
        keys=(25, 64, 12, 90),
        features=Features(True, (50, 0), sinks=True, lse_grad=True),
        spare=3,
        tail=170,
    ),
    PackedCase("packed-short-tail", (70, 0), keys=(40, 3), features=Features(), tail=9),
    PackedCase("packed-d512", (30, 20), (40, 20), Features(True), Sizes(1, 1, 1, 2, 1, 512)),
)
