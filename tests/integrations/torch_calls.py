"""Calls of torch's attention for the tests of `enable_sdpa`, on any device."""

import torch
import torch.nn.functional as F


def inputs(*shapes, device="cpu", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device, dtype).requires_grad_() for x in made]


def both(attend, *leaves):
    """The result and the gradients of all leaves that want one."""
    out = attend(*leaves)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)


def square(heads=4, heads_k=4, headdim=16, seqlen=24, **made):
    k = (2, heads_k, seqlen, headdim)
    return inputs((2, heads, seqlen, headdim), k, k, **made)


def mask(q, k):
    """Bools, of which each row has some."""
    shape = q.shape[0], 1, q.shape[2], k.shape[2]
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[..., 0] = True
    return seen.to(q.device)


def added(q, k):
    """Numbers for each score."""
    generator = torch.Generator().manual_seed(3)
    shape = 1, q.shape[1], q.shape[2], k.shape[2]
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(q)


CALLS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "bools": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q, k)),
    "numbers": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, added(q, k)),
    "shared key heads": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True
    ),
    "rank 3": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "other lengths": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :7], k, v),
}


def packed(q, k, v, starts, attend=F.scaled_dot_product_attention, **options):
    """Sequence by sequence, of (total, nheads, headdim)."""
    parts = [
        attend(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), **options)[0].transpose(0, 1)
        for a, b in zip(starts.tolist(), starts.tolist()[1:])
    ]
    return torch.cat(parts)


def noted(name, function, names):
    """The function, which adds its name where it is called."""

    def called(*args, **named):
        names.append(name)
        return function(*args, **named)

    return called
