"""Ranks of several nodes, one of which dies, stands still, raises or makes another call: all ranks
of all nodes raise, and name the rank, its node and the call.
"""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers.device_arena import device_arena
from helpers.lives import Store
from helpers.nodes import elsewhere
from helpers.processes import run
from helpers.tiers import sample_rows
from helpers.waits import DEADLINE, SHORT, until

import tilewise.distributed as td
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.links import LATER, Links

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

NODES = 0, 0, 1, 1
VICTIM = 2
# Of a forward and its backward: what a rank does where, and how often before
STEPS = [(Links, "begin"), (Links, "finish"), (Arena, "meet_node"), (Arena, "meet")]
CALLS = {0: "attention (stream)", 1: "the backward of attention", 2: "the sums of the backward"}


def attended(layout):
    x = torch.randn(1, layout.tokens, 2, 8, requires_grad=True)
    td.attention(x, x, x, layout=layout, causal=True, method="stream").sum().backward()


def act(kind):
    """What befalls the victim."""
    if kind == "killed":
        time.sleep(0.2)  # others pass, too
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "still":
        time.sleep(2.5 * SHORT)
    else:
        raise ValueError("of the victim")


def at(owner, name, count, kind):
    """Lets something befall this rank as it comes to a step again, after `count` times."""
    step, left = getattr(owner, name), [count]

    def stepping(*x, **options):
        left[0] -= 1
        if left[0] == -1:
            act(kind)
        return step(*x, **options)

    setattr(owner, name, stepping)
    return lambda: setattr(owner, name, step)


def lost(rank, step, count, kind, is_device=False):
    owner, name = STEPS[step]
    with elsewhere(NODES, rank):
        if is_device:
            device_arena(seconds=SHORT / LATER)  # as NCCL waits longer than a device
        layout = td.contiguous(12)
        attended(layout)
        restore = at(owner, name, count, kind) if rank == VICTIM else None
        error = None
        try:
            for _ in range(1 + is_device):  # what a device finds is an error of the next call
                attended(layout)
        except (td.RankLost, td.RankMismatch, ValueError) as raised:
            error = raised
        if rank == VICTIM:
            # At the last barrier, all that it needs is there, however late it comes
            assert error is not None or kind == "still"
            assert kind != "raises" or isinstance(error, ValueError)
        else:
            check(error, count, kind, is_device)
        if kind == "killed":
            store = Store(rank, 3).store  # rank 0 has it, and may not end before the others
            store.add("ended", 1)
            assert rank or until(lambda: store.add("ended", 0) == 3, "all have raised")
            return
        if restore is not None:
            restore()
        if kind == "raises" and step:  # before the others wait for it, or after it sent
            assert rank == VICTIM or isinstance(error, td.RankMismatch)
            attended(layout)  # the group goes on
        again(rank)


def check(error, count, kind, is_device):
    """The victim, its node and the call are named, and no rank that only waited for it."""
    text = str(error)
    assert isinstance(error, td.RankLost if kind != "raises" else (td.RankLost, td.RankMismatch))
    if is_device:  # in the interpreter, a rank that waits for another of its node is not there
        assert f" {VICTIM} (node 1)" in text, text
        return
    assert f"rank {VICTIM} (node 1)" in text, text
    assert CALLS[count] in text or "raised ValueError: of the victim" in text, text
    assert not any(f"rank {x} (node {NODES[x]}) did" in text for x in (0, 1, 3)), text


def again(rank):
    """The group is destroyed and made again, on the same store."""
    store = Store(rank, 4)
    store.store.set_timeout(datetime.timedelta(seconds=DEADLINE))
    dist.destroy_process_group()
    store.made(dist.init_process_group, "gloo", store=store.store, rank=rank, world_size=4)
    attended(td.contiguous(12))


CASES = [
    (step, count, kind)
    for step in range(len(STEPS))
    for count in CALLS
    for kind in ("killed", "still", "raises")
]


@pytest.mark.parametrize("step, count, kind", sample_rows(CASES, (0, 0, "killed")))
def test_a_lost_rank_is_named_on_all_nodes(step, count, kind):
    killed = (VICTIM,) if kind == "killed" else ()
    run(lost, 4, step, count, kind, timeout=SHORT, killed=killed)


@pytest.mark.slow
@pytest.mark.parametrize("step, count", [(0, 0), (1, 1), (0, 2), (3, 0), (3, 2)])
def test_a_rank_that_is_killed_over_the_arena_of_gpus(step, count):
    run(lost, 4, step, count, "killed", True, timeout=SHORT, killed=(VICTIM,))


def other_calls(rank):
    """A rank that calls something else is named with its node, and the group goes on."""
    with elsewhere(NODES, rank):
        layout = td.contiguous(12)
        x = torch.randn(1, layout.tokens, 2, 8)
        for other in (1, 2):
            match = rf"rank {other} \(node {NODES[other]}\) called .*causal=True"
            with pytest.raises(td.RankMismatch, match=match):
                td.attention(x, x, x, layout=layout, causal=rank == other)
            td.attention(x, x, x, layout=layout)


def test_another_call_is_named_with_its_node():
    run(other_calls, 4)
