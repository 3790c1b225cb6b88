"""`tilewise verify`: passes here, fails with exit code 1 where a result is wrong."""

import json

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

import tilewise  # noqa: E402
from tilewise.cli import verify  # noqa: E402


def invoke(*arguments):
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(verify.verify, arguments)


def test_passes_on_the_cpu():
    done = invoke("--quick", "--device", "cpu", "-k", "gqa or 64x64 or window or no-", "--json")
    assert done.exit_code == 0, done.output
    checks = json.loads(done.stdout)
    assert len(checks) > 5
    assert all(check["max_error"] <= check["max_bound"] for check in checks)
    peer = next(check for check in checks if check["case"] == "64x64")
    assert peer["tensor"] == "lse" or peer["sdpa_error"] is not None
    assert "within their bounds" in done.stderr


def test_table():
    done = invoke("--quick", "--device", "cpu", "--dtype", "bf16", "-k", "64x64")
    assert done.exit_code == 0, done.output
    assert "64x64-causal" in done.output and "bf16" in done.output


@pytest.mark.slow
def test_portable_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    done = invoke("--quick", "--device", "cpu", "--backend", "portable", "-k", "64x64")
    assert done.exit_code == 0, done.output


def test_a_wrong_result_fails(monkeypatch):
    right = tilewise.attention

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return out * 1.001, lse

    monkeypatch.setattr(tilewise, "attention", wrong)
    done = invoke("--quick", "--device", "cpu", "-k", "64x64")
    assert done.exit_code == 1
    assert "FAIL" in done.output


def test_what_raises_fails_and_what_is_refused_does_not(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(tilewise, "attention", broken)
    done = invoke("--quick", "--device", "cpu", "-k", "64x64")
    assert done.exit_code == 1 and "ZeroDivisionError: oh" in done.output

    def refusing(*args, **kwargs):
        raise NotImplementedError("not on Sundays")

    monkeypatch.setattr(tilewise, "attention", refusing)
    done = invoke("--quick", "--device", "cpu", "-k", "64x64")
    assert done.exit_code == 0 and "not on Sundays" in done.output


def test_usage():
    assert invoke("--quick", "--full").exit_code == 2
    assert invoke("-k", "no such case").exit_code == 2
    assert invoke("-k", "gqa and (").exit_code == 2
    assert "leave --quick out" in invoke("--quick", "-k", "everything").output
    assert invoke("--dtype", "int3").exit_code == 2


@pytest.mark.parametrize(
    ("expression", "name", "expected"),
    [
        ("", "gqa", True),
        ("gqa", "gqa-3", True),
        ("gqa and not 3", "gqa-3", False),
        ("(window or sinks) and not tall", "sinks-window", True),
        ("64x64-causal", "64x64-causal", True),
    ],
)
def test_names(expression, name, expected):
    assert verify.matches(expression, name) is expected


@pytest.mark.parametrize("tensor", ["out", "dq", "dv"])
def test_torch_is_held_to_the_same_oracle(tensor):
    import torch

    from tilewise.testing.cases import CASES

    case = next(case for case in CASES if case.name == "64x64")
    error = verify.sdpa_error(case, tensor, "cpu", torch.float32)
    assert 0 <= error < 1e-5
    windowed = next(case for case in CASES if case.name == "window-left")
    assert verify.sdpa_error(windowed, tensor, "cpu", torch.float32) is None


def test_fp8_is_held_to_its_contract(monkeypatch):
    done = invoke("--quick", "--device", "cpu", "-k", "fp8", "--json")
    assert done.exit_code == 0, done.output
    checks = {check["case"]: check for check in json.loads(done.stdout)}
    assert checks["fp8"]["max_bound"] == 3e-2 and checks["fp8"]["dtype"] == "float8_e4m3fn"
    assert checks["fp8-values-of-mean-1"]["max_bound"] == 5e-3
    table = invoke("--quick", "--device", "cpu", "-k", "fp8")
    assert "fp8-raw-causal" in table.output
    right = tilewise.attention
    monkeypatch.setattr(tilewise, "attention", lambda *args, **given: right(*args, **given) * 1.1)
    assert invoke("--quick", "--device", "cpu", "-k", "fp8").exit_code == 1


def test_fp8_that_is_not_served_is_no_failure():
    done = invoke("--quick", "--device", "cpu", "-k", "fp8", "--backend", "hopper", "--json")
    assert done.exit_code == 0 and all(check["refused"] for check in json.loads(done.stdout))
