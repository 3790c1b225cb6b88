"""`python -m benchmarks bench distributed`, on processes."""

import importlib.util
import json

import pytest
import torch
import torch.distributed as dist

testing = pytest.importorskip("click.testing")

import tilewise.distributed as td  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.bench import load, sharded_run  # noqa: E402
from benchmarks.bench.sharded import (  # noqa: E402
    Results,
    Sharded,
    judge,
    make_inputs,
    one_process,
    results_of,
)

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


def invoke(*arguments):
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(
        main, ["bench", "distributed", "--device", "cpu", *arguments]
    )


def test_rows_of_two_processes(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = invoke(
        *("--rounds", "2", "--round-ms", "1", "--tokens", "48", "--save", str(path), "--json"),
        *("--methods", "heads,stream,ring,nodes,pairs"),
    )
    assert done.exit_code == 0, done.output
    rows = load(path)
    assert [json.loads(x)["provider"] for x in done.stdout.splitlines() if x[:1] == "{"] == [
        row.provider for row in rows
    ]
    by_name = {(row.provider, row.shape["direction"]): row for row in rows}
    sides = ["one process", *(f"tilewise:{x}" for x in ("heads", "stream", "ring", "nodes"))]
    has_ring = importlib.util.find_spec("ring_flash_attn") is not None
    assert [row.provider for row in rows if row.provider != "ring-flash-attn"] == 2 * sides
    assert all(row.command.startswith("bench distributed --device cpu --rounds 2") for row in rows)
    assert has_ring == any(row.provider == "ring-flash-attn" for row in rows)
    for direction in ("fwd", "fwd+bwd"):
        one = by_name["one process", direction]
        for name in sides[1:]:
            row = by_name[name, direction]
            assert row.run == one.run and len(row.rounds_ms) == 2
            network = row.extra.get("network_ms", 0.0)
            assert (network > 0) == (name == "tilewise:nodes")
            assert row.extra["of_ideal"] == pytest.approx(
                sum(max(a / 2, network) / b for a, b in zip(one.rounds_ms, row.rounds_ms)) / 2
            )
            assert row.max_error <= row.bound
            assert row.extra["pulled_bytes"] > 0 and row.extra["arena_bytes"] >= 2 << 16
    heads = by_name["tilewise:heads", "fwd+bwd"]
    assert heads.extra["equal_to_one"] == ["out", "dq", "dk", "dv"]
    stream, nodes = (by_name[f"tilewise:{x}", "fwd"] for x in ("stream", "nodes"))
    assert "out" in stream.extra["equal_to_one"] and "out" in nodes.extra["equal_to_one"]
    assert nodes.extra["received_bytes"] == stream.extra["pulled_bytes"]
    assert "torch-cp         not here: cuDNN is on GPUs" in done.stderr
    assert "tilewise:pairs   not here: 2 ranks are not several nodes of 2" in done.stderr


@pytest.mark.slow
def test_rows_of_two_nodes_with_two_processes(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = invoke(
        *("--ranks", "4", "--rounds", "2", "--round-ms", "1", "--tokens", "48", "--pass", "fwd"),
        *("--methods", "stream,nodes,pairs", "--against", "", "--save", str(path)),
    )
    assert done.exit_code == 0, done.output
    stream, nodes, pairs = (x.extra for x in load(path)[1:])
    assert stream["equal_to_one"] == nodes["equal_to_one"] == pairs["equal_to_one"] == ["out"]
    assert 0 < pairs["received_bytes"] < nodes["received_bytes"] == nodes["pulled_bytes"]


@pytest.mark.slow
def test_rows_of_a_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = invoke("--cache", "4096", "--rounds", "2", "--round-ms", "1", "--save", str(path))
    assert done.exit_code == 0, done.output
    one, shards, pieces = load(path)
    assert (one.provider, shards.provider) == ("one process", "tilewise:cache-shards")
    assert shards.shape["keys"] == 4096 and shards.shape["direction"] == "decode"
    assert 0 < shards.extra["of_one"] and shards.max_error <= shards.bound
    assert pieces.provider.endswith(":pieces") and 0 < pieces.extra["of_one"]
    assert "of one process" in done.output


def test_a_backward_alone_is_refused():
    done = invoke("--pass", "bwd")
    assert done.exit_code == 2 and "a backward alone" in done.output


def test_more_documents_than_tokens_are_refused():
    done = invoke("--documents", "700", "--tokens", "96")
    assert done.exit_code == 2 and "192 tokens are too few for 700 sequences" in done.output


@pytest.mark.parametrize(
    "more", [{}, dict(causal=False, window=9), dict(window=9), dict(documents=3)]
)
def test_what_is_wrong_is_seen(more):
    """In any of the results of a rank, at the rows that are looked at."""
    of = Sharded(1, 160, 4, 2, 16, dtype="float32", direction="fwd+bwd", **more)
    whole = make_inputs(of, "cpu")
    one = results_of(of, one_process(of, "cpu"), whole)
    layout = td.contiguous(160, 1)
    layout = layout if of.starts is None else layout.packed(of.starts)
    assert judge(of, one, layout, whole, one).passes
    for name in Results._fields:
        x = getattr(one, name)
        for row in (0, 159):
            wrong = x.clone()
            wrong[:, row] += 1
            verdict = judge(of, one._replace(**{name: wrong}), layout, whole, one)
            assert not verdict.passes and verdict.what.startswith(name), (name, row)
    assert torch.equal(one.out, results_of(of, one_process(of, "cpu"), whole).out)


def test_a_timed_call_makes_no_tensor_of_lengths(monkeypatch):
    """On a GPU that would wait for the calls before it."""
    of = Sharded(1, 160, 4, 2, 16, dtype="float32", documents=3)
    whole, call = make_inputs(of, "cpu"), one_process(of, "cpu")
    monkeypatch.delattr(torch, "tensor")
    call(*whole[:3])


def test_host_times_are_of_few_short_calls(monkeypatch):
    """Of more the driver's queue of launches would be full. The slowest rank's."""
    made = []

    class Clock:
        def __init__(self, device):
            pass

        def __call__(self, call, count):
            made.append(count)
            for _ in range(3):
                call()
            return [0.3, 0.1, 0.2]

    monkeypatch.setattr(sharded_run, "HostClock", Clock)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(sharded_run, "slowest", lambda times: [x + 1 for x in times])
    calls = {"short": lambda: "a", "long": lambda: "b"}
    times = {"short": [9.0, 39.0], "long": [41.0, 50.0]}
    timing = sharded_run.Timing(("short", "long"), "cuda")
    found = sharded_run.host_times(calls, times, timing)
    assert found == {"short": dict(host_us=pytest.approx(201.0))}
    assert made == [5]
    assert sharded_run.host_times(calls, times, timing._replace(device="cpu")) == {}


def test_a_host_does_not_count_its_waits_for_others(monkeypatch):
    words, now = iter([None, None, b"come", b"come", None, b"come"]), iter([1.0, 1.25, 2.0, 2.5])
    monkeypatch.setattr(sharded_run.Wire, "hear", lambda wire, rank, word: next(words))
    monkeypatch.setattr(sharded_run.time, "perf_counter", lambda: next(now))
    hear = sharded_run.Wire.hear
    with sharded_run.HostWaits() as waits:
        wire = sharded_run.Wire(1, 2)
        call = waits.noting(lambda: [wire.hear(0, b"") for _ in range(3)])
        call()
        call()
    assert waits.of_calls == [250.0, 500.0] and sharded_run.Wire.hear is hear
