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


def unequal(rank):
    """Where query heads share no keys, the first group and the last are small."""
    heads.LEAST_ROWS = heads.LEAST_OUTER_ROWS = 1
    layouts = deals(Case(1, 1).seqlen, dist.group.WORLD)
    for name in ("causal", "lse and sinks", "bf16"):
        case = Case(12, 12, **FEATURES[name])
        compare(case, next(layouts), name, NAMES, method="heads", deterministic=True)


def test_unequal_groups():
    run(unequal, 2)


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
    """No half is written before what lies there was read: each barrier of what was published in
    another half follows the arrival of all pulls before.
    """
    heads.LEAST_ROWS = 1
    case, layout = Case(8, 4, causal=True), td.contiguous(173)
    case.run(
        lambda *x, **y: td.attention(*x, layout=layout, method="heads", **y), share=layout.shard
    )
    arena = arenas.arena_of(layout.group, CPU)
    events, marks = [], iter(range(100))
    meet, publish = arena.meet, arena.publish
    arena.publish = lambda *x: events.append("publish") or publish(*x)
    arena.mark = lambda: events.append(mark := next(marks)) or mark
    arena.arrive = lambda mark: events.append(f"arrived {mark}")
    arena.meet = lambda signature: events.append("meet") or meet(signature)
    case.run(
        lambda *x, **y: td.attention(*x, layout=layout, method="heads", **y), share=layout.shard
    )
    behind, is_other = [], False  # marks of pulls that have not arrived
    for event in events:
        if event == "publish":
            is_other = True
        elif event == "meet":
            assert not (behind and is_other)
            is_other = False
        elif isinstance(event, int):
            behind.append(event)
        else:  # copies are made in order
            behind = [mark for mark in behind if mark > int(event.split()[1])]
    assert not behind
    # Forward and backward: a half, and two back
    assert events.count("publish") == events.count("meet") == 2 * 3


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


@pytest.mark.parametrize(
    "tokens, ends", [(16384, [0, 2, 6, 8]), (32768, [0, 2, 7, 8]), (4096, [0, 8])]
)
def test_small_groups_first_and_last(tokens, ends):
    """Where no query heads share keys, and the small groups have work for a GPU."""
    spec, q = ShardCall(td.zigzag(tokens, 2)), torch.empty(1, tokens // 2, 16, 8)
    assert [x.stop for x in heads.groups_of(spec, q, q, q)] == ends[1:]
