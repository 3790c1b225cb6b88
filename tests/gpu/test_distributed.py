"""One sequence over several GPUs, beside one of them. Needs two; all that are there take part."""

import datetime
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.distributed.arena import ON_GPUS, arena_of
from tilewise.distributed.exchange import publish_rows
from tilewise.errors import ArgumentError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS = min(torch.cuda.device_count(), 4)
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
    os.environ.update({ON_GPUS: "1", "NCCL_NVLS_ENABLE": "0"})
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

    def one(self, **more):
        if self.docs is None:
            return self.run(tilewise.attention, **more)
        starts = torch.tensor(self.docs, dtype=torch.int32, device="cuda")

        def packed(q, k, v, **given):
            lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
            out, lse = tilewise.attention(q[0], k[0], v[0], **lengths, **given)
            return out[None], lse[None]

        return self.run(packed, **more)

    def deal(self, layout):
        return layout if self.docs is None else layout.packed(self.docs)

    def sharded(self, layout, **more):
        def attend(*tensors, **given):
            return td.attention(*tensors, layout=layout, **given)

        return self.run(attend, layout.shard, **more)


def layouts():
    return td.zigzag(SEQLEN), td.contiguous(SEQLEN), td.striped(SEQLEN, block=512)


def bits(rank, name):
    """`out` and `lse` are one GPU's to the bit, by heads the gradients, too; others are near."""
    case = Whole(**CASES[name])
    one, ordered = case.one(), case.one(deterministic=True)
    for layout in map(case.deal, layouts()):
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
                if i < 2 or (is_ordered and i < 5):
                    assert torch.equal(x, mine), f"{what}: {i} has other bits"
                error = (x.float() - mine.float()).norm() / mine.float().norm()
                assert error < 0.01, f"{what}: {i} is {error:.2g} off"


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_gpu(name):
    run(bits, name)


def repeats(rank):
    """The same bits in 200 runs, of ranks that come at any time, and no memory is read too early
    or too late: each call has other keys.
    """
    case = Whole(causal=True)
    layout = td.zigzag(SEQLEN)
    draw = torch.Generator().manual_seed(rank)
    q, k, v = (layout.shard(x) for x in (case.q, case.k, case.v))
    expected = {}
    for call in range(200):
        delay = torch.rand((), generator=draw).item()
        torch.cuda._sleep(int(delay * 2_000_000))  # cycles: up to 1 ms
        if call % 7 == 0:
            time.sleep(0.002 * delay)
        which, method = call % 5, ("stream", "heads")[call % 2]
        with torch.no_grad():
            out = td.attention(q, k * (1 + which), v, layout=layout, causal=True, method=method)
        first = expected.setdefault(which, out)
        assert torch.equal(out, first), (call, which, method)
    grads = [case.sharded(layout, method="stream")[3:5] for _ in range(5)]
    assert all(torch.equal(x, y) for other in grads[1:] for x, y in zip(other, grads[0]))


def test_repeats_under_delays():
    run(repeats)


def memory(rank):
    """Growth, other streams, bandwidth far above what the host could copy, and host time."""
    arena = arena_of(dist.group.WORLD, torch.device("cuda", rank))
    for call in range(12):
        numel = 1000 * 7 ** (call // 2)
        x = torch.full((numel,), 10.0 * call + rank, device="cuda")
        if call % 3 == 2:
            torch.cuda.current_stream().synchronize()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        else:
            stream = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            found = publish_rows(arena, f"{numel} numbers", [x], [numel] * RANKS)
            for peer in range(RANKS):
                assert (found.pull(peer, 0) == 10.0 * call + peer).all(), (call, peer)
    assert not any(handle.multicast_ptr for handle in getattr(arena.memory, "kept", [])[1:2])
    asked = "a barrier"
    for _ in range(20):
        arena.meet(asked)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        arena.meet(asked)
    host_us = (time.perf_counter() - start) * 1e4
    torch.cuda.synchronize()
    print(f"rank {rank}: {type(arena.memory).__name__}, a barrier is {host_us:.1f} us of host time")
    with pytest.raises(NotImplementedError, match="captured CUDA graph"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            publish_rows(arena, asked, [x[:1]], [1] * RANKS)


def test_the_arena_grows():
    run(memory)


def mismatch(rank):
    layout = td.contiguous(1024 * RANKS)
    q = torch.randn(1, 1024, 2 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        for causal in (True, False):
            td.attention(q, q, q, layout=layout, causal=causal)
    with pytest.raises(td.RankMismatch, match="rank 1 called .*causal=top_left"):
        td.attention(q, q, q, layout=layout, causal="top_left" if rank == 1 else "bottom_right")
    assert td.attention(q, q, q, layout=layout).isfinite().all()
    out = td.attention(q, q, q, layout=layout, causal=rank == 1)  # both are known: no host waits
    assert out.isnan().all()
    with pytest.raises(td.RankMismatch, match="rank 1 called .*causal=True.*of which this is"):
        td.attention(q, q, q, layout=layout)
    assert td.attention(q, q, q, layout=layout).isfinite().all()
    with pytest.raises(ArgumentError if rank == 1 else td.RankMismatch, match="gives rank 1 1024"):
        x = q[:, :9] if rank == 1 else q
        td.attention(x, x, x, layout=layout, softcap=3.0)
    assert td.attention(q, q, q, layout=layout).isfinite().all()


def test_ranks_that_disagree():
    run(mismatch)


def lost(rank, victim):
    layout = td.contiguous(1024 * RANKS)
    q = torch.randn(1, 1024, 2 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        td.attention(q, q, q, layout=layout, causal=True)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    out = td.attention(q, q, q, layout=layout, causal=True)
    assert out.isnan().all()  # waits for the device, which waits no longer than the time-out
    with pytest.raises(td.RankLost, match=f"rank {victim} of {RANKS} did not come"):
        td.attention(q, q, q, layout=layout, causal=True)
    assert time.monotonic() - start < 25


def test_a_rank_that_is_killed_is_named():
    run(lost, RANKS - 1, killed=(RANKS - 1,), timeout=10.0)
