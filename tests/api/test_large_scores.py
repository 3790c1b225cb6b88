"""Scores past what a multiply-add of kernels holds: one-hot on the CPU, on a GPU an error."""

import pytest
import torch

from tilewise import ArgumentError, attention
from tilewise.frontend.values import LARGEST_SCORE, check_scores
from tilewise.problem import Scalars


def rows(size, seqlen=8, dtype=torch.float32, device="cpu"):
    """Of q and k, whose largest score is size**2, that of a query and its own key."""
    return torch.eye(seqlen, dtype=dtype, device=device)[None, :, None] * size


@pytest.mark.parametrize("size", [4e4, 1e6, 1e15])
def test_one_hot_on_the_cpu(size):
    x, v = rows(size), torch.randn(1, 8, 1, 4)
    torch.testing.assert_close(attention(x, x, v, scale=1.0), v, rtol=0, atol=0)


def test_norms_that_allow_too_much_are_refused():
    x = rows(LARGEST_SCORE**0.5)
    check_scores(x, x, Scalars(0.99))
    with pytest.raises(ArgumentError, match=r"above 2\^27 may give NaN"):
        check_scores(x, x, Scalars(1.01))
    check_scores(x, x, Scalars(1.01, softcap=50.0))  # which bounds them
    with pytest.raises(ArgumentError, match=r"above 2\^27 may give NaN"):
        check_scores(x, x, Scalars(1.01, softcap=2.0**28))
    check_scores(x[:, :0], x, 1e9)
    check_scores(x * float("nan"), x, Scalars(1e9))  # NaN is no large score


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_below_the_limit_on_a_gpu(dtype, monkeypatch):
    """Right below it, and an error past it if asked."""
    v = torch.randn(1, 8, 1, 8, device="cuda", dtype=dtype)
    x = rows(2.0**13.5, dtype=dtype, device="cuda")
    torch.testing.assert_close(attention(x, x, v, scale=0.99), v, rtol=2e-2, atol=0)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    attention(x, x, v, scale=0.99)
    with pytest.raises(ArgumentError, match=r"above 2\^27 may give NaN"):
        attention(x, x, v, scale=1.5)
