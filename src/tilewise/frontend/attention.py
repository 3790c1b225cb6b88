"""`tilewise.attention`, and the one way that every face of it takes: a Problem, then one op."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import dispatch
from ..errors import OURS, Words
from ..kernels.common.cached import Cached
from ..mods.block_mask import BlockMask, block_mask_of
from ..mods.documents import Documents
from ..mods.flatten import check_block_mask, modifiers_of
from ..ops import attention as ops
from ..ops import context_parallel as shards
from ..ops import kv_cache as cache_ops
from ..ops.autocast import is_any_autocast_on
from ..ops.calls import Entry, entry_of, find
from ..problem import LONG, NO_EXTRAS, NO_MODS, OPEN, Call, Extras, Mods, extras_of
from ..tile.random_bytes import check_dropout, draw_rng
from .cache_checks import check_cached, check_no_grad, check_out, is_cached, refuse_beside_cache
from .checks import check, check_scores, has_values
from .qkv import in_order, sizes_of
from .scalars import Window, band, check_bounds, check_causal, check_flag, check_layout

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    bias: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    score_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0,  # not 0.0: a compiler takes that for a variable
    dropout_rng: Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    page_table: Tensor | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile without storing the score
    matrix.

    >>> import torch, tilewise
    >>> q = torch.randn(2, 128, 8, 64)  # (batch, seqlen_q, nheads, headdim)
    >>> k, v = torch.randn(2, 2, 256, 2, 64).unbind(0)  # each key head serves 4 query heads
    >>> tilewise.attention(q, k, v, causal=True, window=(63, 0)).shape
    torch.Size([2, 128, 8, 64])

    Shapes are (batch, seqlen, nheads, headdim), or (batch, nheads, seqlen, headdim) with
    `layout="bhsd"`; any strides, as long as the last dimension is contiguous. `v` may have another
    headdim than `q` and `k`. fp16, bf16, fp32 (fp64 on the CPU).

    causal: True or "bottom_right" lets the last query see the last key; "top_left" lets the first
    query see the first key only.
    window: (left, right), how many keys before and after its diagonal a query sees, both ends
    included; None or -1: no limit.
    softcap: scores become softcap * tanh(score / softcap), before masks and ALiBi.
    alibi_slopes: fp32 (nheads,) or (batch, nheads); adds -slope * |distance to the diagonal|.
    sinks: (nheads,), one learnable logit a head that takes its share of the softmax and gives no
    value.
    seqused_k: int32 (batch,), how many keys of each row of the batch are real, the rest being
    padding on the right.
    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), 0 and then where each sequence ends, for
    sequences of any lengths, packed one behind the other: q is then (total_q, nheads, headdim), and
    k and v are (total_k, nheads_k, headdim). Lengths stay on the device. `seqused_q` and
    `seqused_k` say how many rows of each sequence are real; a query that is not has out 0 and lse
    -inf. `max_seqlen_q` and `max_seqlen_k` are bounds that nothing needs; where 2048 queries are
    not the most, tiles are those of long sequences, else those of the mean length. On a GPU the
    values are checked only with TILEWISE_CHECK=1 in the environment, as that waits for it.
    On a GPU scores, scale * q k, must stay below 2^27, for gradients below 2^24: see the page on
    what goes wrong. TILEWISE_CHECK=1 refuses q and k whose norms allow more than 2^27.
    bias: added to the scores, in the dtype of q or fp32, (batch or 1, nheads or 1, seqlen_q or 1,
    seqlen_k or 1); differentiable.
    mask_mod: which keys a query sees, a predicate of (b, h, q_idx, kv_idx) made of plain operators
    (`tilewise.mods.trace` lists them), or a Mask of `tilewise.mods`; with `causal` and `window`,
    both must hold. It is asked for every pair. `block_mask`, of
    `tilewise.sparse.create_block_mask`, holds a mask with the tiles that it hides, which then cost
    nothing; it may be FlexAttention's BlockMask. A band joins it as `tilewise.mods.causal()` and
    not as an argument here. Positions count from 0 in each sequence. Under torch.compile make masks
    before, and hand them in. score_mod: a function of (score, b, h, q_idx, kv_idx),
    FlexAttention's, applied to the scaled (and capped) score, before ALiBi, bias and masks. Float
    tensors that it captures and that want gradients get them; under torch.compile make it before,
    with `tilewise.scores.score`. dropout_p: this share of the probabilities, rounded to a multiple
    of 1/256, becomes 0 and the rest grows to make up for it. `dropout_rng`, int64 (2,), seed and
    offset on the device of q, pins which; else they are drawn from torch's generator.
    deterministic: the same bits in every backward. backend: the name of one to force.
    page_table: int32 (batch, pages); k and v are then a pool of pages, (num_pages, page_size,
    nheads_k, headdim), and key j of sequence b is row j % page_size of page page_table[b, j //
    page_size]. `seqused_k` counts the keys of each sequence, those of its queries included, which
    are its last ones; positions of masks count from its first key. Packed queries, `cu_seqlens_q`
    alone, are any number for each sequence, beside pages or a cache (batch, seqlen_k, nheads_k,
    headdim); those past its end are not written. What is not in use may hold anything.
    split_size: keys are summed in pieces of so many, counted from key 0, and the pieces folded from
    left to right, so that a row's bits depend on the row alone: see the page on the cache. `out`:
    written in place and returned. With any of the three there is no dropout, bias, block_mask and
    score_mod, and but for split_size alone no gradient.

    Returns `out`, shaped as `q` with v's headdim, and with `return_lse` also the log-sum-exp of
    each row's scores: natural log, fp32, (batch, nheads, seqlen_q), packed (nheads, total_q),
    differentiable, sink included. A row that sees no key has out 0 and lse -inf (its sink's logit,
    if it has one). Raises ArgumentError for a wrong argument and
    NotImplementedError, with every backend's reason, where nothing serves it.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
    """
    if shards.entered and shards.is_sharded():
        return shards.of_shards(**locals())
    lengths = seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k
    tensors = q, k, v, alibi_slopes, sinks, *lengths, bias, page_table, out
    entry = None
    has_functions = not (mask_mod is None and score_mod is None and block_mask is None)
    if not has_functions and type(dropout_p) in (int, float) and dropout_p == 0:
        sides = window if type(window) is tuple else (window,)
        words = "attention", causal, scale, softcap, split_size, deterministic, layout, return_lse
        if max_seqlen_q is not None or max_seqlen_k is not None:
            words += as_bound(max_seqlen_q), as_bound(max_seqlen_k)
        entry = find(tensors, (*words, *sides, backend))
        known = None if entry is None else again(entry, (q, k, v), tensors[3:], layout)
        if known is not None:
            return known if return_lse else known[0]
    align = check_causal(causal)
    check_layout(layout)
    check_dropout(dropout_p)
    return_lse = check_flag("return_lse", return_lse)
    is_asked = split_size is not None or out is not None
    if is_asked or is_cached(k, page_table, cu_seqlens_q, cu_seqlens_k):
        others = seqused_q, cu_seqlens_k, bias, block_mask, score_mod, dropout_p or None
        refuse_beside_cache(others, backend)
        learned = alibi_slopes, sinks, mask_mod
        numbers = causal, scale, window, softcap, split_size
        cached = check_cached(
            *(q, k, v, page_table, (seqused_k, cu_seqlens_q)), *(learned, numbers, layout)
        )
        cached = cached._replace(backend=backend, entry=entry)
        is_cache = out is not None or is_cached(k, page_table, cu_seqlens_q, cu_seqlens_k)
        if not is_cache and ops.needs_grad(cached.q, cached.k, cached.v, sinks):
            out, lse = cache_ops.train(cached, check_flag("deterministic", deterministic))
            out = out.transpose(1, 2) if layout == "bhsd" else out
        else:
            out, lse = attend_cached(cached, out, layout)
        return (out, lse) if return_lse else out
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    check_bounds(max_seqlen_q, max_seqlen_k)
    q, k, v = in_order(q, k, v, layout, is_packed)
    if dropout_p and dropout_rng is None:
        dropout_rng = draw_rng(q.device)
    sides = band(window, causal is not False)
    sizes = sizes_of(q, k, cu_seqlens_q)
    block_mask = block_mask_of(block_mask)
    check_block_mask(block_mask, sizes, is_packed, sides != (OPEN, OPEN))
    positions = *lengths, alibi_slopes, bias, mask_mod, score_mod, dropout_p or None
    documents, batch = documents_in(block_mask, q, k, v, positions), q.shape[0]
    if documents is not None:
        block_mask, sides = None, band(None, documents.causal)
        if documents.are_many:
            if batch > 1:
                q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
            lengths = None, None, documents.cu_seqlens, documents.cu_seqlens
            max_seqlen_q = documents.longest
    modifiers = modifiers_of(mask_mod, score_mod, block_mask, sizes)
    rng = dropout_rng if dropout_p else None
    extras = Extras(alibi_slopes, sinks, *lengths, bias, rng, modifiers.captured)
    out, lse = call(
        *(q, k, v),
        extras=extras,
        numbers=(scale, softcap, dropout_p),
        window=(align, *sides),
        deterministic=deterministic,
        backend=backend,
        mods=modifiers.mods,
        is_long=lengths[2] is not None and is_long(max_seqlen_q),
        entry=entry,
    )
    if is_packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    elif documents is not None and documents.are_many and batch > 1:
        out = out.reshape(batch, -1, *out.shape[2:])
        lse = lse.reshape(lse.shape[1], batch, -1).transpose(0, 1)
    if layout == "bhsd" and not is_packed:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def documents_in(
    block_mask: BlockMask | None, q: Tensor, k: Tensor, v: Tensor, positions: tuple[Any, ...]
) -> Documents | None:
    """The packed sequences that a mask says q, k and v are, where nothing else asks where a query
    or a key is, and where a view of them is packed.
    """
    documents = None if block_mask is None else block_mask.documents
    batch, tokens = q.shape[:2]
    if documents is None or documents.batch != batch or any(x is not None for x in positions):
        return None
    is_view = all(batch == 1 or x.stride(0) == tokens * x.stride(1) for x in (q, k, v))
    return documents if is_view else None


def again(
    entry: Entry,
    inputs: tuple[Tensor, Tensor, Tensor],
    others: tuple[Tensor | None, ...],
    layout: str,
) -> tuple[Tensor, Tensor] | None:
    """`out` and `lse` of a call of `attention` whose signature is known; else None."""
    q, k, v = inputs
    *optional, page_table, out = others
    if entry.step is not None:
        alibi_slopes, sinks, seqused_k, _, cu_seqlens_q, *_ = optional
        cache = q, k, v, page_table, seqused_k, cu_seqlens_q, alibi_slopes, sinks
        return launch_step(entry.step, cache, out, layout)
    return None if entry.call is None else launch(entry.call, q, k, v, optional, layout)


def launch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, optional: Sequence[Tensor | None], layout: str
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a known call of tensors in a layout; `optional` begin its Extras."""
    extras = extras_of(*optional) if call.has_extras else NO_EXTRAS
    if call.problem.is_packed:
        out, lse = ops.launch(call, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), extras)
        return out.squeeze(0), lse.squeeze(0)
    if layout == "bshd":
        return ops.launch(call, q, k, v, extras)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = ops.launch(call, q, k, v, extras)
    return out.transpose(1, 2), lse


def launch_step(
    step: Callable[..., Any],
    cache: tuple[Tensor | None, ...],
    out: Tensor | None,
    layout: str = "bshd",
) -> tuple[Tensor, Tensor] | None:
    """`out` and `lse` of a known step; None where it may not be launched now."""
    shards.refuse_shards()
    found: tuple[Tensor, Tensor] | None = step(cache, out)
    if found is None or out is not None or layout == "bshd":
        return found
    return found[0].transpose(1, 2), found[1]


def as_bound(bound: int | Tensor | None) -> bool | int | Tensor | None:
    """What of a bound on lengths tells calls apart: whether it is a long one, where it is right."""
    return bound > LONG if type(bound) is int and bound >= 0 else bound


def attend_cached(cached: Cached, out: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    """A checked call with a cache, without a gradient; `out` as it was given."""
    named = zip(("q", "k", "v", "sinks"), (cached.q, cached.k, cached.v, cached.extras.sinks))
    slopes = cached.extras.alibi_slopes
    check_no_grad(*named, ("alibi_slopes", slopes), ("out", out))
    if out is None:
        out, lse = cache_ops.attention(cached)
        return out.transpose(1, 2) if layout == "bhsd" else out, lse
    return out, cache_ops.attention(cached, check_out(out, cached, layout))[1]


def is_long(max_seqlen_q: int | Tensor | None) -> bool:
    """Whether packed sequences may be long. A tensor's number is on its device, and nothing here is
    worth a wait.
    """
    return isinstance(max_seqlen_q, (int, torch.SymInt)) and max_seqlen_q > LONG


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    numbers: tuple[float | None, float | None, float],
    window: tuple[str, int, int],
    deterministic: bool,
    backend: str | None = None,
    mods: Mods = NO_MODS,
    is_long: bool = False,
    words: Words = OURS,
    entry: Entry | None = None,
) -> tuple[Tensor, Tensor]:
    """Every face ends here: cast as autocast asks, check once, go. `numbers` are scale, softcap
    and dropout_p, `window` is where the diagonal ends and what lies left and right of it, `words`
    are the face's own, and `entry` is that of its arguments. What is no part of the signature here,
    or equals something else there, has been checked before a call is looked for.
    """
    deterministic = check_flag("deterministic", deterministic)
    dispatch.check_backend(backend)
    tensors = q, k, v, *extras.tensors
    is_watched = ops.is_watched(*tensors)
    if is_watched or is_any_autocast_on():
        q, k, v = ops.autocast(q, k, v)
        tensors = q, k, v, *extras.tensors
    asked: dict[str, Any] = dict(numbers=numbers[:2], align=window[0], window=window[1:], mods=mods)
    asked |= dict(deterministic=deterministic, dropout_p=numbers[2], is_long=is_long)
    if entry is None and not is_watched and may_keep(numbers, extras):
        flags = deterministic, mods, is_long, backend
        entry = entry_of(tensors, *numbers, *window, *flags)
    known = None if entry is None else entry.call  # a compiler would watch the table
    if known is None:
        problem, _, scalars = check(q, k, v, extras=extras, words=words, **asked)
        learned = () if is_watched else (q, k, v, extras.sinks, extras.bias, *extras.captured)
        known = Call(problem, scalars, backend, ops.needs_grad(*learned))
        if entry is not None:
            entry.call = known
    if not is_watched and os.environ.get("TILEWISE_CHECK") == "1" and q.device.type != "cpu":
        check_scores(q, k, *known.scalars[:2], words)
    return ops.attention(known, q, k, v, extras, is_watched)


def may_keep(numbers: tuple[float | None, float | None, float], extras: Extras) -> bool:
    """Whether a call's numbers cannot change, and its checks read no tensor."""
    scale, softcap, dropout_p = numbers
    is_fixed = all(x is None or type(x) is float for x in (scale, softcap))
    return is_fixed and type(dropout_p) in (int, float) and not has_values(extras)
