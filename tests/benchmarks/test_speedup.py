"""Speed-up over standard attention: what is checked, timed and measured."""

import pytest
import torch
from helpers.tiers import sample

from benchmarks import speedup
from benchmarks.bench import load
from benchmarks.bench.providers import Provider, provider, standard_attention
from benchmarks.speedup import CASES, run_speedup, shapes_of

QUICK = dict(rounds=2, round_ms=1.0, show=lambda line: None)


def shapes(*cases, directions=("fwd",), seqlens=(32,)):
    return shapes_of(directions, cases, seqlens, 64, (2, 2, 16), "float32")


def test_shapes():
    found = shapes(*CASES, directions=("fwd", "fwd+bwd"), seqlens=(32, 64))
    assert len(found) == 12
    assert [(shape.causal, shape.modifier) for _, shape in found[:6:2]] == [
        (False, ""),
        (True, ""),
        (False, "dropout"),
    ]
    assert {shape.batch * shape.seqlen_q for _, shape in found} == {64}


@pytest.mark.parametrize(
    "cases", sample([("no mask", "dropout"), tuple(CASES)], ("no mask", "dropout"))
)
@pytest.mark.parametrize("directions", sample([("fwd",), ("fwd", "fwd+bwd")], ("fwd",)))
def test_both_are_checked_timed_and_measured(cases, directions, tmp_path):
    file = tmp_path / "rows.jsonl"
    asked = shapes(*cases, directions=directions)
    done = run_speedup(asked, provider("tilewise"), save=file, **QUICK)
    assert len(done) == len(cases) * len(directions)
    for gain in done:
        assert gain.speedup.median == pytest.approx(gain.standard.ratio.median)
        assert gain.our_peak > 0 and gain.standard_peak > 0 and gain.memory > 0
    rows = load(file)
    assert len(rows) == 2 * len(done) and all(row.max_error <= row.bound for row in rows)
    dropped = 2 * cases.index("dropout")
    checked = [row.extra.get("checked") for row in rows[dropped : dropped + 2]]
    assert checked == [None, "without dropout"]
    assert rows[1].extra["speedup"] > 0 and rows[0].extra["case"] == "no mask"


def test_standard_attention_drops(monkeypatch):
    """What is timed is not what was checked: it must drop, and scale what is left."""
    q, k = torch.zeros(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
    v = torch.eye(64)[None, :, None]
    kept = standard_attention(q, k, v, dropout_p=0.25)[0, :, 0]
    assert sorted((kept * 64).unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert 0.7 < (kept > 0).float().mean() < 0.8
    seen = []
    real = speedup.standard_attention
    monkeypatch.setattr(speedup, "standard_attention", lambda *x: seen.append(x[3:]) or real(*x))
    run_speedup(shapes("dropout"), provider("tilewise"), **QUICK)
    assert set(seen) == {(False, speedup.DROPOUT_P)}


def test_a_provider_that_is_wrong_or_out_of_memory_has_no_speedup(monkeypatch):
    wrong = Provider("tilewise:wrong", lambda *x: None, lambda *x: lambda q, k, v: 2 * q)
    (gain,) = run_speedup(shapes("causal"), wrong, **QUICK)
    assert gain.ours.wrong and gain.speedup is None and gain.memory is None
    full = speedup.STANDARD._replace(refuse=lambda *x: "its score matrices need 9 GiB")
    monkeypatch.setattr(speedup, "STANDARD", full)
    (gain,) = run_speedup(shapes("dropout"), provider("tilewise"), **QUICK)
    assert gain.ours.row is not None and gain.standard_peak is None and gain.speedup is None
