"""Masks and score functions of positions.

Example::

    packed = causal() & document(doc_ids)
    gemma = packed & sliding_window(1023, 0)
    mine = mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0) | prefix_lm(16)
    biased = score(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])

A mask takes (b, h, q_idx, kv_idx) and returns whether that query attends to that key:
FlexAttention's mask_mod (Dong et al. 2024, arXiv 2412.05496). Masks join with ``&``, ``|`` and
``~``. Positions are absolute, so that causal here is top-left: shift it with `diagonal`. Score
functions are in `tilewise.scores`; `tilewise.mods.trace` lists what functions may be made of.
"""

from .evaluation import evaluate
from .masks import Mask, causal, chunked, dilated, document, mask, prefix_lm, sliding_window, tree
from .scores import ScoreMod, alibi, relative_bias, score, softcapped
from .trace import maximum, minimum, where

__all__ = [
    "Mask",
    "ScoreMod",
    "alibi",
    "causal",
    "chunked",
    "dilated",
    "document",
    "evaluate",
    "mask",
    "maximum",
    "minimum",
    "prefix_lm",
    "relative_bias",
    "score",
    "sliding_window",
    "softcapped",
    "tree",
    "where",
]
