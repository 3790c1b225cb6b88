"""`python -m benchmarks matmul`: what it asks for, what it prints and saves."""

import json

import pytest

testing = pytest.importorskip("click.testing")

from benchmarks.bench import load  # noqa: E402
from benchmarks.matmul import CONFIGS  # noqa: E402
from benchmarks.products import matmul  # noqa: E402

QUICK = ["--device", "cpu", "--rounds", "1", "--round-ms", "1"]


def invoke(*arguments):
    runner = testing.CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(matmul, arguments)


@pytest.fixture
def asked(monkeypatch):
    """The products of a run that is not made, and its options."""
    seen = {}

    def run_products(products, configs, **options):
        seen.update(products=products, configs=configs, **options)
        return []

    monkeypatch.setattr("benchmarks.products.run_products", run_products)
    return seen


def test_a_gpu_is_asked_for_the_figures_that_are_promised(asked, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = invoke("--device", "cuda")
    assert done.exit_code == 0, done.output
    assert [str(one) for one in asked["products"]] == [
        "bf16 4096 x 4096 x 4096",
        "bf16 8192 x 8192 x 8192",
    ]
    assert asked["configs"] == (None,) and asked["rounds"] == 5 and asked["save"] is None


def test_options_reach_the_products(asked):
    shapes = ["--shape", "1k,2k,64", "--shape", "16,32,48"]
    done = invoke("--device", "cpu", *shapes, "--dtype", "fp8,tf32", "--configs", "all")
    assert done.exit_code == 0, done.output
    assert [str(one) for one in asked["products"]] == [
        *("fp8 1024 x 2048 x 64", "fp8 16 x 32 x 48"),
        *("tf32 1024 x 2048 x 64", "tf32 16 x 32 x 48"),
    ]
    assert asked["configs"] == (None, *CONFIGS)


def test_a_run_on_the_cpu(tmp_path):
    file = tmp_path / "rows.jsonl"
    done = invoke(*QUICK, "--sizes", "64", "--dtype", "bf16,fp32", "--save", str(file), "--json")
    assert done.exit_code == 0, done.output
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    rows = load(file)
    assert [row.tflops for row in rows] == [row["tflops"] for row in printed]
    assert [row.provider for row in rows] == ["tilewise", "torch"] * 2
    assert {row.suite for row in rows} == {"matmul"}
    assert rows[0].shape == dict(m=64, n=64, k=64, kind="bf16", direction="matmul")
    assert all(row.max_error <= row.bound for row in rows)
    assert rows[0].tflops == pytest.approx(2 * 64**3 / rows[0].median_ms * 1e-9)
    assert "time of a peer / time of tilewise" in done.stderr
    assert "4 rows timed, 0 wrong" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype fp4", "bf16"),
        ("--configs fastest", "wide"),
        ("--shape 1,2", "three numbers"),
        ("--shape 16,16,16 --sizes 16", "exclude"),
        ("--sizes big", "list of numbers"),
    ],
)
def test_wrong_usage_is_named(options, message):
    done = invoke("--device", "cpu", *options.split())
    assert done.exit_code == 2 and message in done.output


def test_a_wrong_product_fails_the_command(monkeypatch):
    wrong = lambda kind, config: lambda a, b: a @ b + 1  # noqa: E731
    monkeypatch.setattr("benchmarks.products.our_product", wrong)
    done = invoke(*QUICK, "--sizes", "32")
    assert done.exit_code == 1 and "WRONG" in done.output


def test_it_has_a_help_of_its_own():
    text = invoke("--help").output
    assert text.startswith("Usage: matmul [OPTIONS]") and "--configs" in text


def test_no_gpu_is_said_before_anything_else(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke("--device", "cuda").exit_code == 3


def test_a_sustained_run_has_a_row_of_both_ways(tmp_path):
    file = tmp_path / "rows.jsonl"
    done = invoke(*QUICK, "--sizes", "32", "--sustained", "--save", str(file))
    assert done.exit_code == 0, done.output
    assert [len(row.sustained_ms) for row in load(file)] == [8, 8]
