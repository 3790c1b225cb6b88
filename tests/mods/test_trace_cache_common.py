"""Common masks and score functions are traced once, and their bytecode is read once."""

import math
import operator

import pytest
import torch

from tilewise import mods
from tilewise.mods import bytecode, scores, trace, trace_cache

LIMIT = 3


def common():
    """Masks and score functions as docs, tour and FlexAttention's users write them."""
    ids = torch.zeros(2, 64, dtype=torch.int32)
    slopes = torch.ones(4)
    prefix = torch.tensor([3, 4], dtype=torch.int32)
    reach, dim, left = 5, 0, None
    sliding = mods.sliding_window(3, 0)

    def window(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        near = q_idx - kv_idx <= reach
        return causal & near

    def one_side(b, h, q_idx, kv_idx):
        keep = q_idx >= kv_idx
        if left is not None:
            keep = keep & (kv_idx >= q_idx - left)
        return keep

    def helped(b, h, q_idx, kv_idx):
        return window(b, h, q_idx, kv_idx) | (kv_idx < 2)

    def tanh(score, b, h, q_idx, kv_idx):
        return reach * torch.tanh(score / reach)

    def hidden(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    masks = {
        "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        "window": window,
        "one side": one_side,
        "helped": helped,
        "near": lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < LIMIT,
        "torch's abs": lambda b, h, q_idx, kv_idx: torch.abs(q_idx - kv_idx) < LIMIT,
        "documents": lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx],
        "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < prefix[b]) | (kv_idx <= q_idx),
        "dilated": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0,
        "default": lambda b, h, q_idx, kv_idx, n=3: kv_idx < n,
        "joined": lambda b, h, q_idx, kv_idx: sliding(b, h, q_idx, kv_idx) | (kv_idx < 4),
        "chosen": lambda b, h, q_idx, kv_idx: mods.where(q_idx > 3, kv_idx, q_idx) < 9,
        "most": lambda b, h, q_idx, kv_idx: mods.maximum(q_idx, kv_idx) < max(3, reach),
        "shape": lambda b, h, q_idx, kv_idx: kv_idx < ids.shape[1] - ids.size(dim),
        "bits": lambda b, h, q_idx, kv_idx: operator.and_(q_idx, 3) == math.floor(2.5),
    }
    functions = {
        "capped": tanh,
        "hidden": hidden,
        "alibi": lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (kv_idx - q_idx),
        "scaled": lambda s, b, h, q_idx, kv_idx: s * math.sqrt(2) + math.pi,
        "nothing below": lambda s, b, h, q_idx, kv_idx: mods.where(q_idx < kv_idx, -math.inf, s),
    }
    rows = [(mods.mask, name, function) for name, function in masks.items()]
    return rows + [(scores.score, name, function) for name, function in functions.items()]


@pytest.mark.parametrize(
    ("make", "function"),
    [row[::2] for row in common()],
    ids=[row[1] for row in common()],
)
def test_common_functions_are_traced_once(make, function, monkeypatch):
    first = make(function)

    def refuse(*_):
        raise AssertionError("traced, or its bytecode read, again")

    monkeypatch.setattr(trace, "trace", refuse)
    monkeypatch.setattr(mods, "trace", refuse)
    monkeypatch.setattr(scores, "trace", refuse)
    monkeypatch.setattr(trace_cache, "reads_in", refuse)
    assert all(make(function) is first for _ in range(3))


def test_a_function_of_any_arguments_is_kept_for_one_of_its_uses():
    both = lambda *xs: xs[0] * 1.0 if len(xs) == 5 else xs[2] >= xs[3]  # noqa: E731
    for _ in range(2):
        assert isinstance(mods.mask(both), mods.Mask)
        assert isinstance(scores.score(both), mods.ScoreMod)


def test_an_unknown_instruction_proves_nothing(monkeypatch):
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    assert bytecode.reads_in(causal.__code__) == ()
    monkeypatch.setattr(bytecode, "OWN", bytecode.OWN - {"COMPARE_OP"})
    assert bytecode.reads_in(causal.__code__) is None
