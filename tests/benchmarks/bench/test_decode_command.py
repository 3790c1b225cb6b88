"""`python -m benchmarks bench decode`: what it asks for, what it prints and saves."""

import json

import pytest

testing = pytest.importorskip("click.testing")

from benchmarks.bench import commands as command  # noqa: E402
from benchmarks.bench import load  # noqa: E402

QUICK = ["--device", "cpu", "--quick", "--rounds", "1", "--round-ms", "1"]


def invoke(*arguments):
    runner = testing.CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(command.bench, ["decode", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """The cases of a run that is not made, and its options."""
    seen = {}

    def run_decode(cases, decoders, **options):
        seen.update(cases=cases, decoders=decoders, **options)
        return []

    monkeypatch.setattr("benchmarks.bench.decode.run_decode", run_decode)
    return seen


def test_a_gpu_is_asked_for_the_figures_that_are_promised(asked, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = invoke("--device", "cuda")
    assert done.exit_code == 0, done.output
    assert [[str(case[0]), len(case)] for case in asked["cases"]] == [
        ["decode B32 S8192 H32:8 D128 bfloat16", 4],
        ["decode B1 S8192 H32:8 D128 bfloat16", 4],
    ]
    assert {(s.seqlen_q, s.page_size) for s in asked["cases"][0]} == {
        *((1, 0), (1, 16), (8, 0), (8, 16)),
    }
    assert [one.name for one in asked["decoders"]] == ["tilewise", "sdpa", "fa3"]
    assert asked["cold"] == "rotate" and asked["rounds"] == 5 and asked["save"] is None


def test_options_reach_the_steps(asked):
    options = "--batch 2,3 --seqlens 1k --pages 1,256 --queries 2 --heads 8x64,8:1x64 --dtype fp16"
    more = "--against flex --cold flush --provider tilewise:cpu"
    done = invoke("--device", "cpu", *options.split(), *more.split())
    assert done.exit_code == 0, done.output
    assert [str(case[0]) for case in asked["cases"]] == [
        *("decode B2 S1024 H8 D64 float16", "decode B3 S1024 H8 D64 float16"),
        *("decode B2 S1024 H8:1 D64 float16", "decode B3 S1024 H8:1 D64 float16"),
    ]
    assert [(s.seqlen_q, s.page_size) for s in asked["cases"][0]] == [(2, 1), (2, 256)]
    assert [one.name for one in asked["decoders"]] == ["tilewise:cpu", "flex"]
    assert asked["cold"] == "flush"


def test_ragged_batches_replace_batch_and_seqlens(asked):
    done = invoke("--device", "cpu", "--lengths", "8k,16,300")
    assert done.exit_code == 0, done.output
    ((first, *_),) = asked["cases"]
    assert first.sequences == (8192, 16, 300)


def test_a_chunk_is_timed_with_decodes_and_without(asked):
    options = "--batch 64 --queries 1,8 --chunk 2k --split-size 2k --pages 16 --seqlens 8k"
    done = invoke("--device", "cpu", *options.split())
    assert done.exit_code == 0, done.output
    ((*steps,),) = asked["cases"]
    pairs = [(of.seqlen_q, of.chunk) for of in steps]
    assert pairs == [(0, 2048), (1, 0), (1, 2048), (8, 0), (8, 2048)]
    assert {of.split_size for of in steps} == {2048}


@pytest.mark.parametrize("json_asked", [True, False])
def test_a_run_on_the_cpu(tmp_path, json_asked):
    file = tmp_path / "rows.jsonl"
    more = ["--save", str(file)] + ["--json"] * json_asked
    done = invoke(*QUICK, "--queries", "1", "--provider", "tilewise:cpu", *more)
    assert done.exit_code == 0, done.output
    rows = load(file)
    assert [row.provider for row in rows] == ["tilewise:cpu"] * 2 + ["sdpa"]
    assert "3 rows timed, 0 wrong" in (done.stderr if json_asked else done.stdout)
    if json_asked:
        printed = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["median_ms"] for row in printed] == [row.median_ms for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--against missing", "sdpa"),
        ("--seqlens 4 --queries 8", "8 queries"),
        ("--lengths fp4", "sets"),
        ("--pages -1", "list of numbers"),
        ("--cold never", "rotate"),
    ],
)
def test_wrong_usage_is_named(options, message):
    done = invoke("--device", "cpu", *options.split())
    assert done.exit_code == 2 and message in done.output


def test_a_wrong_step_fails_the_command(monkeypatch):
    wrong = lambda *asked: lambda q, cache: q * 2  # noqa: E731
    monkeypatch.setattr("benchmarks.bench.decoders._ours", wrong)
    done = invoke(*QUICK, "--queries", "1", "--pages", "0", "--against", "")
    assert done.exit_code == 1 and "WRONG" in done.output


def test_caches_are_steps_of_one_case(asked):
    done = invoke("--device", "cpu", "--dtype", "bf16", "--cache", "bf16,e4m3,int8:row")
    assert done.exit_code == 0, done.output
    (steps,) = asked["cases"]
    assert {s.cache for s in steps} == {"", "e4m3", "int8:row"} and len(steps) == 12
    done = invoke("--device", "cpu", "--cache", "fp4")
    assert done.exit_code == 2 and "fp4" in done.output
