"""The shape of a call, and its work in FLOPs.

A packed shape says what lengths its sequences have, which lie end to end in (tokens, nheads,
headdim) tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from . import modifiers
from .lengths import sequences

RELATIVE = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # FLOPs of passes
FP8 = "float8_e4m3fn"  # a dtype of q, k and v alike, with a forward alone


class Shape(NamedTuple):
    """One call. `direction` says which passes are timed; what follows `dtype` is done to scores.

    A packed shape has `lengths`; its batch is the number of them, its seqlens are the longest.
    """

    direction: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    causal: bool  # bottom-right
    dtype: str
    window: int | None = None  # keys that a query sees before its own; needs causal
    softcap: float = 0.0  # 0: none
    alibi: bool = False
    sinks: bool = False
    lengths: str = ""  # packed: the name of a set of lengths, or a list such as "160,300"
    modifier: str = ""  # one of modifiers.NAMES; it goes with none of the others

    @property
    def pairs(self) -> float:
        """Queries with a key, in one head of the batch: Sq Sk, half of it when causal.

        A window's are counted to the pair: min(i + 1, W + 1) keys for query i where Sq = Sk; so are
        a modifier's.
        """
        if self.modifier:
            return self.batch * modifiers.pairs_of(self.modifier, self.seqlen_q)
        if self.lengths:
            return sum(self.alone(length).pairs for length in self.sequences)
        if self.window is None:
            return self.batch * self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)
        diagonal = self.seqlen_k - self.seqlen_q
        visible = (i + diagonal + 1 for i in range(self.seqlen_q))  # without the window
        return self.batch * sum(min(max(keys, 0), self.window + 1) for keys in visible)

    @property
    def flops(self) -> float:
        """4 D a pair and head forward; backward is 2.5 times that. Softcap, ALiBi and sinks add
        none.
        """
        forward = 2 * self.nheads * self.pairs * (self.headdim + self.headdim_v)
        return forward * RELATIVE[self.direction]

    @property
    def sequences(self) -> tuple[int, ...]:
        """How many queries each sequence has."""
        return sequences(self.lengths) if self.lengths else (self.seqlen_q,) * self.batch

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ from one another."""
        return len(set(self.sequences)) > 1

    def alone(self, length: int) -> Shape:
        """One sequence of this length, not packed."""
        return self._replace(batch=1, seqlen_q=length, seqlen_k=length, lengths="")

    @property
    def features(self) -> list[str]:
        """What is asked beyond a causal mask, in words."""
        requested = {
            f"window {self.window}": self.window is not None,
            f"softcap {self.softcap:g}": self.softcap,
            "alibi": self.alibi,
            "sinks": self.sinks,
            modifiers.words_of(self.modifier): self.modifier,
        }
        return [name for name, is_asked in requested.items() if is_asked]

    @property
    def sizes(self) -> str:
        """Batch and lengths: B4 S4096, B4 S1x4096, or of packed sequences zipf B64 S<=16416."""
        if self.lengths:
            return f"{self.lengths} B{self.batch} S{'<=' if self.is_ragged else ''}{self.seqlen_q}"
        keys = f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        return f"B{self.batch} S{self.seqlen_q}{keys}"

    def __str__(self) -> str:
        heads = f"{self.nheads}" + (f":{self.nheads_k}" if self.nheads_k != self.nheads else "")
        band = ["causal" if self.causal else "full"]
        if self.modifier in modifiers.MASKS:
            band = []  # it is said among the features
        of_v = f"/{self.headdim_v}" if self.headdim_v != self.headdim else ""
        sizes = f"{self.sizes} H{heads} D{self.headdim}{of_v}"
        return " ".join([self.direction, sizes, *band, *self.features, self.dtype])
