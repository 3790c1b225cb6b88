"""Lesson 07: its kernels are right in the emulator and compile well, and the lesson runs."""

import itertools
import re

import pytest
import torch

pytest.importorskip("matplotlib")

import matplotlib
from lesson import hopper_parts as parts
from lesson import hopper_steps as steps
from lesson import hopper_timeline as timeline
from tour.lessons import prose_of, run_lesson

NAME = "07_hopper"
LADDER = {
    "1": parts.Step(steps.step1_kernel, 64),
    "2": parts.Step(steps.step2_kernel, 64),
    "3": steps.specialised(steps.compute_in_order),
    "4": steps.specialised(steps.compute_ahead),
    "5": steps.specialised(steps.compute_ahead, warpgroups=2),
    "5 without 4": steps.specialised(steps.compute_in_order, warpgroups=2),
    "5 with three stages": steps.specialised(steps.compute_ahead, warpgroups=2, stages=3),
}
by_step = pytest.mark.parametrize("name", LADDER)


def inputs(seqlen, headdim=64, heads=1, device="cpu"):
    return torch.randn(3, heads, seqlen, headdim, device=device).bfloat16()


def is_right(name, seed, seqlen, **shape):
    x = inputs(seqlen, **shape)
    verdict = parts.verdict_of(parts.attend(LADDER[name], *x, seed=seed), *x)
    assert verdict.ok, f"seed {seed}: {verdict}"


@pytest.mark.emulator
@by_step
def test_steps_are_right(name):
    for seed in range(3):
        is_right(name, seed, 384)


@pytest.mark.emulator
@pytest.mark.slow
@by_step
def test_steps_are_right_whatever_the_order_of_events(name):
    for seed in range(20):
        is_right(name, seed, 640, headdim=128, heads=2)


@pytest.mark.emulator
@by_step
def test_one_block_of_keys(name):
    for seed in range(9):
        is_right(name, seed, 128)


def test_a_verdict_knows_wrong_from_right():
    q, k, v = inputs(256)
    right = torch.softmax(q.float() @ k.float().mT * 64**-0.5, -1) @ v.float()
    assert parts.verdict_of(right.bfloat16(), q, k, v).ok
    assert not parts.verdict_of((right + 0.1).bfloat16(), q, k, v).ok
    assert not parts.verdict_of(torch.full_like(q, torch.nan), q, k, v).ok


def test_lengths_that_are_no_multiple_are_refused():
    with pytest.raises(ValueError, match="multiples of 128"):
        parts.attend(LADDER["1"], *inputs(192))


def held_to_what_compiles_well(name, headdim):
    found = parts.needs(LADDER[name], headdim)
    assert found["spill_stores"] == found["spill_loads"] == 0, found
    assert not found["wgmma_serialized"] and found["HGMMA"] and found["UTMALDG"], found
    assert not found["copies_apart"] and not found["idle_barriers"], found
    assert found["programs"] >= 1, found


@pytest.mark.compile
def test_the_last_step_compiles():
    held_to_what_compiles_well("5", 128)


@pytest.mark.compile
@pytest.mark.slow
@by_step
@pytest.mark.parametrize("headdim", [64, 128])
def test_all_compile(name, headdim):
    held_to_what_compiles_well(name, headdim)


def replayed(name, seed=0, **rates):
    events = []
    parts.attend(LADDER[name], *inputs(512, 128), seed=seed, trace=events)
    return timeline.Replay(events, 128, 128, timeline.Rates(**rates)).run()


@pytest.mark.emulator
@by_step
def test_a_replay_is_that_of_the_program_not_of_a_seed(name):
    first = replayed(name)
    assert sorted(replayed(name, seed=5)) == sorted(first)
    products = [span for span in first if span.lane == "tensor cores"]
    assert len(products) == 8 * LADDER[name].rows // 64  # four blocks, S and P V
    for lane in timeline.lanes_of(first):  # one thing at a time
        mine = sorted((span.start, span.end) for span in first if span.lane == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine)), lane


@pytest.mark.emulator
def test_what_each_step_is_for():
    """Of copies that cost nothing only the order of products and softmax is left."""
    late = {name: timeline.busy(replayed(name)) for name in LADDER}
    free = {name: timeline.busy(replayed(name, copy_bytes=1e9, copy_latency=0)) for name in LADDER}
    assert free["1"] == pytest.approx(free["3"], abs=0.01)
    assert late["1"] < late["2"] and free["3"] < free["4"] < free["5"]
    assert late["4"] < late["5"] < late["5 with three stages"]


def test_a_replay_by_hand():
    """One copy of 4000 bytes, awaited; one product and its softmax; then P V."""
    events = [
        ("expect", "full[0] 4000 bytes"),
        ("TMA load", "tile from [0, 0], 4000 bytes"),
        ("wait", "full[0] phase 0"),
        ("passed", "full[0] phase 0"),
        ("wgmma", "q @ tile"),
        ("wgmma wait", "0 in flight"),
        ("wgmma", "registers @ tile"),
        ("wgmma wait", "0 in flight"),
    ]
    program, other = (0, 0, 0), (1, 0, 0)
    recorded = [(cta, "kernel", *event) for event in events for cta in (program, other)]
    rates = timeline.Rates(flops=16384, exponentials=64, copy_bytes=40, copy_latency=100)
    spans = timeline.Replay(recorded, keys=64, headdim=64, rates=rates).run()
    assert [span for span in spans if span.lane != "kernel"] == [
        timeline.Span("TMA", "copy", 100, 200),
        timeline.Span("tensor cores", "S = Q Kᵀ", 200, 232),
        timeline.Span("tensor cores", "O += P V", 296, 328),
    ]
    assert timeline.Span("kernel", "softmax", 232, 296) in spans
    assert timeline.busy(spans) == 0.5
    lines = list(timeline.event_lines(recorded))
    assert len(lines) == len(events)
    assert lines[2].split() == ["kernel", "wait", "full[0]", "phase", "0"]


def test_speeds_are_drawn():
    matplotlib.use("Agg")
    speeds = {4096: {"one": 100.0, "two": 200.0}, 16384: {"one": 150.0, "two": 250.0}}
    figure = timeline.draw_speeds(speeds, "a machine")
    assert [len(axis.patches) for axis in figure.axes] == [2, 2]
    matplotlib.pyplot.close(figure)


@pytest.mark.slow
def test_the_lesson_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TOUR_ANSWERS", "1")
    module, said, pictures, _ = run_lesson(NAME, tmp_path)
    assert "07-timeline" in {path.stem for path in pictures}
    assert {"right", "wrong numbers"} <= set(module.seen)  # one run shows the race, one does not
    shown = re.search(r"```text\n(nothing is in flight.*?)```", prose_of(NAME), re.DOTALL)[1]
    assert all(line.strip() in said for line in shown.splitlines()), "the deadlock of its answer"


@pytest.mark.gpu
@by_step
@pytest.mark.parametrize("headdim", [64, 128])
def test_steps_on_a_gpu(name, headdim):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for seqlen in (128, 1024, 4096):
        x = inputs(seqlen, headdim, heads=3, device="cuda")
        assert parts.verdict_of(parts.attend(LADDER[name], *x), *x).ok
