"""The IO account: formulas, the paper's line, and what Nsight Compute prints."""

import subprocess

import pytest

from benchmarks import account, counters
from benchmarks.account import PAPER_SHAPE, explanation, run_account
from benchmarks.account import account as entry_of
from benchmarks.bench import load
from benchmarks.bench.providers import Provider
from benchmarks.bench.shapes import square
from benchmarks.counters import Counted, Unavailable, count, find_ncu, parse

TILES = (128, 128), (128, 128)
OUTPUT = """==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "hopper_bwd_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","bwd_delta_kernel","dram__bytes_read.sum","byte","1,000"
"0","7","bwd_delta_kernel","dram__bytes_write.sum","byte","10"
"1","7","hopper_bwd_kernel","dram__bytes_read.sum","byte","2,500"
"1","7","hopper_bwd_kernel","dram__bytes_write.sum","byte","500"
==PROF== Disconnected from process 7
"""


def test_one_matmul_more_than_standard_attention():
    entries = [entry_of(PAPER_SHAPE, name, "hopper", TILES) for name in ("standard", "tilewise")]
    standard, ours = entries
    assert (standard.matmuls, ours.matmuls) == (6, 7)
    assert ours.gflop == pytest.approx(PAPER_SHAPE.flops / 1e9)
    assert ours.gflop / standard.gflop == pytest.approx(7 / 6)
    assert standard.moved > 9 * ours.moved and standard.tiled is None
    text = " ".join(explanation(entries))
    assert "7 matmuls for 6" in text and "8.6 GFLOP" in text and "16 times" in text


def test_the_portable_backward_computes_more():
    ours = entry_of(PAPER_SHAPE, "tilewise", "portable", TILES)
    assert (
        ours.matmuls == 9 and "once more" in explanation([ours._replace(name="standard"), ours])[0]
    )


def test_standard_attention_computes_what_it_masks():
    causal = PAPER_SHAPE._replace(causal=True)
    standard = entry_of(causal, "standard", "hopper", TILES)
    assert standard.gflop == pytest.approx(6 * 2 * 64 * 64 * 16 * 1024**2 / 1e9)
    assert entry_of(causal, "tilewise", "hopper", TILES).gflop * 2 == pytest.approx(
        standard.gflop * 7 / 6
    )


def test_a_run_on_the_cpu(tmp_path):
    shape = square("fwd+bwd", 128, 32, False, tokens=128, hidden=64, dtype="float32")
    file = tmp_path / "rows.jsonl"
    run = dict(device="cpu", rounds=1, round_ms=1.0, save=file, with_counters=True)
    done = run_account(shape, ("fwd", "fwd+bwd"), **run, show=lambda line: None)
    assert [(x.name, x.shape.direction) for x in done] == [
        ("standard", "fwd"),
        ("tilewise", "fwd"),
        ("standard", "fwd+bwd"),
        ("tilewise", "fwd+bwd"),
    ]
    assert all(x.ms > 0 and x.counted is None and "CUDA GPUs only" in x.uncounted for x in done)
    rows = load(file)
    assert {row.suite for row in rows} == {"io"} and rows[0].extra["bytes"] == done[0].moved
    assert "bytes_tiled" in rows[1].extra


def test_formulas_want_no_device(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(account, "run_entries", None)
    done = run_account(PAPER_SHAPE, ("fwd", "bwd"))
    assert [x.ms for x in done] == [None] * 4 and done[1].tiled > done[1].moved


def test_counters_reach_the_row(monkeypatch):
    monkeypatch.setattr(account, "count", lambda *asked: Counted(3500.0, 510.0, 2))
    shape = square("fwd", 64, 32, False, tokens=64, hidden=64, dtype="float32")
    run = dict(device="cpu", rounds=1, round_ms=1.0, with_counters=True, show=lambda line: None)
    done = run_account(shape, ("fwd",), **run)
    assert done[1].counted.read == 3500.0
    assert done[1].outcome.row.extra["bytes_written"] == 510.0


def test_what_nsight_compute_prints_is_summed():
    assert parse(OUTPUT) == Counted(3500.0, 510.0, 2)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "administrators"),
        ("==WARNING== No kernels were profiled.", "No kernels were profiled"),
        ("Traceback\nImportError: no torch", "ImportError: no torch"),
        ("", "no output"),
        (OUTPUT.splitlines()[2], "saw no kernel"),
    ],
)
def test_why_nothing_was_counted(output, reason):
    with pytest.raises(Unavailable, match=reason):
        parse(output)


def test_the_child_is_asked_as_the_parent_was(monkeypatch):
    seen = {}

    def run(command, **options):
        seen.update(command=command, **options)
        return subprocess.CompletedProcess(command, 0, OUTPUT, "")

    monkeypatch.setattr(counters, "find_ncu", lambda: "/opt/ncu")
    monkeypatch.setattr(counters.subprocess, "run", run)
    assert count(PAPER_SHAPE, "standard").kernels == 2
    assert seen["command"][0] == "/opt/ncu" and "benchmarks.counters" in seen["command"]
    asked = counters.json.loads(seen["command"][-1])
    assert counters.Shape(*asked["shape"]) == PAPER_SHAPE and asked["provider"] == "standard"


def test_a_machine_without_nsight_compute(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters.Path, "glob", lambda root, place: [])
    with pytest.raises(Unavailable, match="not installed"):
        find_ncu()
    with pytest.raises(Unavailable, match="CUDA GPUs only"):
        count(PAPER_SHAPE, "standard", "cpu")


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_one_call_is_profiled(direction, monkeypatch):
    """Three calls to warm up, then one between the profiler's start and stop."""
    seen = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: seen.append("wait"))
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: seen.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: seen.append("stop"))

    def prepare(shape, device):
        return lambda q, k, v: seen.append("call") or q + k + v

    one = Provider("one", lambda *x: None, prepare)
    monkeypatch.setattr("benchmarks.bench.providers.provider", lambda name: one)
    shape = square(direction, 32, 16, False, tokens=32, hidden=16, dtype="float32")
    spec = {"shape": list(shape), "provider": "one", "device": "cpu"}
    counters.profile_once(counters.json.dumps(spec))
    assert seen == ["call"] * 3 + ["wait", "start", "call", "wait", "stop"]
