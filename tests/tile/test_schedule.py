"""Every tile has one program, and under a causal mask the longest go first."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import features

from tilewise.testing import interpret
from tilewise.tile.schedule import key_tile, query_tile, query_tile_in_group
from tilewise.tile.types import Queue, Sizes


@triton.jit
def schedule_kernel(out, sizes, FEATURES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    tile = tl.program_id(0)
    if KEYS:
        block, head, batch = key_tile(tile, sizes, FEATURES, BLOCK)
    else:
        block, head, batch = query_tile(tile, sizes, FEATURES, BLOCK)
    tl.store(out + 3 * tile, batch)
    tl.store(out + 3 * tile + 1, head)
    tl.store(out + 3 * tile + 2, block)


def order(keys, causal, batch=3, nheads=4, group=2, lengths=(70, 100), block=32):
    """(batch, head, block) of each program in turn, and how many blocks a head has."""
    heads = nheads // group if keys else nheads
    blocks = -(-lengths[keys] // block)
    tiles = batch * heads * blocks
    out = torch.full((tiles, 3), -7)
    on = features(RIGHT=causal, GROUP=group)
    interpret(schedule_kernel)[(tiles,)](
        out, Sizes(0, nheads, *lengths), FEATURES=on, BLOCK=block, KEYS=keys
    )
    everything = list(itertools.product(range(batch), range(heads), range(blocks)))
    return [tuple(row) for row in out.tolist()], everything


@pytest.mark.parametrize("keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(70, 100), (32, 1), (1, 64)], ids=str)
def test_every_tile_once_and_heads_together(keys, causal, lengths):
    found, everything = order(keys, causal, lengths=lengths)
    assert sorted(found) == everything
    heads = [(batch, head) for batch, head, _ in found]
    runs = [head for head, _ in itertools.groupby(heads)]
    assert len(runs) == len(set(runs)), "a head's tiles are not neighbours"


def test_longest_first():
    """Causal: the last queries see the most keys, the first keys are seen by the most queries."""
    queries, _ = order(False, True)
    keys, _ = order(True, True)
    assert [block for _, _, block in queries[:3]] == [2, 1, 0]
    assert [block for _, _, block in keys[:4]] == [0, 1, 2, 3]


@triton.jit
def queue_kernel(out, queue, seqlen_q, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    block, head, batch = query_tile_in_group(tile, queue, seqlen_q, BLOCK)
    tl.store(out + 3 * tile, batch)
    tl.store(out + 3 * tile + 1, head)
    tl.store(out + 3 * tile + 2, block)


def handed_out(batch, nheads, blocks, l2_group):
    """(batch, head, block) in the order of the counter."""
    tiles = batch * nheads * blocks
    out = torch.full((tiles, 3), -7)
    queue = Queue(torch.zeros(1), tiles, nheads, batch * nheads, l2_group)
    interpret(queue_kernel)[(tiles,)](out, queue, 32 * blocks - 5, BLOCK=32)
    return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize("l2_group", [1, 2, 4, 6])
def test_queue_hands_out_every_tile_once(l2_group):
    found = handed_out(2, 3, 5, l2_group)
    assert sorted(found) == list(itertools.product(range(2), range(3), range(5)))


def test_queue_order():
    """Groups of two heads, the last group one; the longest tiles first in each."""
    found = handed_out(1, 3, 2, l2_group=2)
    heads_and_blocks = [(head, block) for _, head, block in found]
    assert heads_and_blocks == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (2, 0)]
