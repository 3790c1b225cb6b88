"""query, key and value whose leading dimensions broadcast, as torch's `matmul` has them, become a
batch of heads; what a kernel cannot read in place is copied, and said.

    (..., nheads, seqlen, headdim)  ->  (batch, nheads, seqlen, headdim)
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..errors import ArgumentError, Words, warn_slow
from ..features import FLOATS
from ..mods.compilers import holds, share_batch
from .checks import check_tensor, fits, with_contiguous_rows

Tensor = torch.Tensor
Shape = tuple[int, ...]


class Batched(NamedTuple):
    """query, key and value of rank 4, with the shapes that they stand for."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Shape  # (..., seqlen_q, seqlen_k): what a mask broadcasts over
    out: Shape  # (..., seqlen_q, headdim_v)


def batched(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, words: Words) -> Batched:
    """The three as a batch of heads. With `enable_gqa` query heads share key heads; without it the
    heads broadcast like any dimension before the last two.
    """
    share_batch(query, key, value)
    if _is_batched(query, key, value=value, enable_gqa=enable_gqa):
        batch, nheads, seqlen_q, _ = query.shape
        _, _, seqlen_k, headdim_v = value.shape
        scores, out = (batch, nheads, seqlen_q, seqlen_k), (batch, nheads, seqlen_q, headdim_v)
        return Batched(query, key, value=value, scores=scores, out=out)
    tensors = query, key, value
    for name, x in zip(words[:3], tensors):
        check_tensor(name, x)
    shapes = [tuple(x.shape) for x in tensors]
    _check_shapes(shapes, enable_gqa, words=words)
    before = [shape[:-2] for shape in shapes]
    if enable_gqa:  # key heads count as those that they serve
        before[1:] = [(*dims[:-1], before[0][-1]) for dims in before[1:]]
    score_dims = _broadcast(before[0], before[1])
    out_dims = None if score_dims is None else _broadcast(score_dims, before[2])
    if score_dims is None or out_dims is None:
        raise ArgumentError(
            f"the dimensions of {_said(shapes, words)} before the last two do not broadcast: make "
            "them equal, or 1"
        )
    heads = _heads(shapes, out_dims)
    x = [_readable(x, name) for x, name in zip(tensors, words[:3])]
    x = [_placed(x, out_dims[:-1], nheads=n, name=name) for x, n, name in zip(x, heads, words[:3])]
    if heads[0] == 0:  # heads of nothing are a batch of nothing
        x = [part.flatten(0, 1).unsqueeze(1) for part in x]
    scores = *score_dims, shapes[0][-2], shapes[1][-2]
    return Batched(x[0], x[1], x[2], scores=scores, out=(*out_dims, shapes[0][-2], shapes[2][-1]))


def over_scores(mask: Tensor, out: Shape, name: str) -> Tensor:
    """A mask that broadcasts over the scores behind this result, as one of rank 4."""
    x = mask[(None,) * (max(len(out), 4) - mask.dim())]
    batch, count = out[:-3], max(len(out) - 3, 1)
    if out[-3:-2] == (0,):  # heads of nothing are a batch of nothing
        return x.expand((*x.shape[:count], 0, *x.shape[-2:])).flatten(0, count).unsqueeze(1)
    if any(holds(n != 1, True) for n in x.shape[:count]):
        x = x.expand((*(batch or (1,)), *x.shape[count:]))
    return _merged(x, count, name=name)


def with_positive_scale(
    query: Tensor, scale: float | None, words: Words
) -> tuple[Tensor, float | None]:
    """A query and a scale above 0 that give the scores of a scale below 0, or of 0."""
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        return query, scale
    if not -math.inf < scale <= 0:
        return query, scale
    warn_slow(f"{words.scale}={scale} is not positive, so every call copies {words.q}")
    return (-query, -scale) if scale else (query * 0, 1.0)


def _is_batched(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether they are a batch of heads as they are: asked first, and in one go, of every call."""
    if not type(query) is type(key) is type(value) is Tensor:
        return False
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return False
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return fits(q, k, v=v, kinds=FLOATS)


def _readable(x: Tensor, name: str) -> Tensor:
    """The tensor with a last dimension that is contiguous, and not empty."""
    if x.shape[-1] == 0:
        return torch.nn.functional.pad(x, (0, 1))
    return with_contiguous_rows([(name, x)])[0]


def _check_shapes(shapes: list[Shape], enable_gqa: bool, words: Words) -> None:
    """Ranks, lengths, head dims, and heads that are shared."""
    (q, k, v), q_name, k_name, v_name = shapes, *words[:3]
    least, dims = (3, "(..., nheads, ") if enable_gqa else (2, "(..., ")
    for name, shape in zip(words[:3], shapes):
        if len(shape) < least:
            also = " with enable_gqa=True" if enable_gqa else ""
            raise ArgumentError(
                f"{name} has shape {shape}: it must have at least {least} dimensions{also}, "
                f"{dims}seqlen, headdim)"
            )
    wrong = ""
    if k[-2] != v[-2]:
        wrong = f"{k_name} has seqlen {k[-2]} and {v_name} has seqlen {v[-2]}: they must be equal"
    elif q[-1] != k[-1]:
        wrong = f"{q_name} has headdim {q[-1]} and {k_name} has headdim {k[-1]}: they must be equal"
    elif enable_gqa:
        for name, shape in ((v_name, v), (k_name, k)):
            if q[-3] % shape[-3] if shape[-3] else q[-3]:
                wrong = (
                    f"{q_name} has {q[-3]} heads and {name} has {shape[-3]}: the heads of {q_name} "
                    f"must be a multiple of those of {name} (GQA)"
                )
    elif len(q) > 2 and len(k) > 2 and q[-3] != k[-3] and 1 not in (q[-3], k[-3]):
        wrong = (
            f"{q_name} has {q[-3]} heads and {k_name} has {k[-3]}: pass enable_gqa=True to share "
            "key heads"
        )
    if wrong:
        fault, remedy = wrong.split(": ")
        raise ArgumentError(f"{fault} ({_said(shapes, words)}): {remedy}")


def _said(shapes: list[Shape], words: Words) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in zip(words[:3], shapes))


def _broadcast(x: Shape, y: Shape) -> Shape | None:
    """The shape that two broadcast to, or None."""
    rank = max(len(x), len(y))
    x, y = ((1,) * (rank - len(dims)) + dims for dims in (x, y))
    if any(n != m and n != 1 and m != 1 for n, m in zip(x, y)):
        return None
    return tuple(m if holds(n == 1, False) else n for n, m in zip(x, y))


def _heads(shapes: list[Shape], out_dims: Shape) -> tuple[int, int, int]:
    """How many heads query, key and value are given: those of the result, but fewer key heads,
    where key and value have as many, are shared in place.
    """
    nheads = out_dims[-1] if out_dims else 1
    nheads_k, nheads_v = (shape[-3] if len(shape) > 2 else 1 for shape in shapes[1:])
    shared = nheads_k if nheads_k == nheads_v and nheads else nheads
    return nheads, shared, shared


def _placed(x: Tensor, batch: Shape, nheads: int, name: str) -> Tensor:
    """One of the three as (batch, nheads, seqlen, headdim)."""
    x = x.unsqueeze(0) if x.dim() == 2 else x
    if x.shape[-3] not in (1, nheads):
        warn_slow(
            f"{name} has {x.shape[-3]} heads, and key and value differ in their numbers of heads, "
            f"so every call repeats it to {nheads}: give key and value the same number of heads"
        )
        x = x.repeat_interleave(nheads // x.shape[-3], -3)
    shape = (*batch, nheads, *x.shape[-2:])
    x = x if tuple(x.shape) == shape else x.expand(shape)
    return x.unsqueeze(0) if not batch else _merged(x, len(batch), name=name)


def _merged(x: Tensor, count: int, name: str) -> Tensor:
    """The first `count` dimensions as one."""
    if count == 1:
        return x
    dims = [(n, stride) for n, stride in zip(x.shape[:count], x.stride()) if n != 1]
    is_view = all(stride == size * inner for (_, stride), (size, inner) in itertools.pairwise(dims))
    if not is_view and x.numel():
        warn_slow(
            f"{name} has {count} batch dimensions that no view joins into one, so every call "
            "copies it: pass a contiguous tensor of the full shape"
        )
    return x.flatten(0, count - 1)
