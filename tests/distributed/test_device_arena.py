"""What GPUs run, on CPU processes: the barrier's kernel in the interpreter, over pads in files that
all processes map. Streams and torch's symmetric memory are not in it.
"""

import contextlib
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.device_arena import CPU, device_arena
from helpers.processes import run
from helpers.shards import NAMES, Case, compare
from helpers.tiers import sample
from helpers.waits import SHORT

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport import device_barrier
from tilewise.distributed.transport.device_arena import DeviceArena, refuse_capture
from tilewise.distributed.transport.exchange import publish_rows
from tilewise.errors import ArgumentError

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


def barriers(rank):
    """Many in a row, of ranks that come at any time; each reads what all have just published."""
    arena = device_arena()
    draw = torch.Generator().manual_seed(rank)
    for call in range(40):
        if call % 3 == 0:
            time.sleep(0.01 * torch.rand((), generator=draw).item())
        rows = 7 if call < 20 else 40000  # the arena grows
        mine = torch.full((rows, 2), 100.0 * call + rank)
        found = publish_rows(arena, f"rows ({rows}, 2)", [mine], [rows] * arena.ranks)
        for peer in range(arena.ranks):
            assert (found.pull(peer, 0) == 100.0 * call + peer).all(), (call, peer)
    assert arena.barrier.number == 42 and len(arena.barrier.known) == 4  # two grow
    x = torch.ones(5000, dtype=torch.bfloat16)
    arena.settle([x])
    assert (x == 1).all()


def mismatches(rank):
    """The first call of a kind is an error where it is made, a later one at the call after it, with
    NaN in between; and the group goes on after both.
    """
    arena = device_arena()
    order, reset = [], arena.barrier.signals.reset
    device_barrier.synchronize = lambda device: order.append("synchronize")
    arena.barrier.signals.reset = lambda: order.append("reset") or reset()

    def call(asked):
        publish_rows(arena, asked, [torch.zeros(2)], [2] * arena.ranks)

    for asked in ("k (1, 8)", "k (1, 9)"):
        call(asked)
    with pytest.raises(td.RankMismatch, match=r"rank 2 called v; rank [01] called u"):
        call("v" if rank == 2 else "u")
    call("k (1, 8)")
    call("k (1, 9)" if rank == 2 else "k (1, 8)")  # both known: no host waits
    x = torch.ones(9000)
    arena.settle([x])
    assert x.isnan().all()
    later = r"rank 2 called k \(1, 9\); rank [01] called k \(1, 8\) \(in call \d+, of which"
    with pytest.raises(td.RankMismatch, match=later):
        call("k (1, 8)")
    call("k (1, 8)")
    x = torch.ones(9000)
    arena.settle([x])
    assert (x == 1).all()
    if rank == 1:
        with pytest.raises(ArgumentError), arenas.Reporting(dist.group.WORLD):
            raise ArgumentError("k is wrong")
    else:
        with pytest.raises(td.RankMismatch, match="rank 1 raised ArgumentError: k is wrong"):
            call("a new call, at which the host waits")
    order.clear()
    call("k (1, 8)")
    assert order[:3] == [
        "synchronize",
        "reset",
        "synchronize",
    ]  # nothing runs whose words are reset
    large = "large" if rank else "larger"  # where one rank's arena would grow and another's not
    with pytest.raises(td.RankMismatch, match="called larger, for which the arena grows"):
        rows = 60000 if rank else 70000
        publish_rows(arena, large, [torch.zeros(rows)], [rows] * arena.ranks)
    call("k (1, 8)")


def announced(rank):
    """A rank says that it comes, does something else, and then waits: other calls and errors are
    named as before.
    """
    host, draw = arenas.host_of(dist.group.WORLD), torch.Generator().manual_seed(rank)
    for call in range(40):
        host.announce(f"call {call}")
        time.sleep(0.01 * torch.rand((), generator=draw).item() * (call % 3 == rank))
        host.meet(f"call {call}")
    asked = "v" if rank == 1 else "u"
    host.announce(asked)
    with pytest.raises(td.RankMismatch, match="rank 1 called v; rank 0 called u|rank . called"):
        host.meet(asked)
    host.meet("all have learnt of it")
    host.announce("a call in which rank 1 raises")
    with pytest.raises(ValueError if rank == 1 else td.RankMismatch, match="of rank 1"):
        with arenas.Reporting(dist.group.WORLD):
            if rank == 1:
                raise ValueError("of rank 1")
            for _ in range(2):  # rank 1 has come to the first
                host.meet("a call in which rank 1 raises")
    host.meet("all have learnt of it")
    dist.barrier()  # rank 0 has the store


def test_a_rank_that_comes_before_it_waits():
    run(announced, 3)


def test_barriers_of_three_ranks():
    run(barriers, 3)


def test_ranks_that_disagree():
    run(mismatches, 3)


def test_a_captured_graph_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match=r"captured CUDA graph.*make_graphed_callables"):
        refuse_capture()
    for name in ("context_parallel_forward", "context_parallel_backward"):
        tags = getattr(torch.ops.tilewise, name).default.tags
        assert torch.Tag.cudagraph_unsafe in tags  # Inductor leaves them out


class Stream:
    """A stream of a device that is not the current one."""

    cuda_stream = 0

    def wait_stream(self, other):
        events.append(("wait", other))


events = []


@pytest.fixture
def on_gpu(monkeypatch):
    """An arena of cuda:1, where cuda:0 is current, without a GPU."""

    @contextlib.contextmanager
    def current(device):
        events.append(("current", device.index))
        yield
        events.append(("current", 0))

    events.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "device", current)
    arena = DeviceArena.__new__(DeviceArena)
    arena.has_streams, arena.device, arena.side = True, torch.device("cuda", 1), "side"
    arena.arrived, arena.raw, arena.links = 64, 0, None
    return arena


def arena_that_asks(answers=None, device=CPU):
    """Makes an arena whose ranks give these answers, or which is alone."""
    host = SimpleNamespace(wait=lambda signature, mine: answers or [mine])
    barrier = SimpleNamespace(
        rank=0,
        ranks=len(answers or [0]),
        members=(0,),
        signals=SimpleNamespace(words=torch.zeros(4, dtype=torch.int32)),
        nanoseconds=1,
        host=host,
    )
    return DeviceArena(barrier, None, device)


def test_pieces_are_counted_on_all_ranks_or_none():
    """Ranks that count them publish in another order than ranks that do not. Ranks of one GPU would
    copy by kernels, which wait for the SMs that attention holds.
    """
    for answers, expected in ((["a", "b"], True), (["a", ""], False), (["a", "a"], False)):
        assert arena_that_asks(answers).counts_pieces == expected


def test_pieces_are_counted_only_where_the_driver_copies(monkeypatch):
    """Copies of rows by torch are kernels, too."""
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given, **named: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    for driver in (SimpleNamespace(), None):
        monkeypatch.setattr(f"{DeviceArena.__module__}.driver_of", lambda words, x=driver: x)
        arena = arena_that_asks(device=torch.device("cuda", 0))
        assert arena.counts_pieces == (driver is not None)


def test_a_text_that_is_on_its_way_to_the_store_is_waited_for():
    """A rank leaves its text before it signals, but the store may have it after that."""
    kept = {}
    store = SimpleNamespace(
        check=kept.__contains__,
        wait=lambda keys, timeout: kept.update({keys[0]: b"v"}),
        get=kept.__getitem__,
    )
    barrier = device_barrier.DeviceBarrier.__new__(device_barrier.DeviceBarrier)
    barrier.store, barrier.device, barrier.known, barrier.left = store, CPU, {}, {}
    assert barrier._text(1, rank=2, fingerprint=7) == "v"


def test_memory_that_is_pulled_into_is_not_used_again_after_an_error(on_gpu):
    """What is freed by an error is the stream's again, while copies of another may go on."""
    on_gpu.barrier = SimpleNamespace(abandon=lambda error: events.append(("abandon", str(error))))
    on_gpu.abandon(RuntimeError("out of memory"))
    assert events == [("wait", "side"), ("abandon", "out of memory")]


def killed(rank):
    arena = device_arena(seconds=SHORT)

    def call():
        publish_rows(arena, "rows", [torch.zeros(2)], [2] * arena.ranks)

    call()
    call()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    call()  # of a known call: the device waits, and the host does not ask
    x = torch.ones(10)
    arena.settle([x])
    assert x.isnan().all()
    with pytest.raises(td.RankLost, match="rank 1 of 3 did not come to call 4, rows, within 2 s"):
        call()
    with pytest.raises(td.RankLost, match="new process group"):
        call()


def test_a_rank_that_is_killed_is_named():
    run(killed, 3, killed=(1,))


def algorithms(rank, options):
    """The methods over it, as over the arena of CPUs."""
    group = dist.group.WORLD
    arena = arenas._arenas[group, CPU] = device_arena()
    case = Case(4, 2, **options)
    layout = td.zigzag(case.seqlen, group)
    compare(case, layout, "stream", method="stream")
    compare(case, layout, "stream by runs", (), method="stream", bitwise=False)
    compare(case, layout, "heads", NAMES, method="heads", deterministic=True)
    compare(case, layout, "ring", (), method="ring", bitwise=False)
    assert arena.pulled
    x = torch.randn(1, layout.tokens, 4, 16)
    with pytest.raises(td.RankMismatch, match=r"called .*causal=True.*called .*causal=False"):
        td.attention(x, x, x, layout=layout, causal=bool(rank))
    assert td.attention(x, x, x, layout=layout).isfinite().all()


@pytest.mark.parametrize(
    "options",
    sample(
        [dict(causal=True), dict(causal=True, window=(37, None), sinks=True)],
        dict(causal=True, window=(37, None), sinks=True),
    ),
    ids=str,
)
def test_methods(options):
    run(algorithms, 2, options)
