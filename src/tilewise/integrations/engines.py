"""What serving engines share: where the tokens of a step are, and a layer with the calls of
tilewise that it makes, `append` and `attend`, or without a cache `attend_within`.

An engine keeps keys and values in pages, and packs the tokens of all requests end to end. Its
tensors are passed on as they are: never copied, and never read on the host, so that a CUDA graph
may replay both calls for any batch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..frontend.append import append
from ..frontend.attention import attention

Tensor = torch.Tensor


class Step:
    """Where the tokens of a step are, in int32 tensors that the engine owns. Metadata of an engine
    is a subclass, with what else it needs.
    """

    def __init__(
        self,
        cu_seqlens_q: Tensor,  # (batch + 1,), where the queries of each sequence begin
        *,
        seqused_k: Tensor,  # (batch,), the keys of each sequence, with those of this step
        page_table: Tensor,  # (batch, pages)
        max_seqlen_q: int | None = None,  # no sequence has more queries; None: not known
        mask_mod: Any = None,  # of a step whose queries are trees of drafts
    ) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.seqused_k = seqused_k
        self.page_table = page_table
        self.max_seqlen_q = max_seqlen_q
        self.mask_mod = mask_mod


class Layer:
    """An attention layer: what it does to its scores, and the scales of its cache."""

    def __init__(
        self,
        scale: float | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,  # fp32, (nheads,)
        sinks: Tensor | None = None,  # (nheads,)
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> None:
        # Keywords of `tilewise.attention`
        self.scores: dict[str, Any] = dict(scale=scale, causal=causal, window=window)
        self.scores |= dict(softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
        self.descales: dict[str, Any] = dict(k_descale=k_descale, v_descale=v_descale)

    def append(
        self, k: Tensor, v: Tensor, *, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        """Writes the keys and values of a step, (tokens, nheads_k, headdim), to their slots, int64;
        a negative one is skipped.
        """
        append(k_cache, v_cache, k, v, slots=slots, **self.descales)

    def attend(
        self,
        q: Tensor,
        step: Step,
        *,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of a step's queries, (tokens, nheads, headdim), over pages (num_pages,
        page_size, nheads_k, headdim); what `tilewise.attention` returns. Rows of `out` that belong
        to no sequence stay as they are.
        """
        return attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=step.cu_seqlens_q,
            seqused_k=step.seqused_k,
            page_table=step.page_table,
            max_seqlen_q=step.max_seqlen_q,
            mask_mod=step.mask_mod,
            out=out,
            return_lse=return_lse,
            **self.scores,
            **self.descales,
        )

    def attend_within(
        self, q: Tensor, k: Tensor, v: Tensor, *, step: Step, return_lse: bool = False
    ) -> Any:
        """Attention of a step's queries to the keys and values of the step alone."""
        return attention(
            q,
            k,
            v,
            cu_seqlens_q=step.cu_seqlens_q,
            cu_seqlens_k=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            return_lse=return_lse,
            **self.scores,
        )
