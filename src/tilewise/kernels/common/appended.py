"""Appends to KV caches after validation: the arguments of operators and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...errors import short
from ...tile.rotary import Rotary
from .cached import resolved

Tensor = torch.Tensor
# What an append reads and writes, as `Append.tensors` lists it
NAMES = ("k", "k_cache", "v", "v_cache", "page_table", "seqused_k", "cu_seqlens_q", "slots")
NAMES += ("cos", "sin", "k_descale", "v_descale")


class Append(NamedTuple):
    """The arguments of `tilewise.cache.append`, which describes them."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens_q: Tensor | None
    slots: Tensor | None
    rotary: Rotary | None
    # Of caches of 8 bits: read; written where each row has its own, shaped as the cache
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    __repr__ = short

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of a relaunch."""
        cos, sin = (None, None) if self.rotary is None else self.rotary[:2]
        return self.k, self.k_cache, self.v, self.v_cache, *self[4:8], cos, sin, *self[9:]

    def of_tensors(self, tensors: Sequence[Tensor | None]) -> Append:
        """A copy with these `tensors`."""
        named = dict(zip(NAMES, tensors))
        cos, sin = named.pop("cos"), named.pop("sin")
        rotary = None if self.rotary is None else self.rotary._replace(cos=cos, sin=sin)
        return self._replace(rotary=rotary, **named)

    def resolved(self) -> Append:
        """A copy without lazily negated tensors."""
        return self.of_tensors(list(map(resolved, self.tensors)))


class AppendedCall(NamedTuple):
    """A call with a KV cache that appends new keys first: the tensors of its decode step, `out`,
    the other tensors, and how heads are rotated, as `flash_attn_with_kvcache` names them.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor | None
    before: Tensor  # int32 (batch,), the keys of each sequence without the new ones
    cu_seqlens_q: Tensor | None
    alibi_slopes: Tensor | None
    learnable_sink: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out: Tensor | None
    k: Tensor
    v: Tensor
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None  # int32 (batch,): rotary positions count from these
    rows: Tensor | None  # int32 (batch, 1), of the cache
    cache_leftpad: Tensor | None  # int32 (batch,), the first row of each sequence
    rotary_interleaved: bool
    is_at_first: bool  # all queries of a sequence are at its first position

    @property
    def page_table(self) -> Tensor | None:
        """Where an append finds each sequence."""
        return self.table if self.rows is None else self.rows

    @property
    def rotary(self) -> Rotary | None:
        """The tables of q and k."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return None
        return Rotary(self.rotary_cos, self.rotary_sin, self.rotary_interleaved)

    @property
    def append(self) -> Append:
        """Its append, without lengths."""
        values: dict[str, Any] = dict(page_table=self.page_table, rotary=self.rotary)
        values |= dict(cu_seqlens_q=self.cu_seqlens_k_new, seqused_k=None, slots=None)
        values = self._asdict() | values
        return Append(**{name: values[name] for name in Append._fields})


TENSORS = 19  # of an `AppendedCall`
