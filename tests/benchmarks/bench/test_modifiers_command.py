"""`python -m benchmarks bench modifiers`: what it asks for, what it prints and saves."""

import json
import statistics

import pytest

testing = pytest.importorskip("click.testing")

from benchmarks.bench import commands as command  # noqa: E402
from benchmarks.bench import load  # noqa: E402
from tilewise.explain.modifiers import NAMES  # noqa: E402

QUICK = ["--device", "cpu", "--quick", "--rounds", "1", "--round-ms", "1"]


def invoke(*arguments):
    runner = testing.CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(command.bench, ["modifiers", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """The comparisons of a run that is not made, and its options."""
    seen = {}

    def run_comparisons(comparisons, **options):
        seen.update(comparisons=comparisons, **options)
        return []

    monkeypatch.setattr("benchmarks.bench.beside.run_comparisons", run_comparisons)
    return seen


def test_it_asks_for_the_figures_that_are_promised(asked):
    done = invoke("--device", "cpu")
    assert done.exit_code == 0, done.output
    shapes = [one.shape for one in asked["comparisons"]]
    assert len(shapes) == len(set(shapes)) == 14 + 16
    assert {shape.modifier for shape in shapes} == set(NAMES)
    assert {shape.seqlen_q for shape in shapes} == {4096, 16384}
    assert all(shape.batch * shape.seqlen_q == 16384 for shape in shapes)
    assert {(s.nheads, s.nheads_k, s.headdim, s.dtype) for s in shapes} == {
        (16, 16, 128, "bfloat16")
    }
    assert asked["rounds"] == 5 and asked["save"] is None


def test_options_reach_the_shapes(asked):
    options = "--cases prefix --pass bwd --seqlens 1k --tokens 2k --heads 8:1x64 --dtype fp16"
    done = invoke("--device", "cpu", *options.split(), "--provider", "tilewise:cpu")
    assert done.exit_code == 0, done.output
    (one,) = asked["comparisons"]
    assert str(one.shape) == "bwd B2 S1024 H8:1 D64 prefix mask float16"
    assert [*one.lanes] == ["tilewise:cpu", "flex"]


def test_a_run_on_the_cpu(tmp_path):
    file = tmp_path / "rows.jsonl"
    cases = ["--cases", "window,documents,dropout", "--pass", "bwd", "--save", str(file)]
    done = invoke(*QUICK, *cases, "--json")
    assert done.exit_code == 0, done.output
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    rows = load(file)
    assert [row.tflops for row in rows] == [row["tflops"] for row in printed]
    assert [row.extra.get("lane") for row in rows] == [None, None, "packed", None, "without"]
    assert "not here: FlexAttention has no backward on the CPU" in done.stderr
    assert "bwd dropout B2 S256 / without" in done.stderr and "5 rows timed, 0 wrong" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cases windoww", "causal-documents"),
        ("--against fa3", "without"),
        ("--seqlens 3k", "divides"),
        ("--tokens 8k,16k", "one number"),
        ("--tokens 128 --seqlens 64", "documents"),
        ("--provider missing", "unknown"),
    ],
)
def test_wrong_usage_is_named(options, message):
    done = invoke("--device", "cpu", *options.split())
    assert done.exit_code == 2 and message in done.output


def test_rates_of_a_sustained_run_are_those_of_its_sustained_rounds(tmp_path):
    file = tmp_path / "rows.jsonl"
    cases = "--cases", "dropout", "--pass", "fwd", "--against", "without"
    done = invoke(*QUICK, *cases, "--sustained", "--save", str(file))
    assert done.exit_code == 0, done.output
    ours, without = load(file)
    assert len(ours.sustained_ms) == len(without.sustained_ms) == 8
    rates = [b / a for a, b in zip(ours.sustained_ms, without.sustained_ms)]
    assert ours.extra["rate_over"]["without"] == pytest.approx(statistics.median(rates))


def test_it_has_a_help_of_its_own():
    text = invoke("--help").output
    assert text.startswith("Usage: bench modifiers [OPTIONS]")
    assert "--seqlens" in text and "--lengths" not in text
    bench = testing.CliRunner().invoke(command.bench, ["--help"]).output
    assert "bench modifiers --help" in " ".join(bench.split())


def test_no_gpu_is_said_before_anything_else(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke("--device", "cuda").exit_code == 3
