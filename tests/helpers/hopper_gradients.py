"""Gradients by the Hopper backend, and the problem of a backward."""

import torch

import tilewise
from tilewise.problem import Extras, Scalars, describe

BF16 = torch.bfloat16


def problem_of(headdim, headdim_v=0, deterministic=False, extras=None, **scalars):
    q, v = torch.empty(1, 8, 2, headdim, dtype=BF16), torch.empty(1, 8, 2, headdim_v or headdim)
    scalars = Scalars(**{"scale": 0.1, **scalars})
    return describe(q, q, v, extras or Extras(), scalars, "bottom_right", deterministic)


def gradients(q, k, v, dout=None, **options):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*inputs, backend="hopper", **options)
    return torch.autograd.grad(out, inputs, like(out) if dout is None else dout)


def like(out):
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)
