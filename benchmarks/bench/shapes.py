"""What is timed: shapes of calls, one by one, in grids and in suites.

The classic rows hold the work's two factors still: 16 Ki tokens in all and hidden size 2048, so
that the batch is 16384 / seqlen and the heads are 2048 / headdim.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.explain.lengths import sequences
from tilewise.explain.shapes import Shape

TOKENS = 16384
HIDDEN = 2048
DENSE_SEQLEN = 4096  # of the dense shape that ragged lengths are held against


def dense_of(shape: Shape) -> Shape:
    """The dense shape that a packed one is held against: the same work where its lengths are
    equal, else as many tokens in sequences of DENSE_SEQLEN.
    """
    tokens = sum(shape.sequences)
    seqlen = min(DENSE_SEQLEN, tokens) if shape.is_ragged else shape.seqlen_q
    return shape.alone(seqlen)._replace(batch=tokens // seqlen)


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
    headdim_v: int | None = None,
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
        headdim_v=headdim_v or headdim,
        causal=causal,
        dtype=dtype,
    )


def packed(
    direction: str,
    lengths: str,
    heads: tuple[int, int, int],
    causal: bool,
    *,
    dtype: str = "bfloat16",
) -> Shape:
    """Self-attention within packed sequences; `heads` are nheads, nheads_k, headdim."""
    each = sequences(lengths)
    nheads, nheads_k, headdim = heads
    return Shape(
        direction=direction,
        batch=len(each),
        seqlen_q=max(each),
        seqlen_k=max(each),
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        headdim_v=headdim,
        causal=causal,
        dtype=dtype,
        lengths=lengths,
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
