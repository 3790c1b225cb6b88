"""Lesson 04: both kernels at shapes that the lesson does not try, and its counts."""

import sys

import pytest
import torch
from tour.lessons import Called, Invented, helper, run_lesson

NAME = "04_flash_attention"
pytestmark = pytest.mark.slow  # the lesson compiles three kernels


pictures = helper(NAME, "pictures")


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    _, said, drawn, _ = ran
    for name in (
        "FlashAttention-1",
        "FlashAttention-1's steps",
        "FlashAttention-2",
        "tilewise, portable",
    ):
        for kind in ("full", "causal"):
            assert f"{name}, {kind}: off by 0.00" in said
    assert {path.name for path in drawn} == {
        *("04_steps.png", "04_orders.png", "04_memory.png", "04_speed.png"),
    }


# seqlen, block of queries, block of keys
SHAPES = [(1, 16, 16), (64, 64, 32), (65, 32, 64), (100, 16, 64), (129, 64, 16)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen, block_m, block_n", SHAPES)
def test_kernels_at_other_tiles(ran, seqlen, block_m, block_n, causal):
    module, _, _, _ = ran
    q, k, v = module.make_qkv(1, 2, seqlen, 32)
    exact = module.standard_attention(q.double(), k.double(), v.double(), causal)
    plain = module.standard_attention(q, k, v, causal)
    fa1 = pictures.fa1(q, k, v, causal, block_m, block_n)
    module.assert_within(fa1, exact, plain, "FA1")
    tile = block_m, block_n
    every = pictures.fa1_steps(q, k, v, causal, tile)
    module.assert_within(every, exact, plain, "FA1's steps")
    out, lse = module.fa2(q, k, v, causal, tile, return_lse=True)
    module.assert_within(out, exact, plain, "FA2")
    s = q.double() @ k.double().mT * 32**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), float("-inf"))
    assert (lse - torch.logsumexp(s, -1)).abs().max() < 1e-4


def test_block_rule_of_the_paper():
    b_r, b_c = pictures.fa1_blocks(192 << 10, 64)
    assert (b_r, b_c) == (64, 384)  # 96Ki numbers, a quarter each for K, V, Q and O
    assert 4 * b_c * 64 * 2 == 192 << 10
    assert pictures.fa1_blocks(32 << 10, 128) == (32, 32)  # never more rows than keys
    assert [pictures.power_of_two(n) for n in (1, 64, 127, 128)] == [1, 64, 64, 128]


def test_the_compiler_agrees_that_fa2_does_less(ran):
    module, said, _, _ = ran
    count = module.per_score
    assert count["FA2"] < count["FA1's steps, FA2's loops"] <= count["FA1"]
    saved = count["FA1's steps, FA2's loops"] - count["FA2"]
    assert saved == pytest.approx(128 / 64, abs=0.5)  # an instruction a number of O
    assert "FA2  " in said


def test_the_innermost_loop_is_found():
    ptx = "$L_a:\n add.f32\n$L_b:\n mul.f32\n @%p bra \t$L_b;\n @%q bra $L_a;\n ret;\n"
    assert pictures.innermost_loop(ptx).split() == ["mul.f32", "@%p", "bra", "$L_b;"]


def test_every_step_of_standard_attention_is_bound_by_memory():
    for flops, size in pictures.step_counts(64 * 16, 1024, 64).values():
        assert flops / pictures.FLOPS < size / pictures.BANDWIDTH


def test_recorded_experiments_are_shown(ran):
    """The rows of `bench blocks` and `bench memory`."""
    assert "128 x 128      8        255" in ran.printed and "535" in ran.printed
    assert "standard: 1024: 68" in ran.printed and "tilewise: 1024: 4" in ran.printed


def test_what_a_gpu_would_time_runs(ran, monkeypatch):
    module, _, _, _ = ran
    monkeypatch.setattr(pictures, "GPT2", pictures.GPT2 | dict(batch=1, nheads=1, seqlen=48))
    calls = pictures.the_steps()
    assert list(calls) == [*pictures.PARTS, pictures.FUSED]
    assert [call().shape[-2:] for call in calls.values()] == [(48, 48)] * 4 + [(48, 64)] * 2
    for causal in (False, True):
        sizes = dict(tokens=256, heads=1)
        calls = pictures.contenders(128, causal, module.standard_attention, module.fa2, **sizes)
        assert list(calls) == pictures.NAMES
        results = [call().float() for call in calls.values()]
        for other in results[1:]:
            assert (other - results[0]).abs().max() < 0.05


def test_recorded_rows_are_shown(ran, tmp_path, monkeypatch):
    """Made-up times: a row a call."""
    from tilewise.bench import row

    fields = dict(row.stamp("tour/04_flash_attention", "cpu"), p20_ms=1.0, p80_ms=1.0)
    fields |= dict(rounds_ms=[1.0], tflops=0.0, max_error=None, bound=None, median_ms=1.0)
    shapes = [(pictures.GPT2, [*pictures.PARTS, pictures.FUSED])]
    for causal in (False, True):
        for n in pictures.LENGTHS:
            shape = dict(seqlen=n, tokens=16384, nheads=16, headdim=128, causal=causal)
            shapes.append((shape, pictures.NAMES))
    made_up = tmp_path / "rows.jsonl"
    row.append(
        made_up, [row.Row(shape=s, provider=x, **fields) for s, names in shapes for x in names]
    )
    monkeypatch.setattr(sys.modules["lesson"], "RECORDED", made_up)
    again, said, _, _ = run_lesson(NAME, tmp_path)
    assert "recorded 20" in again.figures.machine
    flops = 4 * 16 * 128 * 16384 * 512
    assert f"full    standard     {flops * 1e-9:6.0f}" in said


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
