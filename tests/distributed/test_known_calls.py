"""Calls whose arguments look like those of an earlier one: what the host still does for them,
counted with streams, the driver and kernels replaced; and that no call is taken for another.
"""

import collections
import gc
import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.absent_gpu import TOKENS, arena_without_gpu, counts
from helpers.device_arena import CPU, device_arena
from helpers.processes import run
from helpers.tiers import sample

import tilewise
import tilewise.distributed as td
from tilewise.distributed.api import known_calls
from tilewise.distributed.methods import stream
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.device_arena import DeviceArena

HEADS = 8, 4


@pytest.fixture
def gpu(monkeypatch):
    """A layout of two ranks whose arena has streams, and no GPU."""
    yield from arena_without_gpu(monkeypatch)


@pytest.fixture
def node(monkeypatch):
    """The same ranks as two nodes."""
    yield from arena_without_gpu(monkeypatch, nodes=True)


def inputs(learns=False):
    q, k, v = (
        torch.empty(1, TOKENS, n, 64, dtype=torch.bfloat16) for n in (HEADS[0], *[HEADS[1]] * 2)
    )
    return [x.requires_grad_(learns) for x in (q, k, v)]


def operators(call):
    """The operators of torch in a call."""
    with torch.autograd.profiler.profile(use_cpu=True) as profile:
        call()
    return collections.Counter(x.name for x in profile.function_events)


def warm(call):
    """What a call does that is the third of its kind, and its calls of Python."""
    for _ in range(2):
        call()
    counts.clear()
    calls = 0

    def profile(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    gc.disable()  # libraries are called back before and after a collection: hypothesis is
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return dict(counts), calls


@pytest.mark.parametrize("learns", [False, True])
def test_stream(gpu, learns):
    given = inputs(learns)
    found, calls = warm(lambda: td.attention(*given, layout=gpu, causal=True, method="stream"))
    assert found == {
        **dict(publish_kernel=1, attention=1, poison_kernel=1),
        **{"copy": 3, "write": 3, "recorded": 2, "waited for": 2},
    }
    assert calls < 145  # with those of what is replaced


@pytest.mark.parametrize("learns", [False, True])
def test_stream_between_nodes(node, learns, monkeypatch):
    """A launch and a call of NCCL's per group of heads, and one meeting of the hosts. Keys arrive
    where they are read.
    """
    monkeypatch.setattr(stream, "LEAST_ROWS", 4 * TOKENS)
    given = inputs(learns)

    def call():
        return td.attention(*given, layout=node, causal=True, method="stream")

    found, calls = warm(call)
    assert found == {
        **dict(copy_table_kernel=1, attention=2, poison_kernel=1),
        **dict(announced=1, met=1, exchanges=2, sent=2, received=2, recorded=1),
    }
    assert calls < 119
    of_torch = operators(call)
    assert of_torch["aten::slice"] + of_torch["aten::select"] <= 1, "groups are views"


def backward_of_stream(layout):
    """What a backward does whose forward is the third of its kind."""
    inputs_of_rank = inputs(True)
    dout = torch.empty_like(inputs_of_rank[0])

    def forward():
        return td.attention(*inputs_of_rank, layout=layout, causal=True, method="stream")

    outs = [forward() for _ in range(3)]
    return warm(lambda: torch.autograd.grad(outs.pop(), inputs_of_rank, dout))


def test_the_backward_of_stream(gpu):
    """K and V, and their parts, are summed in one launch."""
    found, calls = backward_of_stream(gpu)
    assert found == {
        **dict(publish_kernel=1, barrier_kernel=1, gradients=1, poison_kernel=1),
        **dict(sum_runs_kernel=2, sum_parts_kernel=1),
        **{"copy": 2, "recorded": 5, "waited for": 4},
    }
    assert calls < 345


def test_the_backward_of_many_runs(gpu):
    """Their keys are copied in one launch, however many they are."""
    layout = td.striped(2 * TOKENS, 2, block=64)
    object.__setattr__(layout, "group", "two ranks")
    found, calls = backward_of_stream(layout)
    assert found == {
        **dict(publish_kernel=1, copy_table_kernel=1, barrier_kernel=1, gradients=1),
        **dict(poison_kernel=1),
        **dict(sum_runs_kernel=1, sum_parts_kernel=1),
        **{"copy": 6, "recorded": 7, "waited for": 4},
    }
    assert calls < 365


def test_the_backward_of_stream_between_nodes(node):
    """A call of NCCL's for keys, and one for a slice of the parts of both gradients."""
    found, calls = backward_of_stream(node)
    assert found == {
        **dict(copy_table_kernel=1, gradients=1, poison_kernel=1),
        **dict(sum_runs_kernel=2, sum_parts_kernel=1),
        **dict(announced=2, met=2, exchanges=2, sent=2, received=2, copy=2),
        **{"recorded": 7, "waited for": 4},
    }
    assert calls < 380


@pytest.mark.parametrize("learns", [False, True])
def test_heads(gpu, learns):
    given = inputs(learns)
    found, calls = warm(lambda: td.attention(*given, layout=gpu, causal=True, method="heads"))
    assert found == {
        **dict(publish_kernel=3, copy_table_kernel=2, attention=2, poison_kernel=1),
        **{"copy": 8, "recorded": 7, "waited for": 7},
    }
    assert calls < 290


def test_heads_with_the_backward(gpu):
    """What is exchanged is looked up once."""
    given = inputs(learns=True)
    dout = torch.empty(given[0].shape, dtype=given[0].dtype)

    def call():
        out = td.attention(*given, layout=gpu, causal=True, method="heads")
        return torch.autograd.grad(out, given, dout)

    found, calls = warm(call)
    assert found == {
        **dict(publish_kernel=6, copy_table_kernel=4, attention=2, gradients=2, poison_kernel=2),
        **{"copy": 12, "recorded": 14, "waited for": 14},
    }
    assert calls < 610


def test_another_group_time_out_and_stream(gpu):
    """What is known is of one arena, and of the time-out with which a kernel was made."""
    given, asked = inputs(), dict(layout=gpu, causal=True, method="stream")
    arena = arenas._arenas["two ranks", CPU]
    td.attention(*given, **asked)
    counts.clear()
    arena.limit += 1
    td.attention(*given, **asked)
    assert counts["PreparedLaunch"] == 1 and not counts["sharded_call"]
    arena.raw = 6
    td.attention(*given, **asked)
    assert counts["current_stream"] == 1 and counts["PreparedLaunch"] == 1
    arenas._arenas["two ranks", CPU] = other = DeviceArena.__new__(DeviceArena)
    other.__dict__.update(arena.__dict__)
    td.attention(*given, **asked)
    assert counts["sharded_call"] == 1 and counts["PreparedLaunch"] == 2


def test_few_calls_are_kept(gpu, monkeypatch):
    """Their layouts are theirs, too."""
    monkeypatch.setattr(known_calls, "MOST", 2)
    known_calls._kept.clear()
    given = inputs()
    for window in (3, 5, 7, 3, 3):
        td.attention(*given, layout=gpu, window=(window, 0), method="stream")
    assert counts["sharded_call"] == 4 and len(known_calls._kept) == 2


def test_marks_are_waited_for_once(gpu):
    """A stream that has waited for a mark has waited for those before it."""
    arena = arenas._arenas["two ranks", CPU]
    arena.publish(64, "a call")
    counts.clear()
    first, second = arena.pull([(), ()], [])
    assert counts["recorded"] == 3 and counts["waited for"] == 1
    arena.arrive(second)
    arena.arrive(first)
    arena.arrive(second)
    assert counts["waited for"] == 2
    arena.arrive(*arena.pull([()], []))
    assert counts["waited for"] == 4


def alternating(rank, on_device):
    """Calls that differ in one thing, several times each, in turn."""
    group, seqlen = dist.group.WORLD, 173
    if on_device:
        arenas._arenas[group, CPU] = device_arena()
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, seqlen, n, 16, generator=draw) for n in (4, 2, 2)]
    sinks = torch.randn(4, generator=draw)
    layouts = [made(seqlen, group) for made in (td.zigzag, td.contiguous)]
    for turn, asked in itertools.product(range(3), ({}, dict(causal=True), dict(sinks=sinks))):
        scale = turn + 1.0  # other values of the same looks
        whole = [x * scale for x in inputs]
        asked = {name: x * scale if name == "sinks" else x for name, x in asked.items()}
        expected = tilewise.attention(*whole, return_lse=True, **asked)
        for layout, method in itertools.product(layouts, ("stream", "heads")):
            shards = [layout.shard(x).requires_grad_(turn == 1) for x in whole]
            known = dict(asked, layout=layout, method=method)
            out, lse = td.attention(*shards, return_lse=True, **known)
            assert torch.equal(out, layout.shard(expected[0])), (turn, layout.kind, method)
            assert torch.equal(lse, layout.shard(expected[1], 2)), (turn, layout.kind, method)
            assert torch.equal(out, td.attention(*shards, **known))
            assert out.requires_grad == (turn == 1)


@pytest.mark.parametrize("on_device", sample([False, True], False))
def test_calls_that_differ_in_one_thing(on_device):
    run(alternating, 2, on_device)


def test_a_layout_in_another_process_has_another_hash():
    layout = td.zigzag(64, 2)
    assert hash(layout) == hash(td.zigzag(64, 2)) and "_hash" not in layout.__getstate__()
