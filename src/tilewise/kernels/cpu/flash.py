"""Plain attention by torch's own fused CPU kernel: full or causal, in pieces where it must be.

The kernel behind `F.scaled_dot_product_attention` is causal from the top left corner only, wants
headdim_v = headdim, and gives lse 0 for a row that sees no key. So a band that is open to the left
is cut into rows that see nothing, and for the others two pieces over disjoint keys,

    row i sees j <= i + last:      full, keys j < last;      causal, keys j - last <= i

whose results merge by LSE. The backward of each piece takes the merged out and LSE: with them
P = exp(S - LSE) and delta are those of the whole row.

Why it goes first wherever it serves: tiles of torch operations took 1.4 to 9 times as long forward
and 1.4 to 4 times fp32 forward and backward (B1 H8 D64, S 64 to 4096, full and causal). Why halves
have their backward in fp32: torch's own took 1.7 (bf16) and 12 (fp16) times as long at S 1024, on a
CPU without units for them. Xeon 2.5 GHz, 2 cores, AVX-512, torch 2.13, 2026-11-20, interleaved
medians on a shared machine. With AMX (2026-11-22) forward and backward by torch's own bf16 take 0.6
to 0.76 of our time from S 1024 on, but it rounds dS and P: at 4Ki, causal, dv is 3.6 times as far
off as plain bf16 code's, where ours is 0.02. So ours stays in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...problem import OPEN, Extras, Grads, Problem, Saved, Scalars
from ..common.outputs import empty_out
from . import blockwise
from .dense import Dense
from .softmax import add_gradient, finish_rows, merge

Tensor = torch.Tensor

# Private to torch, so that a release may take them away: then tiles compute everything.
_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_forward = getattr(torch, _NAME, None)
_backward = getattr(getattr(torch.ops.aten, f"{_NAME}_backward", None), "default", None)


# With fewer keys in its first block than fp32 lanes in a vector (16 with AVX-512), torch's kernel
# takes a row of NaN for a masked one and gives out 0, and lse 0 (torch 2.13, November 2026).
VECTOR_LANES = 16


class Piece(NamedTuple):
    """Keys [start, stop) for the rows that see any; `is_causal` from the top left corner."""

    start: int
    stop: int
    is_causal: bool


def serves(dense: Dense) -> bool:
    """Whether torch's kernel computes this, alone or in pieces."""
    return (
        dense.scalars.left < 0
        and dense.has_plain_scores
        and dense.q.numel() > 0
        and dense.k.numel() > 0
        and _forward is not None
        and _backward is not None
    )


def whole_mask(problem: Problem, q: Tensor, k: Tensor, scalars: Scalars) -> bool | None:
    """Whether a call that is one piece and nothing else is causal; None for all other calls. It
    asks as little as will do: a short call costs less than describing it.
    """
    if problem.has_left or problem.has_extras or not problem.has_plain_scores:
        return None
    if problem.headdim != problem.headdim_v or q.numel() == 0 or k.numel() == 0:
        return None
    if _forward is None or _backward is None:
        return None
    if _has_overlap(q):
        return None
    if not problem.has_right:
        return False
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    last = scalars.right + (seqlen_k - seqlen_q if problem.align == "bottom_right" else 0)
    if last >= seqlen_k - 1:  # the last key that row 0 sees
        return False
    return True if last == 0 else None


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of one piece, (batch, nheads, seqlen, ...), of any strides: all with
    contiguous rows, and those of q apart.
    """
    out, lse = _forward(q, k, v, 0.0, is_causal, scale=scale)
    is_short = k.shape[2] < VECTOR_LANES or (is_causal and q.shape[2] < VECTOR_LANES)
    # Of a row of NaN, or it happens to be 0. `count_nonzero` takes half as long as `all`
    if is_short and torch.count_nonzero(lse).item() < lse.numel():
        return _exactly(q, k, v=v, is_causal=is_causal, scale=scale)
    return out, lse


def _has_overlap(q: Tensor) -> bool:
    """Whether rows may overlap: torch's kernel gives `out` the strides of q, or if it cannot, some
    of its own that it then does not look at.
    """
    return min(q.stride()[:3]) < q.shape[3]


def _with_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which torch's kernels need; `F.pad` may move it."""
    return x if x.stride(3) == 1 else x.contiguous()


def _exactly(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float):
    """Attends tile by tile."""
    out, lse = empty_out(q.transpose(1, 2), q.shape[3])
    out = out.transpose(1, 2)
    right = 0 if is_causal else OPEN
    blockwise.forward(Dense(q, k, v, Scalars(scale, right=right)), out, lse=lse)
    return out, lse


def whole(is_causal: bool, scale: float) -> Callable:
    """The forward of one piece: (q, k, v, extras), (batch, seqlen, ...), to `out` and `lse`."""

    def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attend(q, k, v=v, is_causal=is_causal, scale=scale)
        # torch's kernel gives (batch, seqlen, ...) memory, so that this copies lse alone
        return out.transpose(1, 2).contiguous(), lse.contiguous()

    return forward


def backward_whole(saved: Saved, is_causal: bool, scale: float) -> list[Tensor]:
    """dq, dk and dv of one piece, all (batch, seqlen, ...)."""
    dout, _, q, k, v, out, lse = saved
    operands = (_with_rows(x.to(lse.dtype).transpose(1, 2)) for x in (dout, q, k, v, out))
    dout, q, k, v, out = operands
    grads = _backward(dout, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return [grad.transpose(1, 2) for grad in grads]


def cut(dense: Dense) -> tuple[int, list[Piece]]:
    """How many rows at the top see no key, and the pieces that the others see."""
    seqlen_q, seqlen_k = dense.q.shape[2], dense.k.shape[2]
    if dense.scalars.right < 0:
        return 0, [Piece(0, seqlen_k, is_causal=False)]
    last = dense.diagonal + dense.scalars.right  # the last key that row 0 sees
    hidden = max(0, -last)
    full = last + hidden
    causal = Piece(full, min(seqlen_k, full + seqlen_q - hidden), is_causal=True)
    return hidden, [Piece(0, full, is_causal=False), causal] if full else [causal]


def forward(dense: Dense) -> tuple[Tensor, Tensor]:
    """`out` (batch, nheads, seqlen_q, headdim_v) and `lse`, of any strides."""
    hidden, pieces = cut(dense)
    q, k, v = (_with_rows(x) for x in widen(dense))
    if _has_overlap(q):
        q = q.clone(memory_format=torch.contiguous_format)
    rows = q[:, :, hidden:] if hidden else q
    out, lse = _attend(rows, k, v=v, piece=pieces[0], scale=dense.scalars.scale)
    for piece in pieces[1:]:
        out_piece, lse_piece = _attend(rows, k, v=v, piece=piece, scale=dense.scalars.scale)
        out, lse = merge(out, lse, out2=out_piece, lse2=lse_piece)
    if dense.v.shape[3] < out.shape[3]:
        out = out[..., : dense.v.shape[3]]
    return finish_rows(out, lse, extras=dense.extras, hidden=hidden)


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    start, stop, is_causal = piece
    if stop - start < k.shape[2]:
        k, v = k[:, :, start:stop], v[:, :, start:stop]
    return attend(q, k, v=v, is_causal=is_causal, scale=scale)


def widen(dense: Dense) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros to the wider head dim, which change neither scores nor values."""
    padding = dense.v.shape[3] - dense.q.shape[3]
    q, k = (_pad(x, padding) for x in (dense.q, dense.k))
    return q, k, _pad(dense.v, -padding)


def _pad(x: Tensor, padding: int) -> Tensor:
    return F.pad(x, (0, padding)) if padding > 0 else x


def backward(dense: Dense, dout: Tensor, out: Tensor, lse: Tensor, grads: Grads) -> None:
    """Writes dq, dk and dv, and adds to optional gradients. There may be no gradient of lse."""
    hidden, pieces = cut(dense)
    q, k, v = (_with_rows(x.to(lse.dtype)) for x in widen(dense))
    dout, out = (_with_rows(_pad(x.to(lse.dtype), q.shape[3] - x.shape[3])) for x in (dout, out))
    if hidden:
        dout, q, out, lse = (x[:, :, hidden:] for x in (dout, q, out, lse))
    add_gradient(grads, dense.extras, dout=dout, out=out, lse=lse)
    dq_sum = None
    for start, stop, is_causal in pieces:
        keys, values = k[:, :, start:stop], v[:, :, start:stop]
        dq, dk, dv = _backward(
            dout, q, keys, values, out, lse, 0.0, is_causal, scale=dense.scalars.scale
        )
        dq_sum = dq if dq_sum is None else dq_sum + dq
        for grad, part in ((grads.dk, dk), (grads.dv, dv)):
            grad[:, :, start:stop].copy_(part[..., : grad.shape[3]])
    grads.dq[:, :, :hidden].zero_()
    grads.dq[:, :, hidden:].copy_(dq_sum[..., : grads.dq.shape[3]])
    for grad in (grads.dk, grads.dv):
        grad[:, :, pieces[-1].stop :].zero_()
