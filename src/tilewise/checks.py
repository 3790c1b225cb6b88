"""The door: arguments as users write them become (Problem, Extras, Scalars), or an ArgumentError
that names the culprit.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import torch

from .dropout import check_dropout
from .errors import ArgumentError
from .modifiers import take_apart
from .problem import NO_MODS, OPTIONAL, Extras, Mods, Problem, Scalars, describe
from .scalars import check_scale, check_softcap

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checked(NamedTuple):
    """A call that has passed the door."""

    problem: Problem
    extras: Extras
    scalars: Scalars


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    scale: float | None,
    softcap: float | None,
    align: str,
    window: tuple[int, int],
    deterministic: bool,
    dropout_p: float = 0,
    mods: Mods = NO_MODS,
    is_long: bool = False,
) -> Checked:
    """Checks tensors in (batch, seqlen, nheads, headdim) order."""
    check_tensors(q, k, v)
    check_extras(q, k, extras)
    check_dropout(dropout_p)
    if deterministic:
        check_order(take_apart(mods, extras.captured).score)
    numbers = check_scale(scale, q.shape[3]), check_softcap(softcap), *window, float(dropout_p)
    scalars = Scalars(*numbers)
    has_bias_grad = extras.bias is not None and extras.bias.requires_grad
    flags = align, deterministic, mods, has_bias_grad, is_long
    problem = describe(q, k, v, extras, scalars, *flags)
    return Checked(problem, extras, scalars)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtype, device, heads, head dims and last stride of q, k and v of rank 4, in (batch, seqlen,
    nheads, headdim) order.
    """
    if _fits(q, k, v):
        return
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ArgumentError(
                f"{name}.dtype is {x.dtype} and q.dtype is {q.dtype}: cast them to one dtype"
            )
        if x.device != q.device:
            raise ArgumentError(
                f"{name} is on {x.device} and q is on {q.device}: move them to one device"
            )
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(
                f"{name} has batch {x.shape[0]} and q has batch {q.shape[0]} ({_shapes(q, k, v)}): "
                "they must be equal"
            )
    if q.dtype not in DTYPES:
        raise ArgumentError(
            f"q.dtype is {q.dtype}: it must be float16, bfloat16, float32 or (on the CPU) float64, "
            "so cast q, k and v"
        )
    if k.shape[1] != v.shape[1]:
        raise ArgumentError(
            f"k has seqlen {k.shape[1]} and v has seqlen {v.shape[1]} ({_shapes(q, k, v)}): they "
            "must be equal"
        )
    if k.shape[2] != v.shape[2]:
        raise ArgumentError(
            f"k has {k.shape[2]} heads and v has {v.shape[2]} ({_shapes(q, k, v)}): they must be "
            "equal"
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(
            f"q has headdim {q.shape[3]} and k has headdim {k.shape[3]} ({_shapes(q, k, v)}): they "
            "must be equal"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] or q.shape[2] == 0:
        raise ArgumentError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: the heads of q must be a multiple "
            "of those of k (GQA)"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[3] == 0:
            raise ArgumentError(
                f"{name} has headdim 0 ({_shapes(q, k, v)}): headdim must be at least 1"
            )
        if x.stride(3) != 1 and x.shape[3] != 1:
            raise ArgumentError(
                f"{name} has stride {x.stride(3)} in its last dimension: it must be contiguous, so "
                f"call {name}.contiguous()"
            )


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What `check_tensors` asks, in one go: one by one it costs a short call 5 us more."""
    batch, _, nheads, headdim = q.shape
    batch_k, seqlen_k, nheads_k, headdim_k = k.shape
    batch_v, seqlen_v, nheads_v, headdim_v = v.shape
    return (
        k.dtype == v.dtype == q.dtype in DTYPES
        and k.device == v.device == q.device
        and batch == batch_k == batch_v
        and seqlen_k == seqlen_v
        and nheads_k == nheads_v != 0 != nheads
        and nheads % nheads_k == 0
        and headdim == headdim_k != 0 != headdim_v
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


def in_order(
    q: Tensor, k: Tensor, v: Tensor, layout: str, is_packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (batch, seqlen, nheads, headdim); packed ones, which come as (total, nheads,
    headdim), as a batch of 1.
    """
    if is_packed:
        if layout != "bshd":
            raise ArgumentError(
                f"layout={layout!r}: packed sequences are (total, nheads, headdim), so leave it out"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dim() != 3:
                shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ArgumentError(
                    f"{name} has shape {shape}: with cu_seqlens it must be packed, (total, nheads, "
                    "headdim)"
                )
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    check_rank(q, k, v)
    return tuple(x.transpose(1, 2) for x in (q, k, v)) if layout == "bhsd" else (q, k, v)


def sizes_of(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """batch, nheads, seqlen_q and seqlen_k of ordered tensors; lengths are 0 where they are packed,
    as only the device knows them.
    """
    if cu_seqlens is None:
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    batch = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() else 0
    return batch, q.shape[2], 0, 0


def check_rank(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v are tensors of rank 4 (asked before anything is transposed)."""
    is_plain = type(q) is type(k) is type(v) is torch.Tensor
    if is_plain and q.ndim == k.ndim == v.ndim == 4 and not (q.is_nested or k.is_nested):
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__name__}: it must be a torch.Tensor")
        if x.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor: pass its sequences end to end, (total, nheads, "
                "headdim), as values() of a jagged one has them, and where they begin as cu_seqlens"
            )
        if x.dim() != 4:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: it must have 4 dimensions, batch, seqlen, "
                "nheads and headdim in the order of `layout`"
            )


def check_extras(q: Tensor, k: Tensor, extras: Extras) -> None:
    """Shapes, dtypes and devices of the optional tensors."""
    nheads = q.shape[2]
    slopes, sinks = extras.alibi_slopes, extras.sinks
    for name, x in zip(Extras._fields[:OPTIONAL], extras):
        if x is not None and not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__name__}: it must be a torch.Tensor or None"
            )
    batch = check_packing(q, k, extras)
    if slopes is not None:
        _check_extra("alibi_slopes", slopes, q, [(nheads,), (batch, nheads)], (torch.float32,))
        if slopes.requires_grad:
            raise NotImplementedError(
                "alibi_slopes.requires_grad: alibi_slopes have no gradient; pass "
                "score_mod=tilewise.scores.alibi(slopes), which learns them, or detach() them"
            )
    if sinks is not None:
        _check_extra("sinks", sinks, q, [(nheads,)], DTYPES)
    if extras.bias is not None:
        check_bias(q, k, extras)
    if extras.dropout_rng is not None:
        _check_extra("dropout_rng", extras.dropout_rng, q, [(2,)], (torch.int64,))
    for x in extras.captured:
        if x.device != q.device:
            raise ArgumentError(
                f"a mask or score function has a tensor on {x.device} and q is on {q.device}: "
                "move them to one device (Mask.to, BlockMask.to)"
            )
    for name in ("seqused_q", "seqused_k"):
        if (used := getattr(extras, name)) is not None:
            _check_extra(name, used, q, [(batch,)], (torch.int32,))
            if knows_values(used):
                starts = getattr(extras, name.replace("seqused", "cu_seqlens"))
                room = torch.full_like(used, k.shape[1]) if starts is None else starts.diff()
                if bool(((used < 0) | (used > room)).any()):
                    raise ArgumentError(
                        f"{name}={used.tolist()}: it must be at least 0 and at most what the "
                        f"sequences have room for, {room.tolist()}"
                    )


def check_order(captured: tuple[Tensor, ...]) -> None:
    """Nothing that a score function captured wants a gradient, which has no fixed order."""
    for x in captured:
        if x.requires_grad and torch.is_grad_enabled() and x.device.type != "cpu":
            raise NotImplementedError(
                "deterministic=True, and a score function captured a tensor of shape "
                f"{tuple(x.shape)} that requires a gradient: that is added in any order, so pass "
                "the tensor as bias, whose gradient is deterministic, or detach() it"
            )


def check_bias(q: Tensor, k: Tensor, extras: Extras) -> None:
    """A bias that broadcasts over the scores of sequences that are rows of a batch."""
    bias = extras.bias
    scores = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if extras.cu_seqlens_q is not None:
        raise ArgumentError(
            "bias is for sequences in a batch, and these are packed: pass a score_mod that reads "
            "its tensor by position"
        )
    if bias.dim() != 4 or any(n not in (1, m) for n, m in zip(bias.shape, scores)):
        raise ArgumentError(
            f"bias has shape {tuple(bias.shape)}: it must broadcast over the scores, (batch, "
            f"nheads, seqlen_q, seqlen_k) = {scores}, with each dimension its own or 1"
        )
    _check_extra("bias", bias, q, [tuple(bias.shape)], (q.dtype, torch.float32))


def check_packing(q: Tensor, k: Tensor, extras: Extras) -> int:
    """cu_seqlens of packed q and k, which come as a batch of 1; the number of sequences."""
    cu_q, cu_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if cu_q is None and cu_k is None:
        if extras.seqused_q is not None:
            raise ArgumentError("seqused_q is for packed sequences: pass cu_seqlens_q, too")
        return q.shape[0]
    if cu_q is None or cu_k is None:
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ArgumentError(f"{missing} is missing: packed sequences need both")
    for name, x, total in (("cu_seqlens_q", cu_q, q.shape[1]), ("cu_seqlens_k", cu_k, k.shape[1])):
        if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_q.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: cu_seqlens_q and cu_seqlens_k must both be "
                "(batch + 1,)"
            )
        _check_extra(name, x, q, [tuple(x.shape)], (torch.int32,))
        if knows_values(x):
            _check_starts(name, x, total)
    return cu_q.shape[0] - 1


def _check_starts(name: str, starts: Tensor, total: int) -> None:
    found = starts.tolist()
    if found[0] != 0 or found[-1] != total or any(a > b for a, b in itertools.pairwise(found)):
        raise ArgumentError(
            f"{name}={found}: it must begin with 0, never decrease, and end with the number of "
            f"packed rows, {total}"
        )


def has_values(extras: Extras) -> bool:
    """Whether lengths are among the tensors whose values the checks look at."""
    lengths = extras.seqused_k, extras.seqused_q, extras.cu_seqlens_q, extras.cu_seqlens_k
    return any(x is not None and knows_values(x) for x in lengths)


def knows_values(x: Tensor) -> bool:
    """Whether a tensor's values may be looked at: on the CPU, and on a GPU, where that waits for
    it, if TILEWISE_CHECK=1 asks. Never while traced.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    return x.device.type == "cpu" or os.environ.get("TILEWISE_CHECK") == "1"


def _check_extra(
    name: str, x: Tensor, q: Tensor, shapes: list[tuple], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(x.shape) not in shapes:
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)}: with q of {q.shape[2]} heads and batch "
            f"{q.shape[0]} it must be {_either(shapes)}"
        )
    if x.dtype not in dtypes:
        raise ArgumentError(
            f"{name}.dtype is {x.dtype}: it must be "
            f"{_either([str(d).removeprefix('torch.') for d in dtypes])}"
        )
    if x.device != q.device:
        raise ArgumentError(
            f"{name} is on {x.device} and q is on {q.device}: move them to one device"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    return f"(batch, seqlen, nheads, headdim): {shapes}"


def _either(choices: list) -> str:
    return " or ".join(map(str, choices))
