"""How many FLOPs a call does, for torch's FlopCounterMode: matmuls over the pairs a mask keeps."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch, flop_counter

from ..features import OPERATORS
from .schema import CALL_NAMES


def pairs_of(q, k, call: tuple) -> int:
    """The pairs of an operator's q and k, given as shapes; `call` is what comes after the tensors
    that are not optional.
    """
    options = dict(zip(CALL_NAMES, call))
    left, right = options["left"], options["right"]
    return visible_pairs(q[1], k[1], left=left, right=right, align=options["align"])


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int, align: str) -> int:
    """How many (query, key) pairs a band mask keeps: the unit of work of attention."""
    if left < 0 and right < 0:
        return seqlen_q * seqlen_k
    diagonal = seqlen_k - seqlen_q if align == "bottom_right" else 0
    q_idx = torch.arange(seqlen_q)
    first, stop = torch.zeros_like(q_idx), torch.full_like(q_idx, seqlen_k)
    if left >= 0:
        first = (q_idx + diagonal - left).clamp(0, seqlen_k)
    if right >= 0:
        stop = (q_idx + diagonal + right + 1).clamp(0, seqlen_k)
    return int((stop - first).clamp(min=0).sum())


def forward_flops(q, k, v, *call, out_shape=None, **kwargs) -> int:
    """2 matmuls of 2 FLOPs a pair and column; tensors are given as shapes.

    What seqused_k and a mask hide is not known here, and counts. Nor are the lengths of packed
    sequences: they count as one long one.
    """
    pairs = pairs_of(q, k, call)
    return 2 * q[0] * q[2] * pairs * (q[3] + v[3])


def fp8_flops(q, k, v, *call, out_shape=None, **kwargs) -> int:
    """FLOPs of FP8 products; v is V^T, (batch, nheads_k, headdim_v, columns), or as it came."""
    options = dict(zip(OPERATORS["flash_attn_fp8_forward"], (q, k, v, *call)))
    left, right = options["left"], options["right"]
    pairs = visible_pairs(q[1], k[1], left=left, right=right, align=options["align"])
    return 2 * q[0] * q[2] * pairs * (q[3] + v[2 if options["is_transposed"] else 3])


def backward_flops(dout, dlse, q, k, v, out, lse, *call, out_shape=None, **kwargs) -> int:
    """5 matmuls: S, dQ and dK over headdim, dP and dV over headdim_v."""
    pairs = pairs_of(q, k, call)
    return 2 * q[0] * q[2] * pairs * (3 * q[3] + 2 * v[3])


def captured_flops(dout, dlse, q, k, v, out, lse, *call, out_shape=None, **kwargs) -> int:
    """2 matmuls, S and dP, in each of two walks over the keys: one sums delta, one the gradient."""
    pairs = pairs_of(q, k, call)
    return 2 * q[0] * q[2] * pairs * 2 * (q[3] + v[3])


def register(ops) -> None:
    """Tells torch, and counters that run already: each took its own copy of the table.

    `ops` is torch.ops.tilewise.
    """
    formulas = {
        ops.flash_attn_forward: forward_flops,
        ops.flash_attn_fp8_forward: fp8_flops,
        ops.flash_attn_backward: backward_flops,
        ops.flash_attn_captured_grads: captured_flops,
    }
    for op, formula in formulas.items():
        flop_counter.register_flop_formula(op)(formula)
        for mode in _python_dispatch._get_current_dispatch_mode_stack():
            table = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if table is not None:
                table.setdefault(op, flop_counter.flop_registry[op])
