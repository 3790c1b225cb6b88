"""`explain --dtype fp8`: which backend serves e4m3, and whether its products run in 8 bits."""

import json

import pytest

from benchmarks.bench.shapes import square
from tilewise.explain.dense import explain_fp8, products_of
from tilewise.explain.shapes import FP8

pytest.importorskip("triton")
SHAPE = square("fwd", 1024, 128, True, dtype=FP8)


@pytest.mark.parametrize(
    ("target", "backend", "runs"),
    [
        ("sm90", "hopper", True),
        ("sm89", "portable", True),
        ("sm80", "portable", False),
        ("gfx942", "portable", False),
        ("cpu", "cpu", False),
    ],
)
def test_where_products_run(target, backend, runs):
    found = explain_fp8(SHAPE, target, None)
    assert found.backend == backend
    assert found.how.startswith("the products run in FP8") == runs
    assert ("do not run in FP8" in found.how) != runs


def test_a_backend_that_refuses():
    found = explain_fp8(SHAPE, "sm80", None, backend="hopper")
    assert found.backend == "" and found.how == ""
    assert {x.backend: x.kind for x in found.answers}["hopper"] == "refuses"


def test_a_forced_backend():
    found = explain_fp8(SHAPE, "sm90", None, backend="portable")
    assert found.forced and found.how == products_of("portable", "sm90")


def test_the_command():
    testing = pytest.importorskip("click.testing")
    from tilewise.cli.explain import explain

    def invoke(*more):
        return testing.CliRunner(env={"COLUMNS": "200"}).invoke(explain, ["--dtype", "fp8", *more])

    done = invoke("--gpu", "h200")
    assert done.exit_code == 0 and "the products run in FP8" in done.output
    record = json.loads(invoke("--on", "cpu", "--json").stdout)
    assert record["backend"] == "cpu" and "do not run in FP8" in record["products"]
    for wrong in (["--cache"], ["--pass", "bwd"]):
        assert invoke(*wrong).exit_code == 2
