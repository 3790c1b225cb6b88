"""One sequence over several GPUs, beside one of them. All that are there take part, and two ranks
may share one (`gpu_ranks.SHARE`).
"""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers.gpu_ranks import (
    CASES,
    RANKS,
    SEQLEN,
    SHARES_GPU,
    Whole,
    arena_here,
    faults_of,
    layouts,
    needs_ranks,
    run,
)
from helpers.interrupts import interrupted
from helpers.lives import lives
from helpers.waits import SHORT

import tilewise.distributed as td
from tilewise.distributed.methods import heads, one_launch, stream
from tilewise.distributed.transport.device_arena import DeviceArena
from tilewise.distributed.transport.exchange import publish_rows
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.memory import Symmetric
from tilewise.errors import ArgumentError

pytestmark = [pytest.mark.gpu, needs_ranks]
waits_for_pieces = pytest.mark.skipif(
    SHARES_GPU, reason="copies within a GPU need an SM, so no kernel waits for them"
)


def bits(rank, names, in_groups=False):
    """Several cases in one process a rank, which takes long to start. What is wrong is said at
    the end: a rank that stopped would leave the others waiting.
    """
    if in_groups:
        heads.LEAST_ROWS = 1
    faults = [f"{name}, {x}" for name in names for x in faults_of(Whole(**CASES[name]))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("first", range(4))
def test_the_bits_of_one_gpu(first):
    run(bits, [*CASES][first::4])


def test_groups_of_heads():
    """Exchanges beside the kernels of other heads: half of the memory is written as the other half
    is read.
    """
    run(bits, ["causal", "window", "sinks", "documents", "headdim 64"], True)


def addresses(rank):
    """The driver copies what torch copies, and one launch what many copies do. Copies by torch end
    before attention begins: those of rows need an SM, and a kernel that waits for them has all.
    """
    arena = arena_here()

    def pull_all(*lists, **named):
        marks = DeviceArena.pull(arena, *lists, **named)
        torch.cuda.synchronize()
        return marks

    assert arena.driver is not None, "the driver does not copy"
    case = Whole(causal=True, heads=(16, 8))
    for method in ("stream", "heads"):
        found = case.sharded(td.zigzag(SEQLEN), method=method, deterministic=True)
        arena.copy, arena.pull = functools.partial(Arena.copy, arena), pull_all
        arena._copy_piece = functools.partial(Arena._copy_piece, arena)
        again = case.sharded(td.zigzag(SEQLEN), method=method, deterministic=True)
        del arena.copy, arena.pull, arena._copy_piece
        assert all(torch.equal(x, y) for x, y in zip(found, again)), method


def test_copies_by_their_addresses():
    run(addresses)


class Delays:
    """Copies of a call that stand still at random, before a piece is counted and so before the next
    one, too. They are delayed by other copies: a kernel on their stream would wait for an SM that
    attention holds, and attention for them.
    """

    def __init__(self, arena, rank):
        self.draw = torch.Generator().manual_seed(100 + rank)
        self.source = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
        self.target = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
        self.count, arena.count = arena.count, self
        self.stream = arena.side

    def __call__(self, arrived):
        if torch.rand((), generator=self.draw) < 0.3:  # up to some milliseconds
            size = int(2 ** (26 * torch.rand((), generator=self.draw).item()))
            with torch.cuda.stream(self.stream):
                self.target[:size].copy_(self.source[:size], non_blocking=True)
        self.count(arrived)


def launches(rank):
    """Stream is one launch, which begins before its keys are there, with the bits of one GPU: 1,000
    calls whose copies are delayed at random, in layouts of few and of many runs.
    """
    arena = arena_here()
    assert arena.counts_pieces, "the driver writes no numbers in the order of a stream"
    launched, attend = [], one_launch.attend
    one_launch.attend = lambda *x, **named: launched.append(0) or attend(*x, **named)
    delays, counted = Delays(arena, rank), 0
    cases = [Whole(**CASES[name]) for name in ("causal", "window", "documents", "headdim 64")]
    for case in cases:
        ones = []
        for scale in (1, 3, 0.5):  # other keys in each call: an old piece is no piece
            kept = case.k
            case.k = kept * scale
            with torch.no_grad():
                ones.append((case.k, case.whole()))
            case.k = kept
        dealt = [case.deal(x) for x in layouts()]
        for call in range(250):
            layout, (k, one) = dealt[call % 3], ones[call % 7 % 3]
            q, k, v = (layout.shard(x) for x in (case.q, k, case.v))
            asked = dict(layout=layout, method="stream", return_lse=True, **case.options)
            with torch.no_grad():
                out, lse = td.attention(q, k, v, **asked)
            counted += 1
            assert torch.equal(out, layout.shard(one[0])), (call, layout.kind)
            assert torch.equal(lse, layout.shard(one[1], 2)), (call, layout.kind)
    assert len(launched) == counted == 1000 and delays.count
    print(f"rank {rank}: {counted} launches, {one_launch.groups_of.cache_info()}")


@waits_for_pieces
def test_one_launch_under_delays_1000_times():
    run(launches)


def late(rank):
    """Pieces that never come end the wait within the time-out: NaN, and a named error after it."""
    arena = arena_here()
    case, layout = Whole(causal=True), td.contiguous(SEQLEN)
    shards = [layout.shard(x) for x in (case.q, case.k, case.v)]
    asked = dict(layout=layout, method="stream", causal=True)
    with torch.no_grad():
        assert td.attention(*shards, **asked).isfinite().all()
        arena.limit, arena.count = 300_000_000, lambda arrived: None
        out = td.attention(*shards, **asked)
        torch.cuda.synchronize()
        if rank == 0:  # which sees its own keys alone
            assert out.isfinite().all()
            return
        assert out.isnan().all()
        with pytest.raises(td.PullTimeout, match=r"piece \d+ of \d+ of the keys, of rank"):
            td.attention(*shards, **asked)
        with pytest.raises(td.RankLost, match="make a new process group"):
            td.attention(*shards, **asked)


@waits_for_pieces
def test_pieces_that_never_come_are_named():
    run(late)


def sums(rank):
    """One kernel adds the parts of the gradients of keys, with the bits of additions one by one, in
    many slices, for which the arena does not grow, as in few. With no kernel cached it compiles
    for a minute, and longer beside other tests.
    """
    arena = arena_here()
    for name in ("causal", "window", "documents", "MHA, headdim 256"):
        case = Whole(**CASES[name])
        for layout in map(case.deal, layouts()):
            with torch.no_grad():
                shards = (layout.shard(x) for x in (case.q, case.k, case.v))
                td.attention(*shards, layout=layout, method="stream", **case.options)
            room, kernel = arena.room, arena.part_sums
            arena.slice_bytes = 1
            many = case.sharded(layout, method="stream")
            assert arena.room == room
            del arena.slice_bytes
            few = case.sharded(layout, method="stream")
            arena.part_sums = None
            one_by_one = case.sharded(layout, method="stream")
            arena.part_sums = kernel
            for i in (3, 4):
                same = torch.equal(many[i], few[i]) and torch.equal(few[i], one_by_one[i])
                assert same, f"{name}, {layout.kind}: {i}"


def test_the_sum_of_parts():
    run(sums)


def peak(rank):
    """Beside K and V of the sequence a backward takes 16 S D g bytes of parts in fp32: of as many
    key heads at a time as MOST_BYTES allow.
    """
    seqlen, nheads_k, headdim = 65536, 8, 128
    stream.MOST_BYTES = 8 * seqlen * headdim * 2  # two heads
    layout = td.zigzag(seqlen)
    heads = 16, nheads_k, nheads_k
    q, k, v = (
        torch.randn(1, layout.tokens, n, headdim, device="cuda", dtype=torch.bfloat16)
        for n in heads
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        out = td.attention(*leaves, layout=layout, causal=True, method="stream")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        grown = torch.cuda.max_memory_allocated() - before
    keys = 4 * seqlen * nheads_k * headdim
    parts = 16 * seqlen * headdim * 2
    local = q.numel() * 2
    print(f"rank {rank}: {grown >> 20} MiB; keys {keys >> 20}, parts {parts >> 20}")
    assert grown < keys + parts + 8 * local  # dO, O, dQ in fp32 and 16 bits, dK, dV, joined


def test_the_peak_of_the_backward():
    run(peak)


def repeats(rank):
    """The same bits in 1,000 runs, of ranks that come at any time, and no memory is read too early
    or too late: each call has other keys.
    """
    case = Whole(causal=True)
    layout = td.zigzag(SEQLEN)
    draw = torch.Generator().manual_seed(rank)
    q, k, v = (layout.shard(x) for x in (case.q, case.k, case.v))
    expected = {}
    for call in range(1000):
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
    """Growth, other streams, and no graph is captured over an arena."""
    arena = arena_here()
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
    if isinstance(arena.memory, Symmetric):
        assert not arena.memory.kept[1].multicast_ptr
    asked = "a barrier"
    for _ in range(20):
        arena.meet(asked)
    torch.cuda.synchronize()
    with pytest.raises(NotImplementedError, match="captured CUDA graph.*make_graphed_callables"):
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
            for method in ("heads", "stream"):
                td.attention(q, q, q, layout=layout, causal=causal, method=method)
    with pytest.raises(td.RankMismatch, match="rank 1 called .*causal=top_left"):
        td.attention(q, q, q, layout=layout, causal="top_left" if rank == 1 else "bottom_right")
    assert td.attention(q, q, q, layout=layout).isfinite().all()
    # Both are known, so no host waits. Stream has one exchange: the second of heads could raise
    out = td.attention(q, q, q, layout=layout, causal=rank == 1, method="stream")
    assert out.isnan().all()
    with pytest.raises(td.RankMismatch, match="rank 1 called .*causal=True.*of which this is"):
        td.attention(q, q, q, layout=layout)
    assert td.attention(q, q, q, layout=layout).isfinite().all()
    with pytest.raises(ArgumentError if rank == 1 else td.RankMismatch, match="rank 1 has 1024"):
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
    out = td.attention(q, q, q, layout=layout, causal=True)
    assert out.isnan().all()  # waits for the device, which waits no longer than the time-out
    with pytest.raises(td.RankLost, match=f"rank {victim} of {RANKS} did not come"):
        td.attention(q, q, q, layout=layout, causal=True)


def test_a_rank_that_is_killed_is_named():
    run(lost, RANKS - 1, killed=(RANKS - 1,), timeout=5 * SHORT)


def test_groups_made_again():
    """By torch's symmetric memory or CUDA IPC; what the ranks of a life share is freed with it."""
    run(lives, RANKS, 11, "cuda")


def test_an_error_of_one_rank_at_any_line():
    run(interrupted, 5, 40, "cuda", ["stream", "heads", "ring"])
