"""The processes of tests: one that ends before it can say why is no success."""

import os

import pytest
from helpers.processes import run


def ends(rank):
    os._exit(rank)


def test_a_rank_that_says_nothing():
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        run(ends, 2)
