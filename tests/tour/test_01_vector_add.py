"""Lesson 01: the sum is torch's bit by bit, and a missing mask is caught."""

import pytest
import torch
from helpers.tiers import sample

pytest.importorskip("matplotlib")

from tour.lessons import Called, helper, run_lesson

from tilewise.testing import build, stats

NAME = "01_vector_add"


@pytest.fixture
def add(lesson):
    return lesson(NAME).module


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums(add, n, dtype):
    x, y = torch.randn(2, n).to(dtype)
    assert torch.equal(add.add(x, y, block=128), x + y)


def test_a_missing_mask_is_caught(lesson):
    assert "2 of 4 addresses lie outside the arguments" in lesson(NAME).printed


def test_offsets_and_masks(add):
    offsets, masks = add.offsets_of(n=5, block=4)
    assert offsets == [[0, 1, 2, 3], [4, 5, 6, 7]] and masks == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_what_is_timed_runs(tmp_path):
    ran = run_lesson(NAME, tmp_path, Called)
    assert "01_vector_add_bandwidth" in {picture.stem for picture in ran.pictures}


@pytest.mark.compile
@pytest.mark.parametrize("dtype", sample([torch.float32, torch.float16], torch.float32))
def test_its_kernels_compile(add, dtype):
    x = torch.empty(64, dtype=dtype)
    blocks = helper(NAME, "pictures").BLOCKS
    for block in (min(blocks), max(blocks)):
        kernel = build(add.add_kernel, x, x, x, 1 << 26, BLOCK=block)
        assert stats(kernel)["spill_stores"] == 0
    build(add.offsets_kernel, x.int(), x.int(), 10, BLOCK=4)
