"""One sequence over several GPUs in tests: a process for each, and what one GPU makes of a case."""

import torch

import tilewise
import tilewise.distributed as td

from . import processes
from .waits import DEADLINE

RANKS = min(torch.cuda.device_count(), 4)
SEQLEN = 1024 * 5 * RANKS
DOCUMENTS = 0, 3000, 3001, 7777, SEQLEN


def run(main, *args, killed=(), timeout=DEADLINE):
    """`main(rank, *args)` in a process a GPU."""
    processes.run(main, RANKS, *args, timeout=timeout, killed=killed, on_gpus=True)


class Whole:
    """Inputs of a case, the same on all ranks, and what one GPU makes of them."""

    def __init__(self, batch=1, heads=(8, 4), headdim=128, docs=False, sinks=False, **options):
        draw = torch.Generator(device="cuda").manual_seed(1)

        def randn(*shape):
            return torch.randn(*shape, generator=draw, device="cuda").to(torch.bfloat16)

        self.q = randn(batch, SEQLEN, heads[0], headdim)
        self.k, self.v = (randn(batch, SEQLEN, heads[1], headdim) for _ in range(2))
        self.dout = randn(batch, SEQLEN, heads[0], headdim)
        self.docs, self.options = DOCUMENTS if docs else None, options
        self.sinks = randn(heads[0]) if sinks else None

    def run(self, attend, share=lambda x, dim=1: x, **more):
        leaves = [share(x).detach().requires_grad_() for x in (self.q, self.k, self.v)]
        given = {**self.options, **more}
        if self.sinks is not None:
            leaves.append(self.sinks.detach().clone().requires_grad_())
            given["sinks"] = leaves[-1]
        out, lse = attend(*leaves[:3], return_lse=True, **given)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, share(self.dout))

    def attend(self, q, k, v, **given):
        """The call on one GPU."""
        if self.docs is None:
            return tilewise.attention(q, k, v, **given)
        starts = torch.tensor(self.docs, dtype=torch.int32, device="cuda")
        lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
        out, lse = tilewise.attention(q[0], k[0], v[0], **lengths, **given)
        return out[None], lse[None]

    def whole(self):
        """`out` and `lse` of one GPU."""
        return self.attend(self.q, self.k, self.v, return_lse=True, **self.options)

    def one(self, **more):
        return self.run(self.attend, **more)

    def deal(self, layout):
        return layout if self.docs is None else layout.packed(self.docs)

    def sharded(self, layout, **more):
        def attend(*tensors, **given):
            return td.attention(*tensors, layout=layout, **given)

        return self.run(attend, layout.shard, **more)
