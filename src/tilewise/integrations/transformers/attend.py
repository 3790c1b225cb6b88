"""From a `Visible` to calls of `tilewise.attention`: one, or one a row where rows begin apart."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from ...errors import warn_slow
from ...frontend.attention import attention
from ...frontend.call import call
from ...frontend.scalars import Numbers
from ...mods.flatten import modifiers_by
from ...problem import Extras
from ...tile.dropout_numbers import check_dropout, draw_rng_of
from .visible import Band, Run, Starts, Visible

Tensor = torch.Tensor


class LayerFeatures(NamedTuple):
    """A layer's arguments besides the mask, by their names in `tilewise.attention`."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    bias: Tensor | None = None

    @classmethod
    def taken(cls, kwargs: dict[str, Any], scale: float | None, dropout_p: float) -> LayerFeatures:
        """Takes what a layer says by transformers' names out of `kwargs`."""
        return cls(
            scale,
            kwargs.pop("softcap", None),
            kwargs.pop("s_aux", None),
            dropout_p,
            bool(kwargs.pop("deterministic", None)),
            kwargs.pop("position_bias", None),
        )

    def cut(self, rows: slice, queries: slice, keys: slice) -> LayerFeatures:
        """The features of some rows, queries and keys."""
        if self.bias is None:
            return self
        return self._replace(bias=_cut(self.bias, rows, queries=queries, keys=keys))


ALL = slice(None)


def _cut(x: Tensor, rows: slice, queries: slice, keys: slice) -> Tensor:
    """A part of what broadcasts over (batch, nheads, queries, keys)."""
    parts = (ALL if n == 1 else part for n, part in zip(x.shape, (rows, ALL, queries, keys)))
    return x[tuple(parts)]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    features: LayerFeatures,
    align: str = "bottom_right",
    mask: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """One call; `mask` is bools that broadcast over (batch, nheads, queries, keys)."""
    causal = align if band.is_causal else False
    window = band.left, band.right  # a plain tuple, as cached signatures have it
    if mask is None or 0 in (*q.shape[:2], k.shape[1]):
        out = attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            seqused_k=seqused_k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            **features._asdict(),
        )
        return cast(Tensor, out)  # without `return_lse`
    modifiers = modifiers_by(mask.to(q.device))
    scale, softcap, sinks, dropout_p, deterministic, bias = features
    rng = draw_rng_of(q) if check_dropout(dropout_p) else None
    extras = Extras(None, sinks, seqused_k=seqused_k, bias=bias, dropout_rng=rng)
    out, _ = call(
        q,
        k,
        v=v,
        extras=extras._replace(captured=modifiers.captured),
        numbers=Numbers(scale, softcap, dropout_p, causal=causal, window=window),
        deterministic=deterministic,
        mods=modifiers.mods,
    )
    return out


def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, features: LayerFeatures
) -> Tensor:
    """One call, or one a row where the rows' first keys differ."""
    if visible.used is not None:
        align = "bottom_right" if visible.diagonal is None else "top_left"
        used = visible.used.to(q.device)
        return attend(q, k, v, visible.band, features, align, visible.mask, seqused_k=used)
    if visible.mask is not None:
        return _attend_masked(q, k, v=v, visible=visible, mask=visible.mask, features=features)
    if visible.runs is None:
        return attend(q, k, v=v, band=visible.band, features=features)
    if len(set(visible.runs)) == 1:
        return _attend_run(q, k, v=v, visible=visible, run=visible.runs[0], features=features)
    warn_slow(
        "rows of this batch begin at different keys, so attention is called once per row: if "
        "that is too slow, pad on the right, or pack the rows into one"
    )
    rows = [slice(row, row + 1) for row in range(q.shape[0])]
    return torch.cat(
        [
            _attend_run(q[r], k[r], v[r], visible, run=run, features=features.cut(r, ALL, ALL))
            for r, run in zip(rows, visible.runs, strict=True)
        ]
    )


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Starts,
    band: Band,
    features: LayerFeatures,
    kept: Tensor | None = None,
) -> Tensor:
    """The sequences of all rows, side by side; of each the first keys alone, `kept` of them."""
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    out = attend(
        q_rows,
        k_rows,
        v=v_rows,
        band=band,
        features=features,
        align="bottom_right" if kept is None else "top_left",
        seqused_k=None if kept is None else kept.to(q.device),
        cu_seqlens_q=starts.queries.to(q.device),
        cu_seqlens_k=starts.keys.to(q.device),
    )
    return out.unflatten(0, q.shape[:2])


def _attend_masked(q, k, v, visible: Visible, mask: Tensor, features: LayerFeatures) -> Tensor:
    """A mask in addition to the band; unwritten slots after the last query are cut off."""
    keys = ALL
    if visible.band.is_causal:
        keys = slice(0, visible.offset() + q.shape[1])
    features, mask = features.cut(ALL, ALL, keys), _cut(mask, ALL, queries=ALL, keys=keys)
    return attend(q, k[:, keys], v=v[:, keys], band=visible.band, features=features, mask=mask)


def _attend_run(q, k, v, visible: Visible, run: Run, features: LayerFeatures) -> Tensor:
    """The keys of a run alone. Queries that stand before the first of them give 0; so do those past
    the last, unless the band is causal.
    """
    start, stop = run
    seqlen, diagonal = q.shape[1], visible.offset()
    if visible.band.is_causal and start < stop < diagonal + seqlen:
        return _attend_late(q, k, v=v, visible=visible, run=run, features=features)
    if not visible.band.is_open:  # so that the last query stands at the last key
        seqlen = max(min(seqlen, stop - diagonal), 0)
    queries, keys = slice(0, seqlen), slice(start, stop)
    features = features.cut(ALL, queries, keys)
    out = attend(q[:, queries], k[:, keys], v=v[:, keys], band=visible.band, features=features)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - seqlen))


def _attend_late(q, k, v, visible: Visible, run: Run, features: LayerFeatures) -> Tensor:
    """Queries past the last key see what comes before them: the last one of a prompt that is padded
    on the right gives its next token.
    """
    start, stop = run
    first = start - visible.offset()  # the query that stands at the first key
    if first < 0:
        keys = slice(start, visible.offset() + q.shape[1])
        mask = torch.arange(keys.stop - start, device=q.device) < stop - start
        features = features.cut(ALL, ALL, keys)
        mask = mask[None, None, None]
        return attend(q, k[:, keys], v=v[:, keys], band=visible.band, features=features, mask=mask)
    queries, keys = slice(first, q.shape[1]), slice(start, stop)
    features = features.cut(ALL, queries, keys)
    out = attend(q[:, queries], k[:, keys], v[:, keys], visible.band, features, "top_left")
    return torch.nn.functional.pad(out, (0, 0, 0, 0, first, 0))
