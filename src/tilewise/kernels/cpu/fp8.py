"""FP8 calls on the CPU: dequantised, then as fp32. The rotation of q and k needs no undoing, as it
leaves their products as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...problem import Extras, Problem, Scalars
from ..common.quantized import Lengths, Quantized
from .quantize import dequantize

Tensor = torch.Tensor


def prepare(attend: Callable, problem: Problem, scalars: Scalars, out_dtype: torch.dtype):
    """The forward (quantized, extras) -> (out, lse), by `attend` in fp32."""
    exact = problem._replace(dtype=torch.float32)

    def forward(quantized: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
        lengths = Lengths(
            *(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_q, extras.seqused_k)
        )
        out, lse = attend(exact, *dequantize(quantized, lengths), extras, scalars)
        return out.to(out_dtype), lse

    return forward
