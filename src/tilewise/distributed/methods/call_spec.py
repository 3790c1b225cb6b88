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
from ...mods.flatten import NO_MODIFIERS, FlatMods, indices_used, modifiers_of
from ...mods.serialize import serialize
from ...ops import attention as ops
from ...problem import Extras
from ...tile.random_bytes import check_dropout
from ..layouts.layout import Layout

Tensor = torch.Tensor


class Found:
    """What a method has found for all calls of a signature, strides and alignment included."""

    __slots__ = ("one_launch", "to_heads")

    def __init__(self) -> None:
        self.one_launch: Any = None
        self.to_heads: Any = None


class CallSpec(NamedTuple):
    """A call: its arguments as the caller wrote them, and what follows of them."""

    layout: Layout
    causal: bool | str = False
    scale: float | None = None
    window: Window = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    dropout_p: float = 0.0
    dropout_rng: Tensor | None = None
    deterministic: bool = False
    backend: str | None = None
    bitwise: bool = True
    learns: bool = False  # whether a gradient will be asked for
    modifiers: FlatMods = NO_MODIFIERS
    signature: str = ""  # what all ranks must call alike
    found: Found | None = None  # of a call that is known by how its arguments look

    @property
    def sides(self) -> tuple[int, int]:
        """How far a query sees to the left and to the right, OPEN for no limit."""
        return band(self.window, self.causal is not False)

    @property
    def is_modified(self) -> bool:
        """Whether functions or random numbers of positions go into scores and probabilities."""
        return self.modifiers.mods != NO_MODIFIERS.mods or self.dropout_p > 0

    @property
    def uses_head_index(self) -> bool:
        """Whether what is computed depends on the number of a head."""
        return self.dropout_p > 0 or "h" in indices_used(self.modifiers.mods)


def check(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> CallSpec:
    """The call of q, k and v, which are this rank's rows, (batch, tokens, heads, headdim)."""
    layout, seqlen = spec.layout, spec.layout.seqlen
    check_rank(q, k, v)
    check_tensors(q, k, v)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != layout.tokens:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}, {x.shape[1]} tokens: rank {layout.rank} has "
                f"{layout.tokens} tokens of {seqlen} in this layout; deal them with layout.shard"
            )
    check_causal(spec.causal)
    check_numbers(spec.scale, spec.softcap, q.shape[3], q.dtype)
    p, rng = check_dropout(spec.dropout_p), spec.dropout_rng
    if p and rng is None and layout.ranks > 1:
        raise ArgumentError(
            "dropout_p without dropout_rng: all ranks must drop the same elements, so pass the "
            "same int64 (seed, offset) on each"
        )
    check_extras(q, k, Extras(spec.alibi_slopes, spec.sinks, dropout_rng=rng))
    sizes = q.shape[0], q.shape[2], seqlen, seqlen
    if layout.cu_seqlens is not None:
        sizes = q.shape[0] * (len(layout.cu_seqlens) - 1), q.shape[2], 0, 0
        if spec.alibi_slopes is not None and spec.alibi_slopes.dim() == 2:
            raise NotImplementedError(
                "alibi_slopes of shape (batch, nheads) with documents: pass shape (nheads,)"
            )
    modifiers = modifiers_of(spec.mask_mod, spec.score_mod, None, sizes)
    if layout.ranks > 1:
        check_captured(modifiers)
    checked = spec._replace(
        dropout_p=p,
        dropout_rng=rng if p else None,
        deterministic=check_flag("deterministic", spec.deterministic),
        bitwise=check_flag("bitwise", spec.bitwise),
        learns=spec.learns or ops.needs_grad(q, k, v, spec.sinks),
        modifiers=modifiers,
    )
    return checked._replace(signature=_signature(checked, q, k, v))


def check_captured(modifiers: FlatMods) -> None:
    """Refuses functions that would have to learn."""
    if any(x.requires_grad for x in modifiers.captured):
        raise NotImplementedError(
            "a score_mod that captured a tensor that requires a gradient: no method of "
            "tilewise.distributed computes it yet, so detach() the tensor"
        )


def _signature(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The call as a text, without the tokens, of which each rank has its own number."""
    layout, rng = spec.layout, spec.dropout_rng
    if rng is not None:  # what is on a GPU is not read: that would wait for it
        rng = tuple(rng.tolist()) if rng.device.type == "cpu" else "of the device"
    options = (
        ("scale", spec.scale),
        ("softcap", spec.softcap),
        ("dropout_rng", rng),
        ("dropout_p", spec.dropout_p or None),
        ("alibi_slopes", _shape(spec.alibi_slopes)),
        ("sinks", _shape(spec.sinks)),
        ("mask_mod", _digest(serialize(spec.modifiers.mods.mask))),
        ("score_mod", _digest(serialize(spec.modifiers.mods.score))),
        ("bitwise", None if spec.bitwise else False),
    )
    return _text(
        *(layout, q.shape, k.shape, v.shape, q.dtype),
        *(spec.causal, spec.sides, spec.learns, options),
    )


@functools.lru_cache(maxsize=1024)
def _text(
    layout: Layout,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    causal: bool | str,
    sides: tuple[int, int],
    learns: bool,
    options: tuple[tuple[str, Any], ...],
) -> str:
    shapes = (
        f"{name} ({x[0]}, {layout.seqlen}, {x[2]}, {x[3]})"
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    dealt = _digest(repr((layout.runs, layout.cu_seqlens)))
    said = [
        *shapes,
        str(dtype).removeprefix("torch."),
        f"{layout.kind} over {layout.ranks} ranks ({dealt})",
        f"causal={causal}, window={sides}",
        "with a gradient" if learns else "without a gradient",
        *(f"{name}={value}" for name, value in options if value is not None),
    ]
    return ", ".join(said)


def _digest(text: str) -> str | None:
    """What distinguishes texts in few letters, the same in every process; None of none."""
    return f"{zlib.crc32(text.encode()):08x}" if text else None


def _shape(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)
