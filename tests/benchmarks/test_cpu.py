"""`python -m benchmarks cpu`: the public functions beside torch's, each held to fp64."""

import json

from click.testing import CliRunner

from benchmarks.cpu import cpu


def test_rows_of_three_functions(tmp_path):
    file = tmp_path / "rows.jsonl"
    asked = ["--seqlen", "16", "--dtype", "float32", "--rounds", "1", "--round-ms", "1", "--json"]
    done = CliRunner().invoke(cpu, [*asked, "--save", str(file)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["provider"] for row in rows[:3]] == ["tilewise", "tilewise:sdpa", "sdpa"]
    assert {(row["shape"]["direction"], row["shape"]["causal"]) for row in rows} == {
        (direction, causal) for direction in ("fwd", "fwd+bwd") for causal in (False, True)
    }
    assert {row["suite"] for row in rows} == {"cpu"} and len(rows) == 12
