"""The block-size experiment: what is tried, compiled, checked and timed."""

import pytest

pytest.importorskip("triton")

from benchmarks import blocks
from benchmarks.bench import load
from benchmarks.bench.providers import Provider
from benchmarks.bench.shapes import square
from benchmarks.blocks import Candidate, compile_all, configs, launch_of, name_of, time_all
from tilewise.testing import use_interpreter
from tilewise.tuning.select import overrides
from tilewise.tuning.tables import Config

SMALL = square("fwd", 64, 32, True, tokens=64, hidden=32, dtype="float32")


def candidate(m, n, failed=""):
    config = Config(m, n, 4, 1)
    return Candidate(name_of(config), config, None, failed, False)


def test_tiles_whose_scores_fit_no_registers_are_left_out():
    found = list(configs([(64, 64), (128, 128)], (4, 8), (2, 3)))
    assert [tuple(config[:4]) for config in found] == [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 8, 2),
        (64, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ]
    assert name_of(found[0]) == "64x64 w4 s2"


@pytest.mark.slow
@pytest.mark.compile
def test_the_compiler_says_what_tiles_need():
    shape = square("fwd", 1024, 32, False)
    lines = []
    asked = [Config(32, 32, 4, 2), Config(128, 128, 4, 4)]
    done = compile_all(shape, "fwd", asked, "sm80", show=lines.append)
    assert len(done) == len(lines) == 3 and done[0].is_default
    small, large = done[1:]
    assert small.built.registers < large.built.registers
    assert small.built.shared_memory < large.built.shared_memory
    assert small.built.occupancy.programs > large.built.occupancy.programs


def test_what_does_not_compile_is_a_result(monkeypatch):
    def fail(*asked):
        raise RuntimeError("out of\nshared memory")

    monkeypatch.setattr(blocks, "build_launch", fail)
    done = compile_all(SMALL, "fwd", [Config(32, 32, 4, 2)], "sm80", show=lambda line: None)
    assert [one.failed for one in done] == ["RuntimeError: out of shared memory"] * 2


def test_launches_of_each_kernel():
    for kernel in blocks.KERNELS:
        launch = launch_of(SMALL, kernel, "sm80")
        assert launch.kernel.__name__ == f"attn_{kernel}_kernel"


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv"])
def test_tiles_are_checked_and_take_turns(kernel, tmp_path, monkeypatch):
    from tilewise.kernels.portable.plan import Plan

    seen = []
    real = Plan.tile
    spy = lambda plan, config: seen.append((plan.name, config)) or real(plan, config)  # noqa: E731
    monkeypatch.setattr(Plan, "tile", spy)
    asked = [candidate(32, 32), candidate(16, 64), candidate(64, 16, failed="spills")]
    file = tmp_path / "rows.jsonl"
    run = dict(device="cpu", rounds=1, round_ms=1.0, save=file)
    with use_interpreter():
        done = time_all(SMALL, kernel, asked, **run)
    assert [one.outcome.row is not None for one in done] == [True, True, False]
    assert done[2].outcome.refused == "spills" and not overrides
    assert {config[:2] for name, config in seen if name == kernel} == {(32, 32), (16, 64)}
    rows = load(file)
    assert [row.extra["config"][:2] for row in rows] == [[32, 32], [16, 64]]
    assert rows[0].extra["kernel"] == kernel and rows[0].max_error <= rows[0].bound
    assert rows[0].shape["direction"] == blocks.KERNELS[kernel]


def test_a_wrong_tile_is_not_timed(monkeypatch):
    wrong = Provider("wrong", lambda *x: None, lambda *x: lambda q, k, v: 2 * q)
    monkeypatch.setattr(blocks, "provider", lambda name: wrong)
    (done,) = time_all(SMALL, "fwd", [candidate(32, 32)], device="cpu", rounds=1, round_ms=1.0)
    assert done.outcome.row is None and done.outcome.wrong
