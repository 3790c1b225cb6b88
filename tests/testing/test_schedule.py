"""The scheduler in plain Python: every tile has one number, and a counter levels out the end."""

import itertools
import random

import pytest

from tilewise.testing.schedule import busy, key_blocks, makespan, simulate, tiles


def test_worked_example():
    found = [(tile.tile, tile.batch) for tile in tiles([160, 300], 1, 128)]
    assert found == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_every_tile_once_and_by_the_formula(num_splits, longest_first):
    lengths, nheads, block = [160, 0, 300, 1, 128, 0], 3, 128
    blocks = [-(-length // block) for length in lengths]
    found = list(tiles(lengths, nheads, block, num_splits, longest_first))
    everything = {
        (batch, head, m_block, split)
        for batch in range(len(lengths))
        for head, m_block, split in itertools.product(
            range(nheads), range(blocks[batch]), range(num_splits)
        )
    }
    assert [tile.tile for tile in found] == list(range(len(everything)))
    assert {tile[1:] for tile in found} == everything
    for tile, batch, head, m_block, split in found:
        place = blocks[batch] - 1 - m_block if longest_first else m_block
        number = place + head * blocks[batch] + nheads * sum(blocks[:batch])
        assert tile == number * num_splits + split


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_processor_runs_one_tile_at_a_time(dynamic, seed):
    draw = random.Random(seed)
    costs = [draw.randrange(1, 30) for _ in range(draw.randrange(80))]
    processors = draw.randrange(1, 9)
    runs = simulate(costs, processors, dynamic)
    assert [run.tile for run in runs] == list(range(len(costs)))
    assert [run.stop - run.start for run in runs] == costs
    for processor in range(processors):
        mine = [run for run in runs if run.processor == processor]
        ends = [0, *(run.stop for run in mine)]
        assert [run.start for run in mine] == ends[:-1]  # no processor waits while tiles are left
    if costs:
        assert sum(costs) / processors <= makespan(runs) <= sum(costs)
        assert busy(runs, processors) == sum(costs) / processors / makespan(runs)


def test_static_goes_round():
    assert [run.processor for run in simulate([5, 1, 1, 9, 1], 3, dynamic=False)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_is_never_later_with_the_longest_first(seed):
    draw = random.Random(seed)
    costs = sorted((draw.randrange(1, 100) for _ in range(draw.randrange(1, 90))), reverse=True)
    processors = draw.randrange(1, 17)
    static, dynamic = (makespan(simulate(costs, processors, way)) for way in (False, True))
    assert dynamic <= static


def test_longest_first_levels_out_the_end():
    """One causal head: in order the longest tile starts last, and all SMs wait for it."""
    ends = []
    for longest_first in (False, True):
        order = tiles([4096], 1, 128, longest_first=longest_first)
        costs = [key_blocks(4096, tile.m_block, 128, causal=True) for tile in order]
        ends.append(makespan(simulate(costs, 8, dynamic=True)))
    assert ends[1] < ends[0]


def test_nothing_to_do():
    assert list(tiles([], 2, 128)) == list(tiles([0, 0], 2, 128)) == []
    assert simulate([], 4, dynamic=True) == []
    assert makespan([]) == 0
