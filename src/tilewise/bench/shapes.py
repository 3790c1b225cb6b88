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
    """One call. `direction` says which passes are timed."""

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

    @property
    def flops(self) -> float:
        """4 B H Sq Sk D forward, half of it when causal; backward is 2.5 times that."""
        pairs = self.batch * self.nheads * self.seqlen_q * self.seqlen_k
        forward = 2 * pairs * (self.headdim + self.headdim_v) / (2 if self.causal else 1)
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[self.direction]

    def __str__(self) -> str:
        lengths = f"{self.seqlen_q}" + (
            f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        )
        heads = f"{self.nheads}" + (f":{self.nheads_k}" if self.nheads_k != self.nheads else "")
        mask = "causal" if self.causal else "full"
        sizes = f"B{self.batch} S{lengths} H{heads} D{self.headdim}"
        return f"{self.direction} {sizes} {mask} {self.dtype}"


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
    "smoke": grid(
        ("fwd", "bwd"), [256], (64,), (False, True), tokens=512, hidden=128, dtype="float32"
    ),
}
