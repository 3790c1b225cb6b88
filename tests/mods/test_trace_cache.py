"""A function is traced once, and again when something that it reads is another."""

import gc
import math

import pytest
import torch

import tilewise
from tilewise import mods, scores
from tilewise.mods import trace_cache

LIMIT = 5


def test_traced_once():
    def near(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < LIMIT

    assert mods.mask(near) is mods.mask(near)

    def capped(score, b, h, q_idx, kv_idx):
        return 30 * torch.tanh(score / 30)

    assert scores.score(capped) is scores.score(capped)


def test_a_captured_number_tells():
    width = 3
    mask = lambda b, h, q_idx, kv_idx: kv_idx < width  # noqa: E731
    first = mods.mask(mask)
    width = 4
    assert mods.mask(mask).key != first.key
    width = 3
    assert mods.mask(mask).key == first.key


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, 1.0), (1, True), (2.0, math.inf)], ids=str)
def test_numbers_that_are_only_equal_tell(values):
    shift = values[0]
    score = lambda score, b, h, q_idx, kv_idx: score / (kv_idx + 1) + shift  # noqa: E731
    first = trace_cache.reads_of(score)
    shift = values[1]
    assert trace_cache.reads_of(score) != first


def test_a_global_number_tells(monkeypatch):
    mask = lambda b, h, q_idx, kv_idx: kv_idx < LIMIT  # noqa: E731
    first = mods.mask(mask)
    monkeypatch.setitem(globals(), "LIMIT", 6)
    assert mods.mask(mask).key != first.key


def test_a_captured_tensor_tells():
    table = torch.zeros(4, dtype=torch.int32)
    mask = lambda b, h, q_idx, kv_idx: table[h] < kv_idx  # noqa: E731
    first = mods.mask(mask)
    assert mods.mask(mask) is first
    table.fill_(1)  # what lies in it is read by the kernel
    assert mods.mask(mask) is first
    table = torch.ones(4, dtype=torch.int32)
    assert mods.mask(mask).tensors[0] is table


def test_a_default_tells():
    def mask(b, h, q_idx, kv_idx, width=3):
        return kv_idx < width

    first = mods.mask(mask)
    mask.__defaults__ = (4,)
    assert mods.mask(mask).key != first.key


def test_what_cannot_be_seen_is_traced_each_time():
    class Settings:
        width = 3

    mask = lambda b, h, q_idx, kv_idx: kv_idx < Settings.width  # noqa: E731
    first = mods.mask(mask)
    Settings.width = 4
    assert mods.mask(mask).key != first.key

    widths = [3]
    mask = lambda b, h, q_idx, kv_idx: kv_idx < widths[0]  # noqa: E731
    first = mods.mask(mask)
    widths[0] = 4
    assert mods.mask(mask).key != first.key

    def width():
        return Settings.width

    mask = lambda b, h, q_idx, kv_idx: kv_idx < width()  # noqa: E731
    first = mods.mask(mask)
    Settings.width = 5
    assert mods.mask(mask).key != first.key

    mask = lambda b, h, q_idx, kv_idx: kv_idx < (lambda: Settings.width)()  # noqa: E731
    assert trace_cache.reads_of(mask) is None


def test_nothing_keeps_a_function_alive():
    def traced():
        table = torch.zeros(4, dtype=torch.int32)
        mods.mask(lambda b, h, q_idx, kv_idx: table[h] < kv_idx)

    gc.collect()
    before = len(trace_cache._traces)
    traced()
    gc.collect()
    assert len(trace_cache._traces) == before


def test_what_was_computed_from_a_tensor_is_not_kept():
    """Its value then is no part of what the function reads."""
    table, start = torch.zeros(2, 8), torch.tensor(0)
    for function in (
        lambda score, b, h, q_idx, kv_idx: score + table.exp()[h, kv_idx],
        lambda score, b, h, q_idx, kv_idx: score + table[1][kv_idx],
        lambda score, b, h, q_idx, kv_idx: score + start.item(),
        lambda score, b, h, q_idx, kv_idx: score * float(start),
    ):
        assert scores.score(function) is not scores.score(function)


def test_a_shape_is_no_computation():
    table = torch.zeros(2, 8)
    function = lambda b, h, q_idx, kv_idx: kv_idx < table.shape[1] - table.size(0)  # noqa: E731
    assert mods.mask(function) is mods.mask(function)


def test_a_learned_tensor_learns_after_a_call_without_gradients():
    log_slopes = torch.zeros(2, requires_grad=True)
    q = torch.randn(1, 8, 2, 4)
    score = lambda s, b, h, q_idx, kv_idx: s + log_slopes.exp()[h] * (kv_idx - q_idx)  # noqa: E731
    with torch.no_grad():
        tilewise.attention(q, q, q, score_mod=score)
    for _ in range(2):
        log_slopes.grad = None
        tilewise.attention(q, q, q, score_mod=score).square().sum().backward()
        assert log_slopes.grad.abs().min() > 0
