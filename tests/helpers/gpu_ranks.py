"""One sequence over several GPUs in tests: a process for each, and what one GPU makes of a case."""

import datetime
import multiprocessing
import os
import socket
import sys
import traceback

import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td

RANKS = min(torch.cuda.device_count(), 4)
SEQLEN = 1024 * 5 * RANKS
DOCUMENTS = 0, 3000, 3001, 7777, SEQLEN


def run(main, *args, killed=(), timeout=60.0):
    """`main(rank, *args)` in a process a GPU."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    said, done = context.SimpleQueue(), context.Semaphore(0)
    given = main, address, timeout, args, said, done, RANKS - len(killed), sys.path
    started = [context.Process(target=_start, args=(rank, *given)) for rank in range(RANKS)]
    for process in started:
        process.start()
    while said.empty() and any(process.is_alive() for process in started):
        started[0].join(0.1)
    for process in started:
        process.join(None if said.empty() else 5.0)
        process.kill()
    failed = []
    while not said.empty():
        failed.append(said.get())
    assert not failed, "\n".join(failed)
    assert [x.exitcode < 0 for x in started] == [rank in killed for rank in range(RANKS)]


def _start(rank, main, address, timeout, args, said, done, living, path):
    sys.path[:] = path
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=timeout)
    kinds = dict(init_method=address, rank=rank, world_size=RANKS, timeout=limit)
    dist.init_process_group("cpu:gloo,cuda:nccl", **kinds)
    try:
        main(rank, *args)
    except BaseException:
        said.put(f"rank {rank}:\n{traceback.format_exc()}")
    if rank == 0:  # which has the store, that others may still ask
        for _ in range(living - 1):
            done.acquire(timeout=timeout)
    done.release()
    os._exit(0)


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
