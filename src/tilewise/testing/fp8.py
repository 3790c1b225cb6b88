"""Attention with FP8 products block by block in plain torch: the arithmetic of the kernels, for
tests of the error contract on any device.

    S  = scale * q_scale * k_scale * Q K^T                  exact products of 8 bits, sums in fp32
    P  = e4m3(exp(S - m) * 2^8)                             of 448, the largest number, 256 is used
    O  = alpha O + P V, l = alpha l + rowsum P              a block's P V alone, then added in fp32
    out = v_scale O / l

Blocks of 128 keys go from the last to the first: an attention sink at key 0 comes last then, and
what is small beside it has been added up with full precision before. With `accumulator_bits` a
product is summed as the tensor cores of Hopper do, in steps of 32 keys, each term cut to so many
bits below the largest; with `two_level=False` O is such an accumulator.

FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), section 3.3; DeepSeek-V3 (2024, arXiv
2412.19437), section 3.3.2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch

from ..kernels.common.quantized import FP8, Lengths, Quantized
from ..kernels.cpu.quantize import dequantize, natural_values

Tensor = torch.Tensor
P_SCALE = 2.0**8
STEP = 32  # keys of one tensor core instruction
HOPPER_BITS = 13  # of the fraction that an accumulator of Hopper keeps in 8-bit products


class Arithmetic(NamedTuple):
    """How kernels may compute it."""

    block: int = 128
    downwards: bool = True
    two_level: bool = True
    accumulator_bits: int | None = None  # None: fp32


def attention(
    x: Quantized,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    by: Arithmetic | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` (batch, seqlen_q, nheads, headdim_v) and `lse` in fp32, of a batch; bottom-right
    causal, and `lse` of k without its mean.
    """
    by = Arithmetic() if by is None else by
    group, seqlen_q, seqlen_k = x.q.shape[2] // x.k.shape[2], x.q.shape[1], x.k.shape[1]
    q, k, v = (t.float().transpose(1, 2) for t in (x.q, x.k, natural_values(x.v_t, seqlen_k, None)))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q_scale, k_scale, v_scale = (s.repeat_interleave(group, 1)[..., None, None] for s in x.scales)
    unit = q_scale * k_scale * (x.q.shape[3] ** -0.5 if scale is None else scale)
    m_i = q.new_full((*q.shape[:3], 1), -math.inf)
    l_i, acc_o = torch.zeros_like(m_i), q.new_zeros((*q.shape[:3], v.shape[3]))
    if sinks is not None:
        m_i = sinks.float()[:, None, None].expand_as(m_i).clone()
        l_i = torch.full_like(m_i, P_SCALE)
    of_keys = torch.zeros_like(l_i)  # the part of l that is not the sink's
    starts = list(range(0, seqlen_k, by.block))
    last = torch.arange(seqlen_q, device=q.device).unsqueeze(1) + seqlen_k - seqlen_q
    for start in reversed(starts) if by.downwards else starts:
        keys = slice(start, min(start + by.block, seqlen_k))
        s = unit * (q @ k[:, :, keys].mT)
        if causal:
            k_idx = torch.arange(keys.start, keys.stop, device=q.device)
            s = s.masked_fill(k_idx > last, -math.inf)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -math.inf, 0)
        p = torch.exp(s - shift) * P_SCALE
        alpha = torch.exp(m_i - shift)
        total = p.sum(-1, keepdim=True)
        l_i, of_keys, m_i = alpha * l_i + total, alpha * of_keys + total, m_new
        p, of_block = p.to(FP8).float(), torch.zeros_like(acc_o)
        if by.two_level:
            acc_o = acc_o * alpha + accumulated(of_block, p, v[:, :, keys], by.accumulator_bits)
        else:
            acc_o = accumulated(acc_o * alpha, p, v=v[:, :, keys], bits=by.accumulator_bits)
    safe = l_i.masked_fill(l_i == 0, 1)
    out, lse = v_scale * acc_o / safe, m_i + torch.log(l_i / P_SCALE)
    if x.v_mean is not None:
        out = out + x.v_mean.repeat_interleave(group, 1).unsqueeze(2) * (of_keys / safe)
    return out.transpose(1, 2), lse.squeeze(-1)


class Case(NamedTuple):
    """A call that `tilewise verify` holds to the error contract."""

    name: str
    causal: bool = False
    mean: float = 0.0  # of V
    is_raw: bool = False  # e4m3 tensors, not a `Quantized`

    @property
    def bound(self) -> float:
        """The bound of the norm of the error over the norm of the result."""
        return 5e-3 if self.mean else 3e-2


CASES = [
    Case("fp8"),
    Case("fp8-causal", causal=True),
    Case("fp8-raw-causal", causal=True, is_raw=True),
    Case("fp8-values-of-mean-1", mean=1.0),
]


def error_of(case: Case, backend: str | None, device: str, seqlen: int = 320) -> float:
    """The error of `tilewise.attention` against fp64 of what its 8 bits stand for."""
    from .. import attention, attention_reference, quantize

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seqlen, 4, 64, generator=generator).to(device)
    k, v = torch.randn(2, 2, seqlen, 2, 64, generator=generator).to(device)
    values = q, k, v + case.mean
    inputs: dict[str, Any]
    if case.is_raw:
        meant = [x.to(FP8) for x in values]
        inputs = dict(zip("qkv", meant))
    else:
        inputs = {"q": quantize(values[0], values[1], values[2])}
        meant = dequantize(inputs["q"], Lengths())  # rotated and without k's mean: the same out
    q, k, v = (x.double() for x in meant)
    options: dict[str, Any] = dict(causal=case.causal, backend=backend, out_dtype=torch.float32)
    out = cast(Tensor, attention(**inputs, **options))
    exact = cast(Tensor, attention_reference(q, k, v=v, causal=case.causal))
    off = torch.linalg.vector_norm(out - exact) / torch.linalg.vector_norm(exact)
    return off.item()


def accumulated(acc: Tensor, p: Tensor, v: Tensor, bits: int | None) -> Tensor:
    """acc + P V; with `bits` every product is cut below so many of the largest term of its step."""
    if bits is None:
        return acc + p @ v
    for start in range(0, p.shape[-1], STEP):
        keys = slice(start, start + STEP)
        terms = p[..., keys].unsqueeze(-1) * v[..., keys, :].unsqueeze(-3)
        largest = torch.maximum(acc.abs(), terms.abs().amax(-2))
        unit = torch.exp2(torch.frexp(largest)[1].float() - 1 - bits)
        whole = torch.trunc(acc / unit) + torch.trunc(terms / unit.unsqueeze(-2)).sum(-2)
        acc = whole * unit
    return acc
