"""Calls with a cache after validation: the arguments of operators and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from ...errors import short
from ...problem import NO_EXTRAS, Extras, Mods, Problem, Scalars, describe
from ...tile.quantize import by_row
from ...tile.rotary import Rotary
from ...tile.split_kv import default_split_size
from ...tile.types import Strided

Tensor = torch.Tensor
# Of `Cached.tensors`, behind which `out` may follow
READ_NAMES = (
    *("q", "k", "v", "page_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks"),
    *("k_descale", "v_descale"),
)
OUT = len(READ_NAMES)


class Cached(NamedTuple):
    """A call with a KV cache; `frontend.cache_checks` checks its tensors and adds its numbers."""

    q: Tensor  # (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim)
    k: Tensor  # (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, ...)
    v: Tensor
    page_table: Tensor | None = None  # (batch, pages), int32
    extras: Extras = NO_EXTRAS
    scalars: Scalars = Scalars(1.0)
    split_size: int = 0  # 0: not asked for, so that a backend may sum keys in another way
    mask: str = ""  # the name of the mask's tree
    backend: str | None = None  # the name of one to force
    entry: Any = None  # where the step is kept, an `ops.calls.Entry`, or None
    has_out: bool = False  # the caller's, of which rows of no sequence stay as they are
    # Of a cache of 8 bits: (), (nheads_k,), (batch, nheads_k), or shaped as it without headdim
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    longest: int = 0  # of packed queries: a power of two that max_seqlen_q reaches; 0: not known

    @property
    def piece_size(self) -> int:
        """The keys of a piece, where they are summed in pieces."""
        return self.split_size or default_split_size(self.q.shape[-2] // self.k.shape[2])

    @property
    def clears_tail(self) -> bool:
        """Whether rows of no sequence get 0."""
        return self.extras.cu_seqlens_q is not None and not self.has_out

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors but those that the mask captured, in the order of a relaunch."""
        x = self.extras
        of_extras = x.seqused_k, x.cu_seqlens_q, x.alibi_slopes, x.sinks
        return self.q, self.k, self.v, self.page_table, *of_extras, self.k_descale, self.v_descale

    def resolved(self) -> Cached:
        """A copy without lazily negated tensors; a compiler's operators resolve their own."""
        is_traced = torch.compiler.is_compiling()  # which knows no `is_neg`
        if is_traced or not any(x is not None and x.is_neg() for x in self.tensors):
            return self
        return self.of_tensors([_resolved(x) for x in self.tensors])

    def of_tensors(self, tensors: Sequence[Any]) -> Cached:
        """A copy with these `tensors`."""
        q, k, v, table, used, starts, slopes, sinks, *descales = tensors
        extras = self.extras._replace(seqused_k=used, cu_seqlens_q=starts)
        return self._replace(
            q=q,
            k=k,
            v=v,
            page_table=table,
            extras=extras._replace(alibi_slopes=slopes, sinks=sinks),
            k_descale=descales[0],
            v_descale=descales[1],
        )

    @property
    def problem(self) -> Problem:
        """What selects code."""
        q = self.q if self.q.dim() == 4 else self.q.unsqueeze(0)
        flags = "bottom_right", False, Mods(self.mask)
        return describe(q, self.k, self.v, self.extras, self.scalars, *flags)


NO_CACHE = Cached(*[cast(Any, None)] * 3)  # for `of_tensors`


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

    @property
    def written(self) -> list[Tensor]:
        """The caches, and scales that each row has."""
        return [self.k_cache, self.v_cache, *(x for x in self[-2:] if by_row(x))]

    def of_tensors(self, tensors: Sequence[Tensor | None]) -> Append:
        """A copy with these `tensors`."""
        k, k_cache, v, v_cache, *places, cos, sin, k_descale, v_descale = tensors
        rotary = None if self.rotary is None else self.rotary._replace(cos=cos, sin=sin)
        return Append(k_cache, v_cache, k, v, *places, rotary, k_descale, v_descale)

    def resolved(self) -> Append:
        """A copy without lazily negated tensors."""
        rotary = self.rotary
        if rotary is not None:
            rotary = rotary._replace(cos=_resolved(rotary.cos), sin=_resolved(rotary.sin))
        return Append(*map(_resolved, self[:8]), rotary, *map(_resolved, self[9:]))


class AppendedCall(NamedTuple):
    """A call with a KV cache that appends new keys first: the tensors of its decode step, `out`,
    the other tensors, and how heads are rotated.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor | None
    before: Tensor  # int32 (batch,), the keys of each sequence without the new ones
    cu_seqlens_q: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out: Tensor | None
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    cu_seqlens_k: Tensor | None
    rotary_seqlens: Tensor | None  # int32 (batch,): rotary positions count from these
    rows: Tensor | None  # int32 (batch, 1), of the cache
    leftpad: Tensor | None  # int32 (batch,), the first row of each sequence
    is_interleaved: bool
    is_at_first: bool  # all queries of a sequence are at its first position

    @property
    def page_table(self) -> Tensor | None:
        """Where an append finds each sequence."""
        return self.table if self.rows is None else self.rows

    @property
    def rotary(self) -> Rotary | None:
        """The tables of q and k."""
        if self.cos is None or self.sin is None:
            return None
        return Rotary(self.cos, self.sin, self.is_interleaved)

    @property
    def append(self) -> Append:
        """Its append, without lengths."""
        return Append(
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            k=self.k,
            v=self.v,
            page_table=self.page_table,
            seqused_k=None,
            cu_seqlens_q=self.cu_seqlens_k,
            slots=None,
            rotary=self.rotary,
            k_descale=self.k_descale,
            v_descale=self.v_descale,
        )


TENSORS = 19  # of an `AppendedCall`


def _resolved(x: Tensor | None) -> Any:
    return x if x is None else x.resolve_neg()


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(batch, nheads, seqlen_q), packed (nheads, total_q)."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def lse_by_query(lse: Tensor) -> Tensor:
    """The view (batch, seqlen_q, nheads), packed (total_q, nheads)."""
    return lse.transpose(-1, -2)


def strided_of(x: Tensor) -> Strided:
    """A batch, pages, or packed rows as a batch of one."""
    batch, row, head = x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
    return Strided(x, batch, row, head=head)


def scales_of(scale: Tensor | None) -> tuple[Tensor | None, int | None, int | None, int | None]:
    """Scales of any kind and their strides: over sequences, or over pages where each row has its
    own; None, rows, heads.
    """
    if scale is None:
        return None, None, None, None
    if scale.dim() == 3:
        return scale, *scale.stride()
    batch, head = (0, 0, *scale.stride())[-2:]
    return scale, batch, None, head
