"""An attention call after validation: one hashable record that selects the code to run.

A `Problem` holds only what selects code (heads, head dims, dtype, which features are on). Lengths,
strides and the values of scale, softcap and window are runtime numbers and are passed separately,
so that no kernel is compiled per length.

Causal and window masks are one thing here, a band around a diagonal: query i sees key j when

    i + diagonal - left <= j <= i + diagonal + right
    diagonal = seqlen_k - seqlen_q (bottom-right) or 0 (top-left)

with `left` or `right` absent where the band is open. Causal is right = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

LONG_SEQLEN = 2048  # queries: longer sequences may use another tile
WIDEST_EXACT = 128  # head dim
OPEN = -1  # a window side without a limit, as flash-attn spells it


class Mods(NamedTuple):
    """Functions of scores and positions, by the names of their trees (`mods.expressions.lookup`);
    "" is none.
    """

    mask: str = ""
    score: str = ""
    derivative: str = ""  # of the score function
    block: tuple[int, int] = (0, 0)  # of the block mask, (0, 0) without one


NO_MODS = Mods()


class Problem(NamedTuple):
    """What selects the code that runs. Hashable; no tensors, no lengths."""

    dtype: torch.dtype
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    align: str  # "bottom_right" or "top_left": which corner the diagonal ends in
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_seqused_k: bool
    has_seqused_q: bool
    is_packed: bool  # sequences lie end to end in a batch of 1
    has_bias: bool
    has_bias_grad: bool  # whether it is requested
    has_dropout: bool
    mods: Mods
    deterministic: bool
    is_long: bool = False  # packed sequences, of which some may have over LONG queries
    has_fp32_key_grads: bool = False  # dK and dV in fp32: parts of sums; to headdim WIDEST_EXACT

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.nheads // self.nheads_k

    @property
    def is_causal(self) -> bool:
        """Whether the band is closed to the right: later queries then have more work."""
        return self.has_right

    @property
    def has_extras(self) -> bool:
        """Whether there are optional tensors, but for what functions captured."""
        lengths = self.has_seqused_k or self.has_seqused_q or self.is_packed
        return lengths or self.has_alibi or self.has_sinks or self.has_bias or self.has_dropout

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are products times scale, and nothing else goes into a probability."""
        return not (self.has_softcap or self.has_alibi or self.is_modified)

    @property
    def has_natural_scores(self) -> bool:
        """Whether a bias or a score function changes scores, which both know in natural units."""
        return self.has_bias or bool(self.mods.score)

    @property
    def has_derivative(self) -> bool:
        """Whether scores are no linear function of products."""
        return self.has_softcap or bool(self.mods.score)

    @property
    def is_modified(self) -> bool:
        """Whether functions, lists or numbers of its own go into each score or probability."""
        return self.mods != NO_MODS or self.has_bias or self.has_dropout


class Extras(NamedTuple):
    """The optional tensors of a call."""

    alibi_slopes: torch.Tensor | None = None  # (nheads,) or (batch, nheads), fp32
    sinks: torch.Tensor | None = None  # (nheads,)
    seqused_k: torch.Tensor | None = None  # (batch,), int32
    seqused_q: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # (batch + 1,), int32: where sequences begin
    cu_seqlens_k: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k or 1)
    dropout_rng: torch.Tensor | None = None  # (2,), int64: seed and offset
    # The arrays of a block mask, then what the mask and what the score function captured
    captured: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All in a row: OPTIONAL of which each may be None, then the captured ones."""
        return (*self[:-1], *self[-1])

    @property
    def arguments(self) -> tuple[torch.Tensor | list[torch.Tensor] | None, ...]:
        """As operators take them: no captured tensors are None, for AOTInductor loses an empty list
        between its executor and the operator.
        """
        return (*self.optional, list(self.captured) or None)

    @property
    def sequences(self) -> int:
        """How many sequences are packed; 0 where they are rows of a batch."""
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def optional(self) -> tuple[torch.Tensor | None, ...]:
        """All but what functions captured."""
        return tuple(self[:-1])


INPUTS = 3  # q, k and v
OPTIONAL = len(Extras._fields) - 1


class Scalars(NamedTuple):
    """The runtime numbers of a call."""

    scale: float
    softcap: float = 0.0  # 0: none
    left: int = OPEN
    right: int = OPEN
    dropout_p: float = 0.0

    @property
    def highest_score(self) -> float:
        """What no score exceeds: the cap, where there is one."""
        return self.softcap or math.inf


NO_EXTRAS = Extras()


def extras_of(tensors: Sequence[torch.Tensor | None]) -> Extras:
    """Extras of `Extras.tensors`."""
    if not tensors:
        return NO_EXTRAS
    captured = tuple([x for x in tensors[OPTIONAL:] if x is not None])
    return Extras(*tensors[:OPTIONAL], captured=captured)


class Call:
    """A call that was checked, and how calls of its signature are launched: its first forward and
    its first backwards say that.
    """

    __slots__ = (
        *("backend", "backwards", "forward", "has_extras", "is_transposed", "needs_grad"),
        *("newest", "out_dtype", "problem", "scalars"),
    )

    def __init__(
        self,
        problem: Problem,
        scalars: Scalars,
        backend: str | None = None,
        needs_grad: bool = False,
    ) -> None:
        self.problem = problem
        self.scalars = scalars
        self.backend = backend  # the name of one to force
        self.needs_grad = needs_grad
        # Of FP8 products
        self.out_dtype = problem.dtype
        self.is_transposed = False  # whether v is V^T
        self.has_extras = problem.has_extras
        self.forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self.backwards: dict[Any, Callable[..., Grads]] = {}  # by `ops.calls.layout_key`
        self.newest: Any = None, None  # of these, on a GPU: its guard, and the entry of that


class Saved(NamedTuple):
    """The inputs of a backward besides the extras: output gradients, and the forward's inputs and
    outputs.
    """

    dout: torch.Tensor
    dlse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Grads(NamedTuple):
    """What a backend's backward returns; the last two are None where they were not requested."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None
    dbias: torch.Tensor | None = None


class Between(NamedTuple):
    """What a caller launches between the kernels of a backward: before the first that reads k and
    v, and once dk and dv are there, which others may follow.
    """

    before_keys: Callable[[], None]
    after_keys: Callable[[Grads], None]


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    scalars: Scalars,
    align: str,
    deterministic: bool,
    mods: Mods = NO_MODS,
    has_bias_grad: bool = False,
    is_long: bool = False,
) -> Problem:
    """The Problem of checked inputs in (batch, seqlen, nheads, headdim) order."""
    return Problem(
        dtype=q.dtype,
        nheads=q.shape[2],
        nheads_k=k.shape[2],
        headdim=q.shape[3],
        headdim_v=v.shape[3],
        align=align,
        has_left=scalars.left >= 0,
        has_right=scalars.right >= 0,
        has_softcap=scalars.softcap > 0,
        has_alibi=extras.alibi_slopes is not None,
        has_sinks=extras.sinks is not None,
        has_seqused_k=extras.seqused_k is not None,
        has_seqused_q=extras.seqused_q is not None,
        is_packed=extras.cu_seqlens_q is not None,
        has_bias=extras.bias is not None,
        has_bias_grad=has_bias_grad,
        has_dropout=scalars.dropout_p > 0,
        mods=mods,
        deterministic=deterministic,
        is_long=is_long,
    )
