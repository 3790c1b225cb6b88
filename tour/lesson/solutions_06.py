"""Answers to the exercises of lesson 06, and their checks."""

from tilewise.testing.schedule import makespan, simulate, tiles

from . import Exercises, expect

exercises = Exercises("06")


def find(tile, lengths, nheads, block):
    """(batch, head, block) of a tile number, or None past the last tile."""
    for batch, length in enumerate(lengths):
        blocks = -(-length // block)
        if tile < blocks * nheads:
            head, m_block = divmod(tile, blocks)
            return batch, head, m_block
        tile -= blocks * nheads
    return None


@exercises.check(1, find)
def check_find(answer):
    """Compares `answer(tile, lengths, nheads, block)` with a list of all tiles."""
    for lengths in ([160, 300], [70, 0, 1, 130, 64, 0], [0, 5]):
        for nheads in (1, 2, 3):
            numbered = list(tiles(lengths, nheads, 64))
            where = f"lengths {lengths}, {nheads} heads"
            for tile, batch, head, m_block, _ in numbered:
                found = answer(tile, lengths, nheads, 64)
                expect(found, (batch, head, m_block), f"tile {tile}, {where}")
            found = answer(len(numbered), lengths, nheads, 64)
            expect(found, None, f"tile {len(numbered)}, past the last, {where}")
    return "every tile of three batches, empty sequences among them"


def static_order(costs, processors):
    """Costs in an order for processors that take i, i + P, ...: all end early.

    Sorted, in rounds of one tile a processor; every other round is reversed, so
    that the processor with the longest tile of one round has the shortest of the
    next.
    """
    longest_first = sorted(costs, reverse=True)
    rounds = [
        longest_first[i : i + processors] for i in range(0, len(costs), processors)
    ]
    return [
        cost
        for i, each in enumerate(rounds)
        for cost in (each[::-1] if i % 2 else each)
    ]


@exercises.check(2, static_order)
def check_static_order(answer):
    """Runs `answer(costs, processors)`, statically: at most 5 % over the bound."""
    causal = [block + 1 for _ in range(2) for block in range(32)]
    for costs, processors in (
        ([9, 1, 8, 2, 7, 3, 6, 4], 4),
        (causal, 7),
        (causal, 8),
    ):
        ordered = list(answer(list(costs), processors))
        where = f"{len(costs)} tiles on {processors} processors"
        expect(sorted(ordered), sorted(costs), f"{where}, the tiles sorted")
        bound = max(-(-sum(costs) // processors), max(costs))
        done = makespan(simulate(ordered, processors, dynamic=False))
        limit = int(1.05 * bound)
        assert done <= limit, f"{where}: done at {done}, at most {limit} is allowed"
    return f"done at {done} where no order is done before {bound}"
