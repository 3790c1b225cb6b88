"""Lesson 08: its kernels against torch, its bits, and its pictures."""

import pytest
import torch
from tour.lessons import helper

NAME = "08_decoding"
pictures = helper(NAME, "pictures")


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    _, said, pictures, _ = ran
    assert "decode, 4 heads share one                4 FLOPs per byte,   2.4 %" in said
    assert "sequence 0, 700 keys in 6 splits" in said
    assert "40 tokens one by one, at once, and without a cache: the same bits" in said
    assert [path.stem for path in pictures] == ["08_bits", "08_pages", "08_roofline"]


def test_bits_are_those_of_the_prose(ran):
    found = ran.module.found
    changed = {name: (rows != rows[0]).any(1).tolist() for name, rows in found.items()}
    assert changed["fixed"] == [False] * 6
    assert changed["by_batch"] == [False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("split_size", "page_size", "group"), [(64, 7, 1), (100, 1, 16), (1000, 64, 3)]
)
def test_the_kernels_are_right(ran, split_size, page_size, group):
    module, lengths = ran.module, (201, 1, 64)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    keys, values = ([draw(n, 2, 16) for n in lengths] for _ in "kv")
    q = draw(3, 2 * group, 16)
    (k, table), (v, _) = (pictures.in_pages(x, page_size) for x in (keys, values))
    used = torch.tensor(lengths, dtype=torch.int32)
    out = module.decode(q, k, v, table, used, split_size)
    for b, (one_k, one_v) in enumerate(zip(keys, values)):
        s = torch.einsum("hd,nhd->hn", q[b], one_k.repeat_interleave(group, 1)) * 0.25
        expected = torch.einsum("hn,nhd->hd", s.softmax(-1), one_v.repeat_interleave(group, 1))
        torch.testing.assert_close(out[b], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_what_a_gpu_would_time_runs(ran):
    calls = pictures.steps(ran.module.decode, length=256)
    assert list(calls) == pictures.NAMES
    assert calls["splits of 128"]().shape == (1, 32, 128)
    assert calls["tilewise"]().shape == (1, 1, 32, 128)
