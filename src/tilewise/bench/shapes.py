"""What is timed: the shape of a call, its work in FLOPs, and the suites of shapes.

The classic rows hold the work's two factors still: 16 Ki tokens in all and hidden size 2048, so
that the batch is 16384 / seqlen and the heads are 2048 / headdim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TOKENS = 16384
HIDDEN = 2048
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")


class Shape(NamedTuple):
    """One call. `direction` says which passes are timed; what follows `dtype` is done to scores."""

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

    @property
    def pairs(self) -> float:
        """Queries with a key, in one head: Sq Sk, half of it when causal.

        A window's are counted to the pair: min(i + 1, W + 1) keys for query i where Sq = Sk.
        """
        if self.window is None:
            return self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)
        diagonal = self.seqlen_k - self.seqlen_q
        seen = (i + diagonal + 1 for i in range(self.seqlen_q))  # without the window
        return sum(min(max(keys, 0), self.window + 1) for keys in seen)

    @property
    def flops(self) -> float:
        """4 B H D a pair forward; backward is 2.5 times that. Softcap, ALiBi and sinks add none."""
        forward = 2 * self.batch * self.nheads * self.pairs * (self.headdim + self.headdim_v)
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[self.direction]

    @property
    def features(self) -> list[str]:
        """What is asked beyond a causal mask, in words."""
        words = {
            f"window {self.window}": self.window is not None,
            f"softcap {self.softcap:g}": self.softcap,
            "alibi": self.alibi,
            "sinks": self.sinks,
        }
        return [name for name, is_asked in words.items() if is_asked]

    def __str__(self) -> str:
        lengths = f"{self.seqlen_q}" + (
            f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        )
        heads = f"{self.nheads}" + (f":{self.nheads_k}" if self.nheads_k != self.nheads else "")
        mask = "causal" if self.causal else "full"
        sizes = f"B{self.batch} S{lengths} H{heads} D{self.headdim}"
        return " ".join([self.direction, sizes, mask, *self.features, self.dtype])


def square(
    direction: str,
    seqlen: int,
    headdim: int,
    causal: bool,
    *,
    dtype: str = "bfloat16",
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    group: int = 1,
) -> Shape:
    """Self-attention over `tokens` in all; `group` query heads share a key head."""
    nheads = max(hidden // headdim, group)
    return Shape(
        direction=direction,
        batch=max(tokens // seqlen, 1),
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        nheads=nheads,
        nheads_k=nheads // group,
        headdim=headdim,
        headdim_v=headdim,
        causal=causal,
        dtype=dtype,
    )


def grid(
    directions: Iterable[str],
    seqlens: Iterable[int],
    headdims: Iterable[int],
    causal: Iterable[bool],
    **common,
) -> list[Shape]:
    """Every combination, in reading order."""
    seqlens, headdims, causal = list(seqlens), list(headdims), list(causal)
    return [
        square(direction, seqlen, headdim, masked, **common)
        for direction in directions
        for headdim in headdims
        for masked in causal
        for seqlen in seqlens
    ]


_KI = 1024
SUITES = {
    "dense": grid(
        ("fwd", "bwd"), [_KI, 2 * _KI, 4 * _KI, 8 * _KI, 16 * _KI], (64, 128), (False, True)
    ),
    "cpu": grid(
        ("fwd", "fwd+bwd"),
        [64, 256, _KI, 4 * _KI, 16 * _KI],
        (64,),
        (False, True),
        tokens=1,
        hidden=512,
        dtype="float32",
    ),
    # GPT-2 medium's layer, as FlashAttention's paper times it
    "gpt2-medium": [
        Shape("fwd+bwd", 64, _KI, _KI, 16, 16, 64, 64, False, "float16"),
    ],
    "smoke": grid(
        ("fwd", "bwd"), [256], (64,), (False, True), tokens=512, hidden=128, dtype="float32"
    ),
}
