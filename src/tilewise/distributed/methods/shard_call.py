"""A call on shards as methods compute it: checked, with all of its arguments but q, k and v."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...features import FEATURES
from ...mods.flat import indices_used
from ...problem import NO_EXTRAS, NO_MODS, OPTIONAL, Call, Extras, Mods, Scalars, describe
from ..layouts.layout import Layout
from ..layouts.work import Band
from ..transport.halves import Arena
from .grads import LEARNED

Tensor = torch.Tensor
# Optional tensors of a number per head, the last of their dimensions
PER_HEAD = [
    name
    for name in Extras._fields[:OPTIONAL]
    if any("nheads" in shape for shape in FEATURES[name].shapes)
]


class Prepared:
    """What methods keep for all calls of a signature, strides and alignment included."""

    __slots__ = ("arena", "heads", "method", "stream")

    def __init__(self, arena: Arena | None, method: str) -> None:
        # Its group may end, and its memory with it
        self.arena: Callable[[], Any] = (lambda: None) if arena is None else weakref.ref(arena)
        self.method = method
        self.heads: Any = None  # a `heads.HeadExchange`
        self.stream: Any = None  # a `one_launch.PreparedLaunch`


class ShardCall(NamedTuple):
    """A checked call on shards."""

    layout: Layout
    scalars: Scalars = Scalars(1.0)
    extras: Extras = NO_EXTRAS
    align: str = "bottom_right"
    mods: Mods = NO_MODS
    deterministic: bool = False
    backend: str | None = None
    bitwise: bool = True
    learns: bool = False  # whether a gradient will be asked for
    signature: str = ""  # what all ranks must call alike
    prepared: Prepared | None = None  # where the call is cached

    @property
    def band(self) -> Band:
        """The keys that a query sees."""
        return Band(self.scalars.left, self.scalars.right)

    @property
    def is_modified(self) -> bool:
        """Whether functions or random numbers of positions go into scores and probabilities."""
        return self.mods != NO_MODS or self.scalars.dropout_p > 0

    @property
    def uses_head_index(self) -> bool:
        """Whether what is computed depends on the number of a head."""
        return self.scalars.dropout_p > 0 or "h" in indices_used(self.mods)

    @property
    def extras_per_head(self) -> Extras:
        """The optional tensors that kernels for runs of rows take."""
        return Extras(**{name: getattr(self.extras, name) for name in PER_HEAD})

    def summing_in(self, dtype: torch.dtype) -> ShardCall:
        """Returns the call whose learned tensor, of which ranks add gradients, has this dtype."""
        learned = getattr(self.extras, LEARNED)
        if learned is None:
            return self
        return self._replace(extras=self.extras._replace(**{LEARNED: learned.to(dtype)}))

    def of_heads(self, heads: slice) -> ShardCall:
        """Returns the call of some query heads."""
        extras = self.extras
        for name in PER_HEAD:
            x = getattr(extras, name)
            if x is not None:
                extras = extras._replace(**{name: x[..., heads]})
        return self if extras is self.extras else self._replace(extras=extras)

    def on_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        extras: Extras,
        band: Band | None = None,
        align: str = "bottom_right",
        is_long: bool = False,
    ) -> Call:
        """Returns the call of one process on some rows of queries and of keys."""
        band = self.band if band is None else band
        scalars = self.scalars._replace(left=band.left, right=band.right)
        problem = describe(
            q,
            k,
            v,
            extras=extras,
            scalars=scalars,
            align=align,
            deterministic=self.deterministic,
            mods=self.mods,
            is_long=is_long,
        )
        return Call(problem, scalars, backend=self.backend)
