"""Hopper's forward of runs whose keys arrive, which no GPU has run, instruction by instruction."""

import pytest
import torch
from helpers.call_specs import call_of, launch_runs

import tilewise
import tilewise.distributed as td
from ptx import executing
from tilewise.distributed.methods import one_launch
from tilewise.kernels.common.device_words import ARRIVED, FAILED, LATE, WORDS
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.slow
SEQLEN, BF16 = 330, torch.bfloat16
CASES = {
    "causal": (64, 1, dict(causal=True)),
    "window": (64, 2, dict(causal=True, window=(100, 0))),
    "full": (128, 2, {}),
}


class Arena:
    """What a launch asks of an arena."""

    def __init__(self, limit, arrived=0):
        self.limit, self.words = limit, torch.zeros(WORDS, dtype=torch.int32)
        self.words[ARRIVED] = arrived


def launched(arena, headdim, groups, seed, patch, **options):
    """(out, lse) of rank 1 of 2, all of whose keys are in memory, and the tensors of the call."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, n, headdim, generator=draw).to(BF16) for n in (4, 2, 2))
    layout = td.zigzag(SEQLEN, 2).at(1)
    mine, *local = (layout.shard(x) for x in (q, k, v))
    spec = call_of(layout, mine, *local, **options)
    found = [
        x.transpose(0, 1).unflatten(2, (groups, -1)).movedim(2, 0).contiguous() for x in (k, v)
    ]
    one_launch._forward_of.cache_clear()
    with executing(patch, seed=seed, strict=True), use_emulator():
        out = launch_runs(arena, spec, mine, *local, pulled=found)
        return out, (layout, q, k, v)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", CASES)
def test_keys_that_have_arrived(name, seed, monkeypatch):
    headdim, groups, options = CASES[name]
    arena = Arena(10**12, arrived=10**6)
    found, (layout, q, k, v) = launched(arena, headdim, groups, seed, monkeypatch, **options)
    oracle = tilewise.attention_reference(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    plain = tilewise.attention_reference(q, k, v, return_lse=True, upcast=False, **options)
    for mine, exact, rough, side in zip(found, oracle, plain, (("out", 1), ("lse", 2))):
        name, dim = side
        assert_within(mine, layout.shard(exact, dim), layout.shard(rough, dim), name)
    assert arena.words[FAILED] == 0


def test_a_wait_ends(monkeypatch):
    """Of pieces that never come the kernel leaves the number, and ends."""
    arena = Arena(limit=5000)
    launched(arena, 64, 1, 0, monkeypatch, causal=True)
    assert arena.words[FAILED] == 1 and arena.words[LATE] > 0
