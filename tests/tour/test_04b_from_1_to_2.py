"""Lesson 04b: both kernels of FlashAttention-1 at other shapes, and its counts."""

import sys

import pytest
from tour.lessons import helper, run_lesson

from benchmarks.bench import row

NAME = "04b_from_1_to_2"
pytestmark = pytest.mark.slow  # the lesson compiles three kernels


pictures = helper(NAME, "pictures")


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    for name in ("FlashAttention-1", "FlashAttention-1's steps", "tilewise, portable"):
        for kind in ("full", "causal"):
            assert f"{name}, {kind}: off by 0.00" in ran.printed
    assert {path.name for path in ran.pictures} == {"04b_orders.png", "04b_speed.png"}


# seqlen, block of queries, block of keys
SHAPES = [(1, 16, 16), (64, 64, 32), (65, 32, 64), (100, 16, 64), (129, 64, 16)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen, block_m, block_n", SHAPES)
def test_kernels_at_other_tiles(ran, seqlen, block_m, block_n, causal):
    lesson_04 = ran.module.lesson_04
    q, k, v = lesson_04.make_qkv(1, 2, seqlen, 32)
    exact = lesson_04.standard_attention(q.double(), k.double(), v.double(), causal)
    plain = lesson_04.standard_attention(q, k, v, causal)
    fa1 = ran.module.fa1(q, k, v, causal, block_m, block_n)
    lesson_04.assert_within(fa1, exact, plain, "FA1")
    every = pictures.fa1_steps(q, k, v, causal, (block_m, block_n))
    lesson_04.assert_within(every, exact, plain, "FA1's steps")


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


def test_what_a_gpu_would_time_runs(ran):
    lesson_04 = ran.module.lesson_04
    functions = lesson_04.standard_attention, ran.module.fa1, lesson_04.fa2
    for causal in (False, True):
        calls = pictures.contenders(128, causal, *functions, tokens=256, heads=1)
        assert list(calls) == pictures.NAMES
        results = [call().float() for call in calls.values()]
        for other in results[1:]:
            assert (other - results[0]).abs().max() < 0.05


def test_recorded_rows_are_shown(ran, tmp_path, monkeypatch):
    """Made-up times: a row a call."""
    fields = dict(row.stamp("tour/04_flash_attention", "cpu"), p20_ms=1.0, p80_ms=1.0)
    fields |= dict(rounds_ms=[1.0], tflops=0.0, max_error=None, bound=None, median_ms=1.0)
    shapes = []
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
