"""The arena of CPU processes: what one rank publishes another reads, and the rank that does not
come, or comes with another call, is named.
"""

import collections
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from helpers.waits import SHORT, until

import tilewise.distributed as td
from tilewise.distributed.layouts.pulls import pulls_in_turn
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.exchange import publish_rows
from tilewise.distributed.transport.halves import LEAST
from tilewise.errors import ArgumentError

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


def rows_of(rank, call, count, dtype=torch.float32):
    return torch.arange(count * 3).view(count, 3).to(dtype) + 1000 * rank + 100000 * call


def publishing(rank):
    """Each call reads what each rank has just published, however slow some ranks are, and as the
    arena grows.
    """
    arena = arena_of(dist.group.WORLD, torch.device("cpu"))
    assert arena is arena_of(dist.group.WORLD, torch.device("cpu"))
    counts = [5, 0, 7][: arena.ranks]
    draw = torch.Generator().manual_seed(rank)
    for call in range(12):
        time.sleep(0.004 * torch.rand((), generator=draw).item())
        scale = 1 if call < 6 else 4000
        mine = [
            rows_of(rank, call, scale * counts[rank], x) for x in (torch.float32, torch.bfloat16)
        ]
        before, moved = arena.pulled, 0
        found = publish_rows(arena, f"call {call}", mine, [scale * x for x in counts])
        for peer in range(arena.ranks):
            count = scale * counts[peer]
            for number, dtype in enumerate((torch.float32, torch.bfloat16)):
                expected = rows_of(peer, call, count, dtype)
                assert torch.equal(found.view(peer, number), expected)
                assert torch.equal(found.pull(peer, number, start=2, stop=4), expected[2:4])
                moved += expected[2:4].numel() * dtype.itemsize if peer != rank else 0
        assert arena.pulled - before == moved
    assert arena.room >= 4000 * 7 * 3 * 4 > LEAST
    publish_rows(arena, "nothing", [torch.empty(0, 3)], [0] * arena.ranks)
    mapped = [x for x in Path("/proc/self/maps").read_text().splitlines() if "/tilewise-" in x]
    assert mapped and all(x.endswith("(deleted)") for x in mapped)


def sequences(rank):
    """Rows through a layout come into global order."""
    layout = td.striped(50, block=4)
    x = torch.arange(100).view(50, 2)
    found = publish_rows(
        arena_of(layout.group, x.device), "rows", [layout.shard(x, 0)], layout.counts
    )
    whole = torch.zeros_like(x)
    ranks = []
    for peer, row, start, stop in pulls_in_turn(layout, [(3, 30), (41, 50)]):
        whole[start:stop] = found.pull(peer, 0, start=row, stop=row + stop - start)
        ranks.append(peer)
    assert torch.equal(whole[3:30], x[3:30]) and torch.equal(whole[41:], x[41:])
    assert not whole[:3].any() and not whole[30:41].any()
    assert ranks[0] == rank and ranks[-1] == (rank + 1) % layout.ranks
    local = layout.shard(x, 0)
    assert torch.equal(layout.unshard(local, 0), x)


def another_call(rank):
    """Ranks that do not make the same call name both; the group goes on after it."""
    arena = arena_of(dist.group.WORLD, torch.device("cpu"))
    with pytest.raises(
        td.RankMismatch, match=r"rank 2 called k \(1, 9\); rank [01] called k \(1, 8\)"
    ):
        publish_rows(arena, f"k (1, {8 + rank // 2})", [torch.zeros(2)], [2, 2, 2])
    if rank == 1:
        arena.barrier.abandon(ArgumentError("k is wrong"))
    else:
        with pytest.raises(td.RankMismatch, match="rank 1 raised ArgumentError: k is wrong"):
            publish_rows(arena, "k (1, 8)", [torch.zeros(2)], [2, 2, 2])
    publish_rows(arena, "k (1, 8)", [torch.zeros(2)], [2, 2, 2])
    large = 100000 * (1 + rank % 2)  # where one rank's arena would grow and another's not
    with pytest.raises(td.RankMismatch, match="called large 200000"):
        publish_rows(arena, f"large {large}", [torch.zeros(large)], [large] * 3)
    publish_rows(arena, "k (1, 8)", [torch.zeros(2)], [2, 2, 2])


def after_an_error(rank):
    """What ranks read after one of them raised before it published is what was published last."""
    arena = arena_of(dist.group.WORLD, torch.device("cpu"))
    for call in range(6):
        if call % 2:
            if rank == call % 3:
                arena.barrier.abandon(ArgumentError("q is wrong"))
            else:
                with pytest.raises(td.RankMismatch, match="q is wrong"):
                    publish_rows(arena, "q", [torch.full((3,), -1.0)], [3] * 3)
        found = publish_rows(arena, "q", [torch.full((3,), 10.0 * call + rank)], [3] * 3)
        assert [found.view(peer, 0)[0].item() - 10 * call for peer in range(3)] == [0, 1, 2]


class Counted:
    """A store whose operations are counted."""

    def __init__(self, store):
        self.store, self.counts = store, collections.Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(self.store, name)


def operations(rank):
    """Hosts meet without the store; only ranks that wait for a late one say so there, and look for
    its error.
    """
    host = arena_of(dist.group.WORLD, torch.device("cpu")).host
    for _ in range(2):
        host.meet("a call")
    host.store = counted = Counted(host.store)
    if rank == 2:
        host.number += 1
        here = host._keys("here")[:2]
        host.number -= 1
        until(lambda: counted.store.check(here), "the others wait")
    host.meet("a call")
    host.store = counted.store
    late = {"check", "set", "delete_key"}
    assert set(counted.counts) == late or (rank == 2 and not set(counted.counts) & {"set"})
    host.meet("a call")


def calls(rank):
    operations(rank)
    publishing(rank)
    sequences(rank)
    another_call(rank)
    after_an_error(rank)


def test_three_ranks():
    run(calls, 3)


def killed(rank, victim, method):
    """Between a forward and its backward."""
    layout = td.contiguous(12)
    x = torch.randn(1, 4, 3, 8, requires_grad=True)
    out = td.attention(x, x, x, layout=layout, method=method)
    if rank == victim:
        time.sleep(0.3)  # the others pass, too
        os.kill(os.getpid(), signal.SIGKILL)
    match = f"rank {victim} of 3 did not come" if victim else "does not answer|rank 0 of 3 did not"
    with pytest.raises(td.RankLost, match=match) as lost:
        out.sum().backward()
    assert f"the backward of attention ({method})" in str(lost.value).replace("the results of ", "")
    with pytest.raises(td.RankLost, match="new process group"):
        td.attention(x, x, x, layout=layout, method=method)


@pytest.mark.parametrize("victim, method", [(0, "stream"), (2, "heads")])  # 0 has the store
def test_a_rank_that_is_killed_is_named(victim, method):
    run(killed, 3, victim, method, timeout=SHORT, killed=(victim,))


def test_other_devices_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="supports CPUs and GPUs"):
        arena_of(None, torch.device("meta"))
