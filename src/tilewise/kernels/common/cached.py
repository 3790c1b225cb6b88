"""Calls with a cache after validation: the arguments of operators and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...problem import NO_EXTRAS, Extras, Mods, Problem, Scalars, describe
from ...tile.split_kv import default_split_size

Tensor = torch.Tensor
# Of `Cached.tensors`, behind which `out` may follow
READ_NAMES = (
    *("q", "k", "v", "page_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks"),
    *("k_descale", "v_descale"),
)
OUT = len(READ_NAMES)


class Cached(NamedTuple):
    """A call with a KV cache; `frontend.cached` checks its tensors and adds its numbers."""

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
        return self.of_tensors([resolved(x) for x in self.tensors])

    def of_tensors(self, tensors: Sequence[Any]) -> Cached:
        """A copy with these `tensors`."""
        named = dict(zip(READ_NAMES, tensors))
        extras = {name: named.pop(name) for name in Extras._fields if name in named}
        return self._replace(extras=self.extras._replace(**extras), **named)

    @property
    def problem(self) -> Problem:
        """What selects code."""
        q = self.q if self.q.dim() == 4 else self.q.unsqueeze(0)
        how: dict[str, Any] = dict(align="bottom_right", deterministic=False, mods=Mods(self.mask))
        return describe(q, self.k, self.v, extras=self.extras, scalars=self.scalars, **how)


def resolved(x: Tensor | None) -> Any:
    """A tensor that is not lazily negated."""
    return x if x is None else x.resolve_neg()


def lse_by_query(lse: Tensor) -> Tensor:
    """The view (batch, seqlen_q, nheads), packed (total_q, nheads)."""
    return lse.transpose(-1, -2)
