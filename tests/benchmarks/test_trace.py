"""`python -m benchmarks trace`: the table, the verdict, JSON, wrong usage."""

import json

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from benchmarks.__main__ import main  # noqa: E402


def invoke(*arguments):
    runner = testing.CliRunner(env={"COLUMNS": "100"})
    return runner.invoke(main, ["trace", *arguments])


def test_a_line_a_block_and_the_error_at_the_end():
    done = invoke()
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines() if "-" in line[:8]][:2] == [
        "0-15",
        "16-31",
    ]
    assert done.output.count("rescaled") == 4
    assert "6 blocks read; m rose in 4 after the first" in done.output
    assert "allowed: ok" in done.output


def test_scores_that_no_exp_holds():
    done = invoke("--logits", "100", "--causal")
    assert done.exit_code == 0, done.output
    assert "inf in fp32" in done.output and "2 skipped" in done.output


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("logits", ["0", "10", "100"])
def test_json_and_the_bound(dtype, logits):
    done = invoke("--json", "--dtype", dtype, "--logits", logits, "--causal", "--blocks", "5")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] and found["error"] <= found["bound"] < 0.05
    assert len(found["blocks"]) == 5 and found["blocks"][-1]["largest"] is None
    assert found["row"] == 50 and found["seen"] == 51


def test_a_row_of_its_own_and_one_that_is_not_there():
    assert json.loads(invoke("--json", "--causal", "--row", "0").stdout)["seen"] == 1
    assert invoke("--row", "96").exit_code == 2


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "row.png"
    assert invoke("--png", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_seeds_differ_and_repeat():
    assert invoke().output == invoke().output != invoke("--seed", "3").output
