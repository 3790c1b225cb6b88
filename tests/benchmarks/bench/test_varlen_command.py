"""`python -m benchmarks bench varlen`: what it asks for, what it prints and saves."""

import json

import pytest

testing = pytest.importorskip("click.testing")

from benchmarks.bench import commands as command  # noqa: E402
from benchmarks.bench import load  # noqa: E402
from tilewise.explain.shapes import Shape  # noqa: E402

QUICK = ["--device", "cpu", "--rounds", "1", "--round-ms", "1", "--heads", "4:2x16"]


def invoke(*arguments):
    runner = testing.CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(command.bench, ["varlen", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """The shapes of a run that is not made, and its options."""
    seen = {}

    def run_suite(shapes, providers, **options):
        seen.update(shapes=shapes, providers=[one.name for one in providers], **options)
        return []

    monkeypatch.setattr("benchmarks.bench.run.run_suite", run_suite)
    return seen


def test_it_asks_for_the_sets_of_the_table(asked):
    done = invoke("--device", "cpu")
    assert done.exit_code == 0, done.output
    shapes = asked["shapes"]
    assert len(shapes) == len(set(shapes)) == 5 * 3 * 2 * 2
    assert {shape.direction for shape in shapes} == {"fwd", "bwd"}
    heads = {(shape.nheads, shape.nheads_k, shape.headdim) for shape in shapes}
    assert heads == {(16, 16, 128), (32, 8, 128), (32, 32, 64)}
    assert {shape.lengths for shape in shapes} == {
        *("equal512", "equal4096", "zipf", "one-long", "prefill-chat")
    }
    assert asked["providers"] == ["tilewise", "fa3"] and asked["suite"] == "varlen"
    assert asked["with_dense"] is False


def test_options_reach_the_shapes(asked):
    options = "--lengths 1k,300 --heads 8:1x64 --pass bwd --causal yes --dtype fp16 --window 7"
    done = invoke("--device", "cpu", *options.split(), "--dense", "--provider", "tilewise:cpu")
    assert done.exit_code == 0, done.output
    (shape,) = asked["shapes"]
    assert str(shape) == "bwd 1024,300 B2 S<=1024 H8:1 D64 causal window 7 float16"
    assert asked["with_dense"] is True and asked["providers"][0] == "tilewise:cpu"


def test_a_run_on_the_cpu(tmp_path):
    file = tmp_path / "rows.jsonl"
    sizes = ["--lengths", "40,7,64,23", "--causal", "both", "--dense", "--save", str(file)]
    done = invoke(*QUICK, *sizes, "--against", "fa3,flash,tilewise:cpu", "--json")
    assert done.exit_code == 0, done.output
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(printed) == 2 * 2 * 3
    rows = load(file)
    assert [row.tflops for row in rows] == [row["tflops"] for row in printed]
    assert all(row.suite == "varlen" for row in rows)
    shape = Shape(**rows[0].shape)
    assert shape.lengths == "40,7,64,23" and rows[0].extra["longest"] == 64
    assert rows[0].tflops == pytest.approx(shape.flops / rows[0].median_ms / 1e9)
    assert "fwd: time of a peer / time of tilewise" in done.stderr
    assert "bwd: TFLOP/s of tilewise, packed / dense" in done.stderr
    assert "flash: no row at 4 of 4: it does not take packed sequences" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--lengths", "zippf", "prefill-chat"),
        ("--lengths", "zipf,160", "prefill-chat"),
        ("--lengths", "160,0", "160,300"),
        ("--lengths", "", "prefill-chat"),
        ("--heads", "3:2x64", "16x128"),
        ("--heads", "16", "16x128"),
        ("--heads", "0x64", "16x128"),
        ("--pass", "fly", "fwd+bwd"),
        ("--pass", "", "fwd+bwd"),
        ("--against", "missing", "unknown"),
        ("--window", "7", "--causal yes"),
    ],
)
def test_wrong_usage_is_named(option, value, message):
    done = invoke("--device", "cpu", option, value)
    assert done.exit_code == 2 and message in done.output


def test_it_has_a_help_of_its_own():
    text = invoke("--help").output
    assert text.startswith("Usage: bench varlen [OPTIONS]")
    assert "--lengths" in text and "zipf" in text and "--seqlen" not in text
    bench = testing.CliRunner().invoke(command.bench, ["--help"]).output
    assert "bench varlen --help" in " ".join(bench.split())
    assert "--seqlen" in bench and "--lengths" not in bench


def test_no_gpu_is_said_before_anything_else(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke("--device", "cuda").exit_code == 3
