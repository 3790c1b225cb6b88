"""torch's `scaled_dot_product_attention` as a drop-in face: its arguments, its order of dimensions
and its words in errors.
"""

from __future__ import annotations

import functools

import torch

from .api import call
from .dropout import check_dropout, draw_rng
from .errors import ArgumentError, Words
from .modifiers import NO_MODIFIERS, Modifiers
from .mods import Mask, mask
from .problem import OPEN, Mods, extras_of
from .qkv import check_rank
from .scalars import check_flag

Tensor = torch.Tensor
WORDS = Words(
    *("query", "key", "value"),
    bias="attn_mask",
    bias_is_also="bool or ",
    captured="attn_mask is",
    shape="(batch, nheads, seqlen, headdim)",
    is_heads_first=True,
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: (batch, nheads, seqlen, headdim), causal
    top-left, no copies.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 4, 16, 32)
    >>> ours = tilewise.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-5)
    True

    Fewer key heads than query heads need `enable_gqa=True`, as in torch. `attn_mask` broadcasts
    over (batch, nheads, seqlen_q, seqlen_k): bools say which keys are seen, numbers are added to
    the scores, with a gradient. A row that sees no key gives 0 (torch: NaN). Raises ArgumentError.
    Inputs of rank 3 are taken as one batch row, as torch takes them.
    """
    if all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in (query, key, value)):
        batched = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(
            *batched, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    check_rank(query, key, value, WORDS)
    is_causal = check_flag("is_causal", is_causal)
    if query.shape[1] != key.shape[1] and not check_flag("enable_gqa", enable_gqa):
        raise ArgumentError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True to "
            "share key heads"
        )
    if attn_mask is not None and is_causal:
        raise ArgumentError(
            "attn_mask and is_causal: torch takes one of them, and so do we; the mask can say both"
        )
    rng = draw_rng(query.device) if check_dropout(dropout_p) else None
    bias, modifiers = _masked_by(attn_mask, (*query.shape[:3], key.shape[2]))
    out, _ = call(
        *(x.transpose(1, 2) for x in (query, key, value)),
        extras=extras_of(*(None,) * 6, bias, rng, *modifiers.captured),
        numbers=(scale, None),
        window=("top_left", OPEN, 0) if is_causal else ("bottom_right", OPEN, OPEN),
        deterministic=False,
        dropout_p=dropout_p,
        mods=modifiers.mods,
        words=WORDS,
    )
    return out.transpose(1, 2)


def _masked_by(
    attn_mask: Tensor | None, sizes: tuple[int, int, int, int]
) -> tuple[Tensor | None, Modifiers]:
    """An attn_mask of torch's for a call of these sizes: numbers are a bias, bools a mask."""
    if attn_mask is None:
        return None, NO_MODIFIERS
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.dim() > 4:
        shape = getattr(attn_mask, "shape", type(attn_mask).__name__)
        raise ArgumentError(
            f"attn_mask has shape {shape}: it must be a tensor that broadcasts over (batch, "
            "nheads, seqlen_q, seqlen_k)"
        )
    x = attn_mask[(None,) * (4 - attn_mask.dim())]
    if any(n not in (1, size) for n, size in zip(x.shape, sizes)):
        raise ArgumentError(
            f"attn_mask has shape {tuple(attn_mask.shape)}: it must broadcast over (batch, nheads, "
            f"seqlen_q, seqlen_k), here {tuple(sizes)}"
        )
    if x.dtype != torch.bool:
        return x, NO_MODIFIERS
    if 0 in sizes:
        return None, NO_MODIFIERS  # there is no pair to hide
    return None, Modifiers(Mods(mask=_reads(tuple(n > 1 for n in x.shape))), (x,))


def _reads(along: tuple[bool, ...]) -> str:
    """The name of the mask that is a bool tensor, read `along` those of its four dimensions that
    are not shared.
    """
    return _reading(along).key


_reads._dynamo_marked_constant = True  # a compiler takes the name, and traces no tracing


@functools.cache
def _reading(along: tuple[bool, ...]) -> Mask:
    x = torch.ones([1 + is_own for is_own in along], dtype=torch.bool, device="cpu")
    return mask(lambda *at: x[tuple(i if is_own else 0 for i, is_own in zip(at, along))])
