"""One sequence over several GPUs in tests: a process for each, and what one GPU makes of a case."""

import functools
import os

import pytest
import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.distributed.transport.arena import arena_of

from . import processes
from .waits import DEADLINE

SHARE = "TILEWISE_TESTS_SHARE_GPU"
# Of one GPU: two ranks, which alternate on it, and among which gloo sends what NCCL would
SHARES_GPU = torch.cuda.device_count() == 1 and SHARE in os.environ
RANKS = 2 if SHARES_GPU else min(torch.cuda.device_count(), 4)
needs_ranks = pytest.mark.skipif(RANKS < 2, reason=f"needs two GPUs, or one with {SHARE}=1")
SEQLEN = 1024 * 5 * RANKS
DOCUMENTS = 0, 3000, 3001, 7777, SEQLEN
CAUSAL = dict(causal=True)
CASES = {
    "full": {},
    "causal": CAUSAL,
    "top left": dict(causal="top_left"),
    "window": dict(CAUSAL, window=(1500, 0)),
    "both sides": dict(window=(700, 300)),
    "softcap": dict(CAUSAL, softcap=20.0),
    "sinks": dict(CAUSAL, sinks=True),
    "headdim 64": dict(CAUSAL, headdim=64),
    "MHA, headdim 256": dict(CAUSAL, headdim=256, heads=(4, 4)),
    "documents": dict(CAUSAL, docs=True),
    "documents, full": dict(docs=True),
    "batch of 2": dict(CAUSAL, batch=2),
}


def run(main, *args, killed=(), timeout=DEADLINE):
    """`main(rank, *args)` in a process a GPU, or in two on one."""
    processes.run(main, RANKS, *args, timeout=timeout, killed=killed, on_gpus=True)


def arena_here():
    """The arena of all ranks on this one's GPU."""
    return arena_of(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))


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


def layouts(group=None):
    makes = td.zigzag, td.contiguous, functools.partial(td.striped, block=512)
    return [make(SEQLEN, group) for make in makes]


def faults_of(case, group=None):
    """`out` and `lse` are one GPU's to the bit, by heads the gradients, too; others are near."""
    one, ordered = case.one(), case.one(deterministic=True)
    faults = []
    for layout in map(case.deal, layouts(group)):
        for method in ("stream", "heads"):
            nheads_k = case.k.shape[2]
            if method == "heads" and nheads_k % RANKS:
                continue
            is_ordered = method == "heads"
            found = case.sharded(layout, method=method, deterministic=is_ordered)
            expected = ordered if is_ordered else one
            what = f"{method}, {layout.kind}"
            for i, (x, y) in enumerate(zip(found, expected)):
                if i == 5:  # of sinks: a part of a sum
                    dist.all_reduce(x)
                mine = y if i == 5 else layout.shard(y, 2 if i == 1 else 1)
                if (i < 2 or (is_ordered and i < 5)) and not torch.equal(x, mine):
                    faults.append(f"{what}: {i} has other bits")
                error = (x.float() - mine.float()).norm() / mine.float().norm()
                if not error < 0.01:
                    faults.append(f"{what}: {i} is {error:.2g} off")
    return faults
