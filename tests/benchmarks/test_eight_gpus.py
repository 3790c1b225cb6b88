"""The command of eight GPUs, as far as processes can run it."""

import json

import pytest
import torch.distributed as dist

testing = pytest.importorskip("click.testing")

from benchmarks.eight_gpus import cases_of, main  # noqa: E402

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


def run(tmp_path, ranks):
    path = tmp_path / "summary.json"
    options = ["--dry-run", "--rounds", "1", "--round-ms", "1", "--ranks", str(ranks)]
    done = testing.CliRunner().invoke(main, [*options, "--summary", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["wrong"] == [] and found["memory"]["kind"] == "Files"
    assert "the same bits as one process" in done.output
    tried = [(of, side) for of, sides in cases_of(ranks, True) for side in sides]
    ours = [x for x in tried if x[1].startswith("tilewise")]
    rows = [x for x in found["rows"] if x["provider"].startswith("tilewise")]
    refused = done.output.count("key heads cannot be dealt evenly")
    assert len(rows) + refused == len(ours)


@pytest.mark.slow
def test_dry_run(tmp_path):
    run(tmp_path, 2)


@pytest.mark.slow
def test_dry_run_of_eight(tmp_path):
    run(tmp_path, 8)


def test_what_is_timed_is_what_was_promised():
    shapes = [of for of, _ in cases_of(8, False) if of.direction == "fwd"]
    assert [of.tokens for of in shapes[:3]] == [8192, 16384, 65536]
    assert {of.seqlen for of in shapes} >= {1 << 20, 256 << 10}
    assert all((of.nheads, of.nheads_k, of.headdim) == (32, 8, 128) for of in shapes[:3])
    documents = next(of for of in shapes if of.documents)
    assert (documents.tokens, documents.nheads, documents.nheads_k) == (8192, 64, 8)
    assert next(of for of in shapes if of.window).window == 4096
