"""FP8 shapes in the bench: the same values for all, quantising counted apart, FA3's package."""

import json
import sys
import types

import pytest
import torch

from benchmarks.bench import check, fp8, load, peers, run_suite
from benchmarks.bench.providers import Provider, provider
from benchmarks.bench.shapes import square
from tilewise.explain.shapes import FP8
from tilewise.kernels.common.quantized import Quantized

SMALL = square("fwd", 64, 32, True, dtype=FP8, tokens=128, hidden=64)
OURS = ["tilewise", *fp8.NAMES]


def run(shape, providers, **options):
    quiet = dict(rounds=1, round_ms=1, show=lambda line: None)
    return run_suite([shape], providers, **quiet, **options)


@pytest.mark.parametrize("changes", [{}, dict(causal=False), dict(sinks=True), dict(window=20)])
def test_all_forms_are_timed_and_held_to_their_truth(tmp_path, changes):
    outcomes = run(SMALL._replace(**changes), OURS, save=tmp_path / "rows.jsonl")
    assert [one.row and one.provider for one in outcomes] == OURS
    rows = load(tmp_path / "rows.jsonl")
    assert all(row.shape["dtype"] == FP8 and 0 < row.max_error <= row.bound for row in rows)
    assert [row.bound for row in rows] == [3e-2, 3e-2, 6e-2, 6e-2, 6e-2]


def test_forms_of_inputs():
    plain = check.make_inputs(SMALL, "cpu")
    assert plain.q.dtype == torch.float8_e4m3fn
    wide = check.make_inputs(SMALL, "cpu", "bfloat16")
    for x, y in zip(wide[:3], plain[:3]):
        assert x.dtype == torch.bfloat16 and torch.equal(x.to(y.dtype).float(), y.float())
        assert (x.float() != y.float()).float().mean() > 0.5
    made = check.make_inputs(SMALL, "cpu", "quantized")
    assert isinstance(made.q, Quantized) and made.k is made.v is None
    assert made.q.v_mean is not None and (made.q.k_mean is not None)


def test_a_wrong_result_has_no_row():
    half = Provider("half", lambda shape, device: None, lambda *a: lambda q, k, v: q.float() / 2)
    (outcome,) = run(SMALL, [half])
    assert outcome.row is None and "norm of the error" in outcome.wrong


def test_names_are_for_8_bits_alone():
    for name in fp8.NAMES:
        assert FP8 in provider(name).refuse(SMALL._replace(dtype="bfloat16"), "cpu")
    for name in ("flash", "flex", "standard"):
        assert provider(name).refuse(SMALL, "cpu") == f"it does not take {FP8}"


def test_what_rounding_moves_too_far_is_not_judged():
    outcomes = run(SMALL._replace(softcap=20.0), OURS)
    refused = [one for one in outcomes if one.row is None]
    by_rounding = ["tilewise:quantized", "tilewise:quantize", "tilewise:calibrated"]
    assert [one.provider for one in refused] == by_rounding
    assert all("softcap" in one.refused for one in refused)


def test_a_forced_backend_is_asked_for_fp8():
    assert provider("tilewise:cpu").refuse(SMALL, "cpu") is None
    assert provider("tilewise:hopper").refuse(SMALL, "cpu") is not None


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_fa3_is_another_package(hopper, monkeypatch):
    fa3 = provider("fa3")
    monkeypatch.setitem(sys.modules, f"{peers.FA3_FP8}._C", None)
    assert "fa3_fwd is not installed" in fa3.refuse(SMALL, "cuda")
    assert "float16 and bfloat16" in provider("fa4").refuse(SMALL, "cuda")
    operators = f"{peers.FA3_FP8}._C"  # of a folder without an __init__
    monkeypatch.setitem(sys.modules, operators, types.ModuleType(operators))
    library = torch.library.Library(peers.FA3_FP8, "FRAGMENT")
    called = []

    def forward(q, k, v, q_descale, causal):
        called.append((q.dtype, q_descale, causal))
        return q.to(torch.bfloat16), q.new_empty(0, dtype=torch.float32)

    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_descale, bool is_causal=False,"
        " float? softmax_scale=None) -> (Tensor, Tensor)"
    )
    take = lambda q, k, v, q_descale, is_causal, softmax_scale: forward(  # noqa: E731
        q, k, v, q_descale, is_causal
    )
    library.impl("fwd", take, "CPU")
    assert fa3.refuse(SMALL, "cuda") is None
    fa3.prepare(SMALL, "cuda")(*check.make_inputs(SMALL, "cpu").arguments)
    assert called == [(torch.float8_e4m3fn, None, True)]
    assert "window_size_left" in fa3.refuse(SMALL._replace(window=8), "cuda")


def test_the_command():
    testing = pytest.importorskip("click.testing")
    from benchmarks.bench import commands as command

    def invoke(*more):
        sizes = ["--tokens", "64", "--hidden", "64", "--seqlen", "64", "--headdim", "32"]
        quick = ["--device", "cpu", "--rounds", "1", "--round-ms", "1", "--causal", "no"]
        asked = [*more, "--dtype", "fp8", "--against", "fa3", *sizes, *quick]
        return testing.CliRunner(env={"COLUMNS": "200"}).invoke(command.bench, asked)

    done = invoke("fwd", "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["provider"] for row in rows] == OURS
    assert "fa3: no row" in done.stderr
    for wrong in (["bwd"], ["fwd", "--suite", "dense"], ["fwd", "--span-ms", "5"]):
        assert invoke(*wrong).exit_code == 2
