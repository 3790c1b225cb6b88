"""Lesson 00: the probes copy and read what they should, the counts are right, the roof is drawn."""

import pytest
import torch

pytest.importorskip("matplotlib")

from tour.lessons import Called, helper, run_lesson

from tilewise.testing import build, stats

NAME = "00_gpu"


@pytest.fixture
def gpu(lesson):
    return lesson(NAME).module


def test_figures_are_named_or_missed(lesson):
    printed = lesson(NAME).printed
    assert ("figures are from: " in printed and "ridge" not in printed) or "recorded" in printed


@pytest.mark.parametrize("stride", [1, 3, 64])
def test_a_strided_copy(gpu, stride):
    x = torch.randn(777)
    assert torch.equal(gpu.strided_copy(x, stride, block=64), x[::stride])


def test_reading_reads_all(gpu):
    x = torch.arange(100.0)
    sums = gpu.read(x, torch.empty(4), block=32)
    assert sums.tolist() == [x[start : start + 32].sum().item() for start in range(0, 100, 32)]


def test_sectors(gpu):
    assert [gpu.sectors_of_a_warp(stride) for stride in (0, 1, 2, 8, 100)] == [1, 4, 8, 32, 32]
    assert gpu.sectors_of_a_warp(1, itemsize=2) == 2


def test_counts(gpu):
    assert gpu.add_counts(10) == (10, 120)
    assert gpu.matmul_counts(4) == (128, 96)
    fused = gpu.attention_counts(1024, 64, 2, stores_scores=False)
    stored = gpu.attention_counts(1024, 64, 2, stores_scores=True)
    assert fused == (4 * 2 * 1024**2 * 64, 2 * 4 * 2 * 1024 * 64)
    assert fused[0] == stored[0] and stored[1] - fused[1] == 2 * 4 * 2 * 1024**2


def test_what_the_roofline_times_is_what_is_counted(gpu, monkeypatch):
    pictures = helper(NAME, "pictures")
    assert gpu.operations == {
        "vector add": gpu.add_counts(pictures.ADDED),
        "softmax": gpu.softmax_counts(pictures.ROWS, pictures.COLUMNS),
        "standard attention": gpu.attention_counts(4096, 128, pictures.HEADS, True),
        "fused attention": gpu.attention_counts(pictures.SEQLEN, pictures.HEADDIM, 16, False),
        "matmul": gpu.matmul_counts(pictures.SIDE),
    }
    for name, size in dict(ADDED=8, ROWS=4, COLUMNS=8, SIDE=16, SEQLEN=32, HEADS=2).items():
        monkeypatch.setattr(pictures, name, size)
    calls = pictures.measured_calls()
    assert calls.keys() == gpu.operations.keys()
    assert all(call().isfinite().all() for call in calls.values())


def test_what_is_timed_runs(tmp_path):
    ran = run_lesson(NAME, tmp_path, Called)
    assert "read bandwidth: 2.15 TB/s" in ran.printed and "the ridge" in ran.printed


@pytest.mark.compile
def test_its_kernels_compile(gpu):
    x = torch.empty(64)
    built = [
        build(gpu.strided_copy_kernel, x, x, 64, 7, BLOCK=1024),
        build(gpu.read_kernel, x, x, 1 << 29, BLOCK=4096),
        build(gpu.nothing_kernel, x),
    ]
    assert all(stats(kernel)["spill_stores"] == 0 for kernel in built)
    assert "ld.global" in built[1].asm["ptx"]
