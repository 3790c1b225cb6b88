"""`python -m benchmarks bench` against peers by either spelling: those that cannot run say why."""

import json

import pytest

testing = pytest.importorskip("click.testing")

from benchmarks.bench import commands as command  # noqa: E402
from benchmarks.bench.commands.dense import shapes_of  # noqa: E402

QUICK = ["--device", "cpu", "--dtype", "fp32", "--tokens", "64", "--hidden", "64"]
QUICK += ["--rounds", "1", "--round-ms", "1", "--causal", "no"]


def invoke(*arguments):
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(command.bench, arguments)


@pytest.mark.parametrize("name", ["varlen", "modifiers", "decode"])
def test_each_has_a_help_of_its_own_and_is_named_in_that_of_bench(name):
    done = invoke(name, "--help")
    assert done.exit_code == 0 and f"bench {name} [OPTIONS]" in done.output
    assert f"bench {name}" in " ".join(invoke("--help").output.split())


@pytest.mark.parametrize("name", ["fwd", "varlen", "modifiers", "decode"])
def test_exit_code_3_without_a_gpu(name, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke(name, "--device", "cuda").exit_code == 3


def test_what_names_no_command_is_dense(monkeypatch):
    seen = []
    dense = command.bench.commands["dense"]
    monkeypatch.setattr(dense, "callback", lambda **asked: seen.append(asked["directions"]))
    for words in (["fwd"], ["--save", "rows.jsonl", "bwd"], ["fwd", "bwd", "--json"], []):
        assert invoke(*words).exit_code == 0
    assert seen == [("fwd",), ("bwd",), ("fwd", "bwd"), ()]
    assert invoke("host").exit_code == 2


def test_peers_that_cannot_run_are_listed_and_have_no_row():
    peers = "sdpa-flash,fa3,fa4,sdpa-cudnn"
    sizes = ["--seqlen", "64", "--headdim", "32"]
    done = invoke("fwd", *QUICK, *sizes, "--against", peers, "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["provider"] for row in rows] == ["tilewise", "flash"]
    for name in ("fa3", "fa4"):
        assert f"{name}: no row at 1 of 1: it is for CUDA GPUs" in done.stderr
    assert "geometric mean" in done.stderr and "cudnn: no row" in done.stderr


def test_the_classic_grid_can_be_asked_for():
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    sizes = dict(tokens=(16384,), hidden=(2048,), group=1)
    both = ("fwd", "bwd"), lengths, (64, 128, 256)
    shapes = shapes_of(*both, None, "both", "bf16", **sizes)
    assert len(shapes) == 2 * 6 * 3 * 2
    assert {shape.nheads * shape.headdim for shape in shapes} == {2048}


def test_heads_of_v_can_be_narrower():
    sizes = ["--seqlen", "32", "--headdim", "48", "--headdim-v", "32"]
    done = invoke("fwd", *QUICK, *sizes, "--against", "math", "--json")
    assert done.exit_code == 0, done.output
    for line in done.stdout.splitlines():
        shape = json.loads(line)["shape"]
        assert (shape["headdim"], shape["headdim_v"]) == (48, 32)


def test_help_says_where_fa3_is_looked_for():
    text = invoke("--help").output
    assert "TILEWISE_FA3=" in text and "LD_LIBRARY_PATH" in text and "sdpa-flash" in text


def test_features_are_given_to_every_shape():
    features = ["--window", "7", "--softcap", "1.5", "--alibi", "--sinks", "--causal", "yes"]
    sizes = ["--seqlen", "32,64", "--headdim", "32"]
    done = invoke("fwd", *QUICK, *sizes, *features, "--against", "flash", "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["provider"] for row in rows] == ["tilewise", "tilewise"]
    for row in rows:
        asked = {name: row["shape"][name] for name in ("window", "softcap", "alibi", "sinks")}
        assert asked == {"window": 7, "softcap": 1.5, "alibi": True, "sinks": True}
    assert "causal window 7 softcap 1.5 alibi sinks" in done.stderr
    assert "flash: no row at 2 of 2: it does not take window 7, softcap 1.5, alibi" in done.stderr


def test_a_suite_takes_features():
    quick = [*QUICK[:2], "--rounds", "1", "--round-ms", "1", "--suite", "smoke"]
    done = invoke("fwd", *quick, "--softcap", "1.5", "--against", "math", "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["shape"]["softcap"] for row in rows] == [1.5, 1.5]


def test_sustained_times_are_in_the_row_beside_the_flushed_ones():
    sizes = ["--seqlen", "64", "--headdim", "32"]
    done = invoke("fwd", *QUICK, *sizes, "--against", "flash", "--sustained", "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(len(row["rounds_ms"]), len(row["sustained_ms"])) for row in rows] == [(1, 8)] * 2
    assert "under sustained load not slower than flash" in done.stderr
    assert "fwd: sustained time" in done.stderr and "fwd: flushed time" in done.stderr


def test_energy_needs_a_gpu():
    done = invoke("fwd", *QUICK, "--energy")
    assert done.exit_code == 2 and "--energy: a GPU's driver measures it" in done.output


@pytest.mark.parametrize("shapes", [["--causal", "no"], ["--causal", "both"], ["--suite", "smoke"]])
def test_a_window_needs_a_causal_mask(shapes):
    done = invoke("fwd", *QUICK, *shapes, "--window", "7")
    assert done.exit_code == 2 and "--causal yes" in done.output


@pytest.mark.parametrize("option", ["--window", "--softcap"])
def test_a_feature_below_zero_is_refused(option):
    assert invoke("fwd", *QUICK, "--causal", "yes", option, "-1").exit_code == 2


def test_unknown_peers_and_suites_are_usage_errors():
    assert invoke("--against", "missing").exit_code == 2
    assert invoke("--suite", "nothing").exit_code == 2


def test_rows_are_printed_as_json_and_saved(tmp_path):
    small = "--seqlen 32 --headdim 16 --tokens 64 --hidden 32 --dtype fp32 --causal yes".split()
    quick = "--rounds 2 --round-ms 1 --device cpu --against standard --json".split()
    done = invoke("fwd", *small, *quick, "--save", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["provider"] for row in rows] == ["tilewise", "standard"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
