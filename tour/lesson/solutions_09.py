"""Answers to the exercises of lesson 09, and their checks."""

import torch

from . import Exercises, expect

exercises = Exercises("09")


def hadamard(x):
    """The last dimension, a power of two, in log2 steps of sums and differences."""
    size, width = x.shape[-1], 1
    while width < size:
        even, odd = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((even + odd, even - odd), -2).flatten(-3)
        width *= 2
    return x * size**-0.5


@exercises.check(1, hadamard)
def check_hadamard(answer):
    """Compares `answer(x)` with a product by Hadamard's matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        )
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 64):
        x = torch.randn(5, size, dtype=torch.float64, generator=generator)
        expected = x @ matrix[:size, :size] * size**-0.5
        expect(answer(x), expected, f"of {size} channels", atol=1e-12)
    one = torch.zeros(64, dtype=torch.float64)
    one[7] = 8.0
    expect(
        answer(one).abs(),
        torch.ones(64, dtype=torch.float64),
        "one outlier",
        atol=1e-12,
    )
    return "an outlier of 8 among 64 channels becomes 64 numbers of magnitude 1"


def shift_of_lse(q, k_mean, scale):
    """Every score of a query fell by scale * q . k_mean; so did its lse."""
    return scale * q @ k_mean


@exercises.check(2, shift_of_lse)
def check_shift_of_lse(answer):
    """Adds `answer(q, k_mean, scale)` to the lse of smoothed keys; compares."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(n, 16, generator=generator, dtype=torch.float64)
        for n in (6, 40)
    )
    k_mean = (k + 3).mean(0)
    true = (q @ (k + 3).T * 0.25).logsumexp(-1)
    found = (q @ (k + 3 - k_mean).T * 0.25).logsumexp(-1) + answer(q, k_mean, 0.25)
    expect(found, true, "the log-sum-exp", atol=1e-12)
    return "out needs no repair, and the log-sum-exp of 6 queries is exact"
