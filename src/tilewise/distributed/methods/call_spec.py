"""The arguments of one call on shards, checked on each rank, and their signature: a text that all
ranks compare.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError
from ...frontend.checks import check_extras
from ...frontend.qkv import check_rank, check_tensors
from ...frontend.scalars import Window, band, check_causal, check_flag, check_numbers
from ...mods.flat import FlatMods, indices_used
from ...mods.flatten import modifiers_of
from ...mods.serialize import serialize
from ...ops import attention as ops
from ...problem import NO_EXTRAS, NO_MODS, Extras, Mods, Scalars
from ...tile.dropout_numbers import check_dropout
from ..layouts.layout import Layout
from ..layouts.work import Band

Tensor = torch.Tensor


class Prepared:
    """What methods keep for all calls of a signature, strides and alignment included."""

    __slots__ = ("heads", "stream")

    def __init__(self) -> None:
        self.heads: Any = None  # a `heads.HeadExchange`
        self.stream: Any = None  # a `one_launch.PreparedLaunch`


class CallSpec(NamedTuple):
    """A call on shards: its arguments as the caller wrote them, and what `check` computes."""

    layout: Layout
    causal: bool | str = False
    scale: float | None = None
    window: Window = None
    softcap: float | None = None
    extras: Extras = NO_EXTRAS  # alibi_slopes, sinks, dropout_rng, and what functions captured
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    backend: str | None = None
    bitwise: bool = True
    learns: bool = False  # whether a gradient will be asked for
    mods: Mods = NO_MODS
    scalars: Scalars = Scalars(1.0)
    signature: str = ""  # what all ranks must call alike
    prepared: Prepared | None = None  # where the call is cached

    @property
    def band(self) -> Band:
        """The keys that a query sees."""
        return Band(*band(self.window, self.causal is not False))

    @property
    def align(self) -> str:
        """The corner in which the diagonal ends."""
        return self.causal if isinstance(self.causal, str) else "bottom_right"

    @property
    def numbers(self) -> tuple[float | None, float | None]:
        """What scores are multiplied with and capped at, as the caller wrote it."""
        return self.scale, self.softcap

    @property
    def is_modified(self) -> bool:
        """Whether functions or random numbers of positions go into scores and probabilities."""
        return self.mods != NO_MODS or self.dropout_p > 0

    @property
    def uses_head_index(self) -> bool:
        """Whether what is computed depends on the number of a head."""
        return self.dropout_p > 0 or "h" in indices_used(self.mods)

    @property
    def position_free_extras(self) -> Extras:
        """ALiBi's slopes and sinks, which kernels for runs of rows take."""
        return Extras(self.extras.alibi_slopes, self.extras.sinks)

    def summing_in(self, dtype: torch.dtype) -> CallSpec:
        """Returns the call whose gradient of sinks, a sum over ranks, has another dtype."""
        if self.extras.sinks is None:
            return self
        return self._replace(extras=self.extras._replace(sinks=self.extras.sinks.to(dtype)))

    def of_heads(self, heads: slice) -> CallSpec:
        """Returns the call of some query heads."""
        slopes, sinks = self.extras.alibi_slopes, self.extras.sinks
        if slopes is None and sinks is None:
            return self
        extras = self.extras._replace(
            alibi_slopes=None if slopes is None else slopes[..., heads],
            sinks=None if sinks is None else sinks[heads],
        )
        return self._replace(extras=extras)


def check(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> CallSpec:
    """Checks the call of this rank's q, k and v, (batch, tokens, heads, headdim)."""
    layout, seqlen = spec.layout, spec.layout.seqlen
    check_rank(q, k, v=v)
    check_tensors(q, k, v=v)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != layout.tokens:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}, {x.shape[1]} tokens: rank {layout.rank} has "
                f"{layout.tokens} tokens of {seqlen} in this layout; deal them with layout.shard"
            )
    check_causal(spec.causal)
    scale, cap = check_numbers(spec.scale, spec.softcap, headdim=q.shape[3], dtype=q.dtype)
    p, rng = check_dropout(spec.dropout_p), spec.extras.dropout_rng
    if p and rng is None and layout.ranks > 1:
        raise ArgumentError(
            "dropout_p without dropout_rng: all ranks must drop the same elements, so pass the "
            "same int64 (seed, offset) on each"
        )
    check_extras(q, k, extras=spec.extras)
    sizes = q.shape[0], q.shape[2], seqlen, seqlen
    if layout.cu_seqlens is not None:
        sizes = q.shape[0] * (len(layout.cu_seqlens) - 1), q.shape[2], 0, 0
        slopes = spec.extras.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            raise NotImplementedError(
                "alibi_slopes of shape (batch, nheads) with documents: pass shape (nheads,)"
            )
    modifiers = modifiers_of(spec.mask_mod, spec.score_mod, None, sizes)
    if layout.ranks > 1:
        check_captured(modifiers)
    checked = spec._replace(
        dropout_p=p,
        extras=spec.extras._replace(dropout_rng=rng if p else None, captured=modifiers.captured),
        deterministic=check_flag("deterministic", spec.deterministic),
        bitwise=check_flag("bitwise", spec.bitwise),
        learns=spec.learns or ops.needs_grad(q, k, v, spec.extras.sinks),
        mods=modifiers.mods,
        scalars=Scalars(scale, cap, left=spec.band.left, right=spec.band.right, dropout_p=p),
    )
    return checked._replace(signature=_signature(checked, q, k=k, v=v))


def check_captured(modifiers: FlatMods) -> None:
    """Refuses captured tensors that want gradients."""
    if any(x.requires_grad for x in modifiers.captured):
        raise NotImplementedError(
            "a score_mod that captured a tensor that requires a gradient: no method of "
            "tilewise.distributed computes it yet, so detach() the tensor"
        )


def _signature(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Writes the call as a text, without the tokens, of which each rank has its own number."""
    layout, extras, rng = spec.layout, spec.extras, spec.extras.dropout_rng
    if rng is not None:  # what is on a GPU is not read: that would wait for it
        rng = tuple(rng.tolist()) if rng.device.type == "cpu" else "of the device"
    options = dict(
        scale=spec.scale,
        softcap=spec.softcap,
        dropout_rng=rng,
        dropout_p=spec.dropout_p or None,
        alibi_slopes=_shape(extras.alibi_slopes),
        sinks=_shape(extras.sinks),
        mask_mod=_digest(serialize(spec.mods.mask)),
        score_mod=_digest(serialize(spec.mods.score)),
        bitwise=None if spec.bitwise else False,
    )
    shapes = (
        (name, (x.shape[0], layout.seqlen, *x.shape[2:])) for name, x in zip("qkv", (q, k, v))
    )
    parts = [
        *(f"{name} {shape}" for name, shape in shapes),
        str(q.dtype).removeprefix("torch."),
        f"{layout.kind} over {layout.ranks} ranks ({_layout_digest(layout)})",
        f"causal={spec.causal}, window={tuple(spec.band)}",
        "with a gradient" if spec.learns else "without a gradient",
        *(f"{name}={value}" for name, value in options.items() if value is not None),
    ]
    return ", ".join(parts)


@functools.lru_cache(maxsize=1024)
def _layout_digest(layout: Layout) -> str | None:
    return _digest(repr((layout.runs, layout.cu_seqlens)))


def _digest(text: str) -> str | None:
    """Shortens a text to a few letters, which are the same in every process; None if empty."""
    return f"{zlib.crc32(text.encode()):08x}" if text else None


def _shape(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)
