"""Argument validation: returns a `Call`, or raises an ArgumentError that names
the argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from ..errors import OURS, ArgumentError, Words, a_type
from ..features import FEATURES
from ..mods.flat import captured_by_score
from ..problem import NO_MODS, OPTIONAL, Call, Extras, Mods, Scalars, describe
from ..switches import is_on
from ..tile.dropout_numbers import check_dropout
from .qkv import check_device, check_kind, check_tensors
from .scalars import check_numbers

Tensor = torch.Tensor


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    numbers: tuple[float | None, float | None],
    align: str,
    window: tuple[int, int],
    deterministic: bool,
    dropout_p: float = 0,
    mods: Mods = NO_MODS,
    is_long: bool = False,
    words: Words = OURS,
) -> Call:
    """The call of tensors in (batch, seqlen, nheads, headdim) order, but for values of lengths."""
    (left, right), (scale, softcap) = window, numbers
    check_tensors(q, k, v=v, words=words)
    check_extras(q, k, extras=extras, words=words)
    check_dropout(dropout_p)
    if deterministic and mods.score:
        check_order(captured_by_score(mods, extras.captured))
    scale, softcap = check_numbers(scale, softcap, headdim=q.shape[3], dtype=q.dtype, words=words)
    scalars = Scalars(scale, softcap, left=left, right=right, dropout_p=float(dropout_p))
    flags: Any = dict(align=align, deterministic=deterministic, mods=mods, is_long=is_long)
    flags["has_bias_grad"] = extras.bias is not None and extras.bias.requires_grad
    return Call(describe(q, k, v, extras=extras, scalars=scalars, **flags), scalars)


def check_extras(q: Tensor, k: Tensor, extras: Extras, words: Words = OURS) -> None:
    """Shapes, dtypes and devices of the optional tensors."""
    for name, x in zip(Extras._fields[:OPTIONAL], extras):
        if x is not None and not isinstance(x, torch.Tensor):
            name = words._asdict().get(name, name)
            raise ArgumentError(f"{name} is {a_type(x)}: it must be a torch.Tensor or None")
    batch = check_packing(q, k, extras=extras, words=words)
    for name in ("alibi_slopes", "sinks", "dropout_rng", "seqused_q", "seqused_k"):
        check_optional(name, getattr(extras, name), q, batch, title=words._asdict().get(name, name))
    if extras.alibi_slopes is not None and extras.alibi_slopes.requires_grad:
        raise NotImplementedError(
            "alibi_slopes.requires_grad: alibi_slopes have no gradient; pass "
            "score_mod=tilewise.scores.alibi(slopes), which learns them, or detach() them"
        )
    if extras.bias is not None:
        check_bias(q, k, bias=extras.bias, is_packed=extras.cu_seqlens_q is not None, words=words)
    for x in extras.captured:
        check_device(words.captured, x, of=words.q, q=q, remark=" (Mask.to, BlockMask.to)", verb="")


def check_values(q: Tensor, k: Tensor, extras: Extras, words: Words = OURS) -> None:
    """Lengths of checked shapes, where values may be read."""
    starts = ("cu_seqlens_q", extras.cu_seqlens_q, q), ("cu_seqlens_k", extras.cu_seqlens_k, k)
    for name, x, rows in starts:
        if x is not None and knows_values(x):
            check_starts(name, x, rows.shape[1], words=words, nheads=rows.shape[2])
    for name in ("seqused_q", "seqused_k"):
        used = getattr(extras, name)
        if used is not None and knows_values(used):
            starts = getattr(extras, name.replace("seqused", "cu_seqlens"))
            room = torch.full_like(used, k.shape[1]) if starts is None else starts.diff()
            if bool(((used < 0) | (used > room)).any()):
                raise ArgumentError(
                    f"{name}={used.tolist()}: it must be at least 0 and at most the number of "
                    f"rows per sequence, {room.tolist()}"
                )


def check_order(captured: tuple[Tensor, ...]) -> None:
    """Refuses captured tensors that require a gradient, which is summed in no fixed order."""
    for x in captured:
        if x.requires_grad and torch.is_grad_enabled() and x.device.type != "cpu":
            raise NotImplementedError(
                "deterministic=True, and a score function captured a tensor of shape "
                f"{tuple(x.shape)} that requires a gradient: that gradient is summed in no fixed "
                "order, so pass the tensor as bias, whose gradient is deterministic, or detach() "
                "it"
            )


def check_bias(
    q: Tensor, k: Tensor, bias: Tensor, is_packed: bool = False, words: Words = OURS
) -> None:
    """A bias that broadcasts over the scores of sequences that are rows of a batch."""
    scores = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if is_packed:
        raise ArgumentError(
            "bias does not support packed sequences: pass a score_mod that indexes the tensor by "
            "position"
        )
    if bias.dtype == torch.bool:
        indices = ("b", "h", "q_idx", "kv_idx")[max(0, 4 - bias.dim()) :]
        indices = ("0" if n == 1 else index for n, index in zip(bias.shape, indices))
        raise ArgumentError(
            f"{words.bias}.dtype is torch.bool: a bias is added to the scores, so pass the bools "
            f"as a mask, mask_mod=lambda b, h, q_idx, kv_idx: bias[{', '.join(indices)}]"
        )
    if bias.dim() != 4 or any(n not in (1, m) for n, m in zip(bias.shape, scores)):
        raise ArgumentError(
            f"{words.bias} has shape {tuple(bias.shape)}: it must have 4 dimensions, (batch, "
            f"nheads, seqlen_q, seqlen_k) = {scores}, each of this size or 1"
            f"{_expanded(bias, scores)}"
        )
    if bias.dtype not in (q.dtype, torch.float32):
        dtypes = _either([str(x).removeprefix("torch.") for x in (q.dtype, torch.float32)])
        raise ArgumentError(
            f"{words.bias}.dtype is {bias.dtype}: it must be {words.bias_is_also}{dtypes}"
        )
    check_device(words.bias, bias, of=words.q, q=q)


def _expanded(bias: Tensor, scores: tuple[int, ...]) -> str:
    """How a bias of fewer dimensions gets 4."""
    missing = 4 - bias.dim()
    ways = {", ".join(["None"] * missing): (1,) * missing + bias.shape} if missing > 0 else {}
    if missing == 1:
        ways[":, None"] = (bias.shape[0], 1, *bias.shape[1:])
    fitting = [way for way, x in ways.items() if all(n in (1, m) for n, m in zip(x, scores))]
    return f": pass bias[{fitting[0]}]" if fitting else ""


def check_packing(q: Tensor, k: Tensor, extras: Extras, words: Words = OURS) -> int:
    """cu_seqlens of packed q and k, which come as a batch of 1; the number of sequences."""
    cu_q, cu_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if cu_q is None and cu_k is None:
        if extras.seqused_q is not None:
            raise ArgumentError("seqused_q is for packed sequences: pass cu_seqlens_q, too")
        return q.shape[0]
    if cu_q is None or cu_k is None:
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ArgumentError(f"{missing} is missing: packed sequences need both")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_q.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: cu_seqlens_q and cu_seqlens_k must both be "
                "(batch + 1,)"
            )
        check_kind(name, x, q=q, dtypes=FEATURES[name].dtypes)
    return cu_q.shape[0] - 1


def check_starts(
    name: str, starts: Tensor, total: int, rows: str = "rows", words: Words = OURS, nheads: int = -1
) -> None:
    """Where packed sequences begin; there may be more rows behind the last. With `nheads` rows the
    dimensions may have another order.
    """
    values = starts.tolist()
    if values[0] != 0 or values[-1] > total or any(a > b for a, b in itertools.pairwise(values)):
        raise ArgumentError(
            f"{name}={values}: it must begin with 0, never decrease, and end with at most the "
            f"number of packed {rows}, {total}{f'; {words.order}' if values[-1] == nheads else ''}"
        )


def knows_values(x: Tensor) -> bool:
    """Whether the checks may read a tensor's values: on the CPU, and on a GPU with
    TILEWISE_CHECK=1, as it synchronizes. Never while traced.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or peek_interpreter_stack():
        return False
    return x.device.type == "cpu" or is_on("TILEWISE_CHECK")


# Kernels subtract the maximum from scaled scores in one multiply-add, which leaves the rounding of
# the scaled maximum as an exponent: half of its last bit, 8 at 2^28, where P may leave fp16, and
# 128 at 2^32, where it leaves fp32
LARGEST_SCORE = 2.0**27


def check_scores(
    q: Tensor, k: Tensor, scale: float, softcap: float = 0.0, words: Words = OURS
) -> None:
    """The norms of q and k, or a softcap, allow no score past LARGEST_SCORE: on a GPU it would give
    NaN. It synchronizes with the device, so it runs only with TILEWISE_CHECK=1.
    """
    if q.numel() == 0 or k.numel() == 0 or 0 < softcap <= LARGEST_SCORE:
        return
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).amax().item() for x in (q, k)]
    if scale * norms[0] * norms[1] > LARGEST_SCORE:
        raise ArgumentError(
            f"rows of {words.q} have norms up to {norms[0]:.3g}, rows of {words.k} up to "
            f"{norms[1]:.3g}, and {words.scale} is {scale:.3g}: scores may reach "
            f"{scale * norms[0] * norms[1]:.3g}, and scores above 2^27 may give NaN on a GPU; "
            f"scale {words.q} down"
        )


def check_optional(
    name: str, x: Tensor | None, q: Tensor, batch: int, count: str = "", title: str = ""
) -> None:
    """Shape, dtype and device of an optional tensor; `count` says how many sequences there are, and
    `title` is the caller's name of the argument.
    """
    if x is None:
        return
    feature, title = FEATURES[name], title or name
    sizes = {"nheads": q.shape[-2], "batch": batch, "2": 2}
    shapes = [tuple([sizes[size] for size in shape]) for shape in feature.shapes]
    if tuple(x.shape) not in shapes:
        raise ArgumentError(
            f"{title} has shape {tuple(x.shape)}: with q of {q.shape[-2]} heads and "
            f"{count or f'batch {q.shape[0]}'} it must be {_either(shapes)}"
        )
    check_kind(title, x, q=q, dtypes=feature.dtypes)


def _either(choices: Sequence) -> str:
    return " or ".join(dict.fromkeys(map(str, choices)))
