"""Samples of `make test`."""

import itertools

from helpers.tiers import pairwise


def test_each_pair_of_values_is_in_a_fast_row():
    axes = "abcde", [None, 3], (True, False), range(3)
    rows = pairwise(*axes)
    fast = [row.values for row in rows if not row.marks]
    assert [row.values for row in rows] == list(itertools.product(*axes))
    for i, j in itertools.combinations(range(4), 2):
        assert {(x[i], x[j]) for x in fast} == set(itertools.product(axes[i], axes[j]))
    assert len(fast) < 20 < len(rows)
