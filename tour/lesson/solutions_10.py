"""Answers to the exercises of lesson 10, and their checks."""

from tilewise.distributed.layouts.work import Band, Span, keys_of

from . import Exercises, expect

exercises = Exercises("10")


def chunks_of(rank, ranks):
    """One from the front and its mirror image: the sum of both is always the same.

    Chunk i sees i whole chunks before it and half of its own, so two chunks whose
    numbers add up to 2 * ranks - 1 have the same work on every rank.
    """
    return rank, 2 * ranks - 1 - rank


@exercises.check(1, chunks_of)
def check_chunks(answer):
    """Counts tiles of `answer(rank, ranks)`, chunks of 4 tiles, on 1 to 8 ranks."""
    for ranks in (1, 2, 3, 4, 8):
        chunks = [tuple(answer(rank, ranks)) for rank in range(ranks)]
        every = sorted(i for pair in chunks for i in pair)
        expect(every, list(range(2 * ranks)), f"{ranks} ranks, all chunks")
        expect(
            [x == tuple(sorted(x)) for x in chunks],
            [True] * ranks,
            f"{ranks} ranks, in order",
        )
        blocks = [[4 * i + j for i in pair for j in range(4)] for pair in chunks]
        counts = [sum(m_block + 1 for m_block in mine) for mine in blocks]
        expect(counts, [counts[0]] * ranks, f"{ranks} ranks, tiles of each")
    return f"{counts[0]} tiles on each of 8 ranks"


def rows_to_pull(runs, window):
    """Keys that some query sees, without the rank's own; each is pulled once."""
    own = {i for start, stop in runs for i in range(start, stop)}
    seen = {j for i in own for j in range(max(0, i - window), i + 1)}
    return len(seen - own)


@exercises.check(2, rows_to_pull)
def check_rows_to_pull(answer):
    """Compares `answer(runs, window)` with what the library pulls."""
    cases = (
        ([(0, 100)], 30),  # nothing comes before
        ([(100, 200)], 30),
        ([(10, 20)], 30),  # only 10 keys come before
        ([(0, 50), (60, 100)], 30),  # the window reaches a run that the rank has
        ([(40, 60), (70, 80), (300, 310)], 500),
        ([], 8),
    )
    for runs, window in cases:
        spans = [Span(0, start, stop, 0, 1000) for start, stop in runs]
        seen = sum(stop - start for start, stop in keys_of(spans, Band(window, 0)))
        own = sum(stop - start for start, stop in runs)
        expect(
            answer(list(runs), window), seen - own, f"runs {runs}, window {window}"
        )
    return f"{len(cases)} lists of runs; windows overlap, or begin before key 0"
