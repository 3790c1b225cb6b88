"""Lesson 04: the kernel at shapes that the lesson does not try, and its counts."""

import sys

import pytest
import torch
from tour.lessons import Called, Invented, helper

NAME = "04_flash_attention"
pytestmark = pytest.mark.slow  # the lesson computes in an interpreter


pictures = helper(NAME, "pictures")


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    for kind in ("full", "causal"):
        assert f"FlashAttention-2, {kind}: off by 0.00" in ran.printed
    assert {path.name for path in ran.pictures} == {"04_steps.png", "04_memory.png"}


# seqlen, block of queries, block of keys
SHAPES = [(1, 16, 16), (64, 64, 32), (65, 32, 64), (100, 16, 64), (129, 64, 16)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen, block_m, block_n", SHAPES)
def test_the_kernel_at_other_tiles(ran, seqlen, block_m, block_n, causal):
    module, _, _, _ = ran
    q, k, v = module.make_qkv(1, 2, seqlen, 32)
    exact = module.standard_attention(q.double(), k.double(), v.double(), causal)
    plain = module.standard_attention(q, k, v, causal)
    out, lse = module.fa2(q, k, v, causal, (block_m, block_n), return_lse=True)
    module.assert_within(out, exact, plain, "FA2")
    s = q.double() @ k.double().mT * 32**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), float("-inf"))
    assert (lse - torch.logsumexp(s, -1)).abs().max() < 1e-4


def test_every_step_of_standard_attention_is_bound_by_memory():
    for flops, size in pictures.step_counts(64 * 16, 1024, 64).values():
        assert flops / pictures.FLOPS < size / pictures.BANDWIDTH


def test_recorded_experiments_are_shown(ran):
    """The rows of `bench blocks` and `bench memory`."""
    assert "128 x 128      8        255" in ran.printed and "535" in ran.printed
    assert "standard: 1024: 68" in ran.printed and "tilewise: 1024: 4" in ran.printed


def test_what_a_gpu_would_time_runs(monkeypatch):
    monkeypatch.setattr(pictures, "GPT2", pictures.GPT2 | dict(batch=1, nheads=1, seqlen=48))
    calls = pictures.the_steps()
    assert list(calls) == [*pictures.PARTS, pictures.FUSED]
    assert [call().shape[-2:] for call in calls.values()] == [(48, 48)] * 4 + [(48, 64)] * 2


def test_what_a_gpu_would_measure_of_tiles_and_memory(ran, tmp_path, monkeypatch, capsys):
    """With a GPU's branches, at sizes of an interpreter; a test's clock and allocator."""
    module = ran.module
    monkeypatch.setattr(pictures, "ON_GPU", True)
    monkeypatch.setattr(pictures, "HEADS", 1)
    monkeypatch.setattr(sys.modules["lesson"], "PICTURES", tmp_path)
    figures = Called(NAME)
    pictures.tiles(figures, module.fa2, seqlen=64)
    assert [x["what"] for x in figures.asked] == ["tiles"]
    pictures.memory(Invented(NAME), module.standard_attention, module.fa2)
    said = capsys.readouterr().out
    assert "128 x 128, 8 warps" in said and "lesson FA2: 512: 2" in said
    assert (tmp_path / "04_memory.png").exists()
    allocated = iter((3 << 20, 10 << 20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(allocated))
    assert pictures.peak_mib(module.fa2, 16) == 2 and pictures.peak_mib(module.fa2, 32) == 9

    def fails(*inputs):
        raise torch.OutOfMemoryError

    assert pictures.peak_mib(fails, 16) != pictures.peak_mib(fails, 16), "not a number"
