"""Inputs of FP8 calls at the level of kernels, and what they must give."""

from typing import Any, NamedTuple

import torch

import tilewise
from tilewise.kernels.common.quantized import (
    COLUMNS,
    FP8,
    KEY_ORDER,
    LARGEST,
    Quantized,
    Scales,
    columns_of,
    packed_columns,
)
from tilewise.problem import Extras, Problem, Scalars, describe

Tensor = torch.Tensor


class Fp8Call(NamedTuple):
    """A call: what kernels get, what was quantised, and the options of `attention_reference`."""

    quantized: Quantized
    exact: tuple[Tensor, Tensor, Tensor]  # the 8-bit tensors times their scales, fp64
    options: dict[str, Any]

    @property
    def extras(self) -> Extras:
        """As kernels take them."""
        given, device = self.options, self.quantized.q.device
        found = {x: given[x] for x in Extras._fields if isinstance(given.get(x), Tensor)}
        return Extras(**{name: x.to(device) for name, x in found.items()})

    def to(self, device: str) -> "Fp8Call":
        """The same with what kernels get on a device."""

        def moved(x: Any) -> Any:
            if isinstance(x, Scales):
                return Scales(*map(moved, x))
            return x.to(device) if isinstance(x, Tensor) else x

        return self._replace(quantized=Quantized(*map(moved, self.quantized)))

    def problem(self, scalars: Scalars, align: str) -> Problem:
        """Its Problem."""
        q, k, _ = self.exact
        q, k = (x.to(FP8) if x.dim() == 4 else x[None].to(FP8) for x in (q, k))
        v = q.new_empty(*k.shape[:3], self.quantized.v_t.shape[2])
        return describe(q, k, v, self.extras, scalars, align, False)

    def reference(self) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of the dequantised tensors in fp64."""
        options = {
            name: x.double() if name == "sinks" and x is not None else x
            for name, x in self.options.items()
        }
        return tilewise.attention_reference(*self.exact, return_lse=True, **options)


def round_to_fp8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x / scale in e4m3, and the scale, which keeps `dims` as 1."""
    if x.numel() == 0:
        return x.to(FP8), torch.ones([1 if i in dims else n for i, n in enumerate(x.shape)])
    scale = x.float().abs().amax(dims, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scale).to(FP8), scale


def in_key_order(v: Tensor) -> Tensor:
    """(rows, nheads_k, headdim_v) as V^T: (nheads_k, headdim_v, columns)."""
    rows, nheads_k, headdim_v = v.shape
    padded = v.new_zeros(columns_of(rows), nheads_k, headdim_v)
    padded[:rows] = v
    order = torch.arange(len(padded)).view(-1, 16)[:, torch.tensor(KEY_ORDER)].flatten()
    return padded.view(torch.int8)[order].view(FP8).permute(1, 2, 0)


def batch_of(q: Tensor, k: Tensor, v: Tensor, v_mean: bool = False, **options: Any) -> Fp8Call:
    """A call of (batch, rows, heads, headdim) tensors, quantised by key head."""
    batch, _, nheads, _ = q.shape
    nheads_k, group = k.shape[2], nheads // k.shape[2]
    mean = v.mean(1, keepdim=True) if v_mean else torch.zeros_like(v[:, :1])
    q8, q_scale = round_to_fp8(q.unflatten(2, (nheads_k, group)), (1, 3, 4))
    k8, k_scale = round_to_fp8(k, (1, 3))
    v8, v_scale = round_to_fp8(v - mean, (1, 3))
    exact = (q8.double() * q_scale).flatten(2, 3), k8.double() * k_scale
    lengths = options.get("seqused_k")
    used = v8.clone()
    if lengths is not None:
        for b, n in enumerate(lengths.tolist()):
            used[b, n:] = 0
    v_t = torch.stack([in_key_order(x).view(torch.int8) for x in used]).view(FP8)
    scales = Scales(*(x.reshape(batch, nheads_k).contiguous() for x in (q_scale, k_scale, v_scale)))
    means = mean[:, 0].float().contiguous() if v_mean else None
    quantized = Quantized(q8.flatten(2, 3), k8, v_t, scales, None, means)
    return Fp8Call(quantized, (*exact, v8.double() * v_scale + mean.double()), options)


def packed_of(parts: list[tuple[Tensor, Tensor, Tensor]], **options: Any) -> Fp8Call:
    """Packed sequences, each (rows, heads, headdim) tensors."""
    calls = [batch_of(*(x[None] for x in part)) for part in parts]
    ends_q, ends_k = (
        torch.tensor([0, *(len(part[i]) for part in parts)]).cumsum(0).int() for i in (0, 1)
    )
    nheads_k, headdim_v = parts[0][2].shape[1:]
    columns = packed_columns(int(ends_k[-1]), len(parts))
    v_t = torch.zeros(1, nheads_k, headdim_v, columns, dtype=torch.int8).view(FP8)
    for b, call in enumerate(calls):
        first = (int(ends_k[b]) // COLUMNS + b) * COLUMNS
        part = call.quantized.v_t[0].view(torch.int8)
        v_t.view(torch.int8)[0, :, :, first : first + part.shape[-1]] = part
    scales = Scales(*(torch.cat(x) for x in zip(*(c.quantized.scales for c in calls))))
    q8, k8 = (
        torch.cat([c.quantized[i].view(torch.int8) for c in calls], 1).view(FP8) for i in (0, 1)
    )
    exact = tuple(torch.cat([c.exact[i][0] for c in calls]) for i in range(3))
    lengths = dict(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    return Fp8Call(Quantized(q8, k8, v_t, scales), exact, {**lengths, **options})


def error_of(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm."""
    found = found.double()
    return float((found - exact).norm() / exact.norm())
