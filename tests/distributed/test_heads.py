"""Heads that are exchanged in groups, beside the attention of others, have the bits of one call."""

import pytest
import torch
import torch.distributed as dist
from helpers.device_arena import CPU, device_arena
from helpers.processes import run
from helpers.shards import FEATURES, NAMES, Case, compare, deals
from helpers.tiers import sample

import tilewise.distributed as td
from tilewise.distributed.methods import heads
from tilewise.distributed.methods.shard_call import ShardCall
from tilewise.distributed.transport import arena as arenas

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

CASES = (
    *("causal", "lse and sinks", "alibi", "headdim_v", "documents", "documents, much", "bf16"),
    *("documents, full, lse", "mask_mod", "empty", "fewer tokens than ranks"),
)


def grouped(rank, names):
    """Every group is a barrier of its own, and pulls go on beside the next one's attention."""
    heads.LEAST_ROWS = 1
    layouts = deals(Case(1, 1).seqlen, dist.group.WORLD)
    for name in names:
        case = Case(16, 8, **FEATURES[name])
        layout = next(layouts) if case.seqlen > 3 else td.zigzag(case.seqlen)
        compare(case, layout, name, NAMES, method="heads", deterministic=True)


@pytest.mark.parametrize("ranks", sample([2, 4], 2))
def test_groups_of_heads(ranks):
    run(grouped, ranks, CASES)


def on_device(rank):
    """The arena of GPUs, whose kernel copies what lies at multiples of 16 bytes."""
    arenas._arenas[dist.group.WORLD, CPU] = device_arena()
    grouped(rank, ["causal", "lse", "bf16, sinks"])


@pytest.mark.slow
def test_groups_over_the_arena_of_gpus():
    run(on_device, 2)


def halves(rank):
    """No half is written before what lies there was read: each barrier follows the arrival of all
    pulls of the barrier before.
    """
    heads.LEAST_ROWS = 1
    case, layout = Case(8, 4, causal=True), td.contiguous(173)
    case.run(
        lambda *x, **y: td.attention(*x, layout=layout, method="heads", **y), share=layout.shard
    )
    arena = arenas.arena_of(layout.group, CPU)
    events, marks = [], iter(range(100))
    meet = arena.meet
    arena.mark = lambda: events.append(mark := next(marks)) or mark
    arena.arrive = lambda mark: events.append(f"arrived {mark}")
    arena.meet = lambda signature: events.append("meet") or meet(signature)
    case.run(
        lambda *x, **y: td.attention(*x, layout=layout, method="heads", **y), share=layout.shard
    )
    behind = []  # marks of pulls since the last barrier
    for event in events:
        if event == "meet":
            assert not behind
        elif isinstance(event, int):
            behind.append(event)
        elif (mark := int(event.split()[1])) in behind:
            behind.remove(mark)
    assert not behind and events.count("meet") == 2 * 3  # forward and backward: one in, two back


def test_what_is_overwritten_was_read():
    run(halves, 2)


@pytest.mark.parametrize("nheads_k, batch, expected", [(8, 1, 2), (4, 1, 2), (2, 1, 1), (8, 2, 2)])
def test_groups_have_work_for_a_gpu(nheads_k, batch, expected):
    layout = td.zigzag(16384, 2)
    q, k = torch.empty(batch, 8192, 32, 8), torch.empty(batch, 8192, nheads_k, 8)
    spec = ShardCall(layout)
    groups = heads.groups_of(spec, q, k, k)
    assert len(groups) == expected
    assert sum(map(len, groups)) == nheads_k // 2
    short = ShardCall(td.zigzag(2048, 2))
    assert len(heads.groups_of(short, q[:1], k[:1], k[:1])) == 1
    odd = k[..., :3].bfloat16()  # a head of 6 bytes
    assert len(heads.groups_of(spec, q, odd, odd)) == 1
