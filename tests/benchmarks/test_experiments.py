"""The experiments of `python -m benchmarks`, on a CPU at small sizes."""

import json

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.bench import load  # noqa: E402

ALL = ["memory", "io", "speedup", "blocks", "host", "cold", "matmul"]


def invoke(*arguments):
    return testing.CliRunner(env={"COLUMNS": "160"}).invoke(main, arguments)


@pytest.mark.parametrize("name", ALL)
def test_each_has_a_help_of_its_own_and_is_listed(name):
    done = invoke(name, "--help")
    assert done.exit_code == 0 and f" {name} [OPTIONS]" in done.output
    assert f"\n  {name} " in invoke("--help").output


@pytest.mark.parametrize("name", ALL)
def test_exit_code_3_without_a_gpu(name, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke(name, "--device", "cuda").exit_code == 3


@pytest.mark.slow
def test_memory(tmp_path):
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "memory.png"
    sizes = ["--seqlens", "1k,2k", "--heads", "1x32", "--against", "standard,cudnn"]
    sizes += ["--pass", "fwd"]
    done = invoke("memory", "--device", "cpu", *sizes, "--save", rows, "--png", picture, "--json")
    assert done.exit_code == 0, done.output
    assert "exponent" in done.stderr and "O(N)" in done.stderr and "score matrix" in done.stderr
    assert "cudnn: torch has it for CUDA tensors only" in done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(printed) == len(load(rows)) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_io_by_formula(tmp_path):
    pytest.importorskip("triton")
    done = invoke("io", "--formula", "--steps", "--pass", "fwd+bwd")
    assert done.exit_code == 0, done.output
    for text in ("B64 S1024 H16 D64 full float16", "40.3", "41.7", "P = softmax S", "7 matmuls"):
        assert text in done.output
    assert invoke("io", "--formula", "--counters").exit_code == 2


def test_io_on_the_cpu(tmp_path):
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "io.png"
    sizes = [
        "--seqlen",
        "128",
        "--heads",
        "2",
        "--headdim",
        "32",
        "--rounds",
        "1",
        "--round-ms",
        "1",
    ]
    more = ["--counters", "--save", rows, "--png", picture, "--json"]
    done = invoke("io", "--device", "cpu", *sizes, *more)
    assert done.exit_code == 0, done.output
    assert "no counters: hardware counters" in done.stderr
    assert len(done.stdout.splitlines()) == len(load(rows)) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_speedup(tmp_path):
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "speedup.png"
    sizes = ["--seqlens", "32,64", "--tokens", "64", "--heads", "2x16", "--pass", "fwd"]
    quick = ["--rounds", "1", "--round-ms", "1"]
    more = ["--save", rows, "--png", picture, "--json"]
    done = invoke("speedup", "--device", "cpu", *sizes, *quick, *more)
    assert done.exit_code == 0, done.output
    assert "fwd, dropout" in done.stderr and "speed-up" in done.stderr
    assert len(done.stdout.splitlines()) == len(load(rows)) == 12
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert invoke("speedup", "--device", "cpu", "--cases", "sparse").exit_code == 2


@pytest.mark.slow
@pytest.mark.compile
def test_blocks_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "blocks.png"
    sizes = ["--tiles", "32x32,64x64", "--warps", "4", "--stages", "2", "--headdim", "32"]
    more = ["--on", "sm80", "--png", picture, "--json"]
    done = invoke("blocks", "--device", "cpu", *sizes, *more)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in records][1:] == ["32x32 w4 s2", "64x64 w4 s2"]
    assert records[0]["is_default"] and records[1]["built"]["registers"] > 16
    assert "registers" in done.stderr and " *" in done.stderr and "TFLOP/s" not in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", ["--tiles 48x64", "--tiles x", "--on voodoo", "--on cpu"])
def test_blocks_that_cannot_be(options):
    pytest.importorskip("triton")
    assert invoke("blocks", "--device", "cpu", *options.split()).exit_code == 2


def test_host(tmp_path):
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "host.png"
    quick = ["--rounds", "1", "--round-ms", "1", "--modes", "no_grad,graph", "--against", "flash"]
    more = ["--save", rows, "--png", picture, "--json"]
    done = invoke("host", "--device", "cpu", *quick, *more)
    assert done.exit_code == 0, done.output
    assert (
        "no_grad" in done.stderr and "tilewise, graph: CUDA graphs are of CUDA GPUs" in done.stderr
    )
    assert len(done.stdout.splitlines()) == len(load(rows)) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert invoke("host", "--device", "cpu", "--modes", "magic").exit_code == 2


def test_cold(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks import cold

    small = cold.shape_for("cpu")._replace(seqlen_q=64, seqlen_k=64)
    monkeypatch.setattr(cold, "shape_for", lambda device: small)
    monkeypatch.setattr(cold, "first_calls", lambda *asked: [1500.0, 250.0])
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "cold.png"
    done = invoke("cold", "--device", "cpu", "--save", rows, "--png", picture, "--json")
    assert done.exit_code == 0, done.output
    assert "1.5" in done.stderr and len(done.stdout.splitlines()) == len(load(rows)) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")

    def fail(*asked):
        raise cold.ChildFailed("the process ended with 1: no GPU")

    monkeypatch.setattr(cold, "first_calls", fail)
    done = invoke("cold", "--device", "cpu")
    assert done.exit_code == 1 and "the process ended with 1" in done.output
