"""`tilewise explain`: tables, JSON, picture, wrong usage."""

import json

import pytest

pytest.importorskip("rich")
pytest.importorskip("triton")
testing = pytest.importorskip("click.testing")

from tilewise.cli import explain_tables  # noqa: E402
from tilewise.cli.__main__ import main  # noqa: E402
from tilewise.explain.cards import Roof  # noqa: E402


def invoke(*arguments, width=100):
    runner = testing.CliRunner(env={"COLUMNS": str(width)})
    return runner.invoke(main, ["explain", *arguments])


def test_it_says_which_backend_serves_and_why():
    done = invoke("--no-compile", "--causal", "--kv-heads", "4", "--on", "sm80")
    assert done.exit_code == 0, done.output
    assert "fwd B1 S4096 H16:4 D128 causal bfloat16 on a100 (sm80)" in done.output
    assert "its instructions (wgmma, TMA) are those of Hopper GPUs" in done.output
    assert "chosen: the first that serves" in done.output
    assert "portable serves it. Limit: arithmetic" in done.output


def test_the_cpu_is_explained():
    done = invoke("--on", "cpu", "--dtype", "fp32", "--seqlen", "256", "--heads", "2")
    assert done.exit_code == 0, done.output
    assert "on this CPU" in done.output and "torch's fused kernel, in one piece" in done.output
    height = dict(explain_tables.roof_rows(Roof(0.2, 0.0125, "measured")))["roof"]
    assert height == "0.2 TFLOP/s, 12.5 GB/s"


def test_copies_are_told():
    """Of rows that TMA cannot read; where they are few, another backend serves."""
    asked = "--no-compile", "--json", "--gpu", "h100", "--headdim", "100", "--seqlen"
    long, short = (json.loads(invoke(*asked, n).stdout) for n in ("4096", "512"))
    assert long["backend"] == "hopper" and "not a multiple of 8" in long["answers"][0]["reason"]
    assert short["backend"] == "portable" and short["answers"][0]["kind"] == "slower"


def test_nothing_serves_it():
    done = invoke("--headdim", "513", "--gpu", "a100")
    assert done.exit_code == 1 and "nothing serves this call." in done.output


def test_json_holds_all():
    done = invoke("--no-compile", "--json", "--gpu", "h100", "--pass", "fwd+bwd")
    found = json.loads(done.stdout)
    assert found["card"] == "h100" and found["target"] == "sm90" and found["backend"] == "hopper"
    assert [one["kernel"] for one in found["launches"]] == [
        "hopper_fwd_kernel",
        "hopper_bwd_kernel",
    ]
    assert found["work"]["side"] == "compute" and found["work"]["roof"]["tflops"] == 989.0


def test_packed_lengths_and_modifiers_are_taken():
    assert "160,300 B2 S<=300" in invoke("--no-compile", "--lengths", "160,300").output
    assert "documents mask" in invoke("--no-compile", "--modifier", "documents").output


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.png"
    done = invoke("--no-compile", "--png", str(file))
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke("--no-compile", "--png", str(tmp_path / "roof.png"))
    assert done.exit_code == 2 and "tilewise[plot]" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu voodoo", "h200"),
        ("--on sm75", "sm80"),
        ("--on cpu --gpu h200", "exclude"),
        ("--on sm80 --gpu h200", "sm90"),
        ("--heads 16 --kv-heads 3", "multiple"),
        ("--window 5", "--causal"),
        ("--modifier wavy", "documents"),
        ("--modifier bias --causal", "no other"),
        ("--lengths 0,x", "160,300"),
        ("--seqlen 1k,2k", "one number"),
    ],
)
def test_wrong_usage_is_named(options, message):
    done = invoke("--no-compile", *options.split())
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_step_of_decoding():
    asked = "--cache", "--no-compile", "--gpu", "h200", "--heads", "32", "--kv-heads", "8"
    asked = *asked, "--backend", "portable"
    done = invoke(*asked, "--batch", "32", "--page-size", "16", width=140)
    assert done.exit_code == 0, done.output
    for text in (
        "decode B32 S8192 H32:8 D128 bfloat16, 1 query, pages of 16, on h200 (sm90)",
        "attn_split_kernel",
        "16 of the longest sequence, 512 in the batch",
        "none: a program walks all pieces of its rows",
        "1,073.7 MB",
        "portable serves it. Limit: memory, with 4 FLOPs a byte",
    ):
        assert text in done.output, done.output
    found = json.loads(invoke(*asked, "--json", "--seqlen", "8", "--split-size", "1024").stdout)
    assert found["shape"]["seqlen_q"] == 8 and found["pieces"]["of_longest"] == 8
    assert [one["kernel"] for one in found["launches"]] == ["attn_split_kernel", "attn_fold_kernel"]


def test_a_step_on_hopper():
    asked = "--cache", "--no-compile", "--gpu", "h200", "--heads", "32", "--kv-heads", "8"
    done = invoke(*asked, "--batch", "32", width=140)
    assert done.exit_code == 0, done.output
    for text in (
        "hopper_decode_kernel",
        "4,096, counted by pieces",
        "16,384 of 520 bytes, 8.5 MB, used by tiles that several programs share",
        "at most 17.04 MB",
    ):
        assert text in done.output, done.output


def test_a_step_on_the_cpu_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.png"
    asked = "--cache", "--on", "cpu", "--dtype", "fp32", "--lengths", "160,300", "--png", str(file)
    done = invoke(*asked)
    assert done.exit_code == 0, done.output
    assert "160,300 B2 S<=300" in done.output and "folded as they come" in done.output
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--page-size 16", "--cache"),
        ("--cache --alibi", "no other feature"),
        ("--cache --pass bwd", "forward"),
        ("--cache --headdim-v 64", "one headdim"),
        ("--cache --heads 16 --kv-heads 3", "multiple"),
        ("--cache --lengths 4,5 --seqlen 8", "8 queries"),
    ],
)
def test_wrong_usage_beside_a_cache_is_named(options, message):
    done = invoke("--no-compile", *options.split())
    assert done.exit_code == 2 and message in done.output, done.output
