"""Packed sequences in the bench: each is checked, and held against our own dense rate."""

import pytest
import torch
from helpers.made_rows import small as row

from benchmarks.bench import load, run_suite
from benchmarks.bench.arguments import options_of
from benchmarks.bench.check import judge, make_inputs, results_of, truth
from benchmarks.bench.providers import Provider
from benchmarks.bench.run import Outcome, hold_against_dense, lines_of
from benchmarks.bench.shapes import dense_of, packed
from benchmarks.bench.standings import dense_rates, standings
from benchmarks.bench.timer import Spread
from tilewise import attention_reference
from tilewise.explain.call import packing_of
from tilewise.explain.shapes import Shape

SMALL = packed("fwd", "40,7,64,23", (4, 2, 16), True)


def by_reference(shape):
    options = options_of(shape, "cpu")
    starts = {name: x for name, x in packing_of(shape, "cpu").items() if "cu_seqlens" in name}
    return lambda q, k, v: attention_reference(q, k, v, **options, **starts)


def timed(*providers, shape=SMALL, **options):
    asked = dict(rounds=2, round_ms=1, show=lambda line: None)
    return run_suite([shape], providers, **{**asked, **options})


def test_inputs_are_packed():
    q, k, v, dout = make_inputs(SMALL, "cpu")[:4]
    assert q.shape == dout.shape == (134, 4, 16) and k.shape == v.shape == (134, 2, 16)


FEATURES = {"plain": {}, "features": dict(window=9, softcap=1.5, alibi=True, sinks=True)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_the_truth_is_that_of_each_sequence(features, causal, monkeypatch):
    """And no row is left out of it, blockwise or not."""
    from benchmarks.bench import standards

    monkeypatch.setitem(standards.BLOCK_ELEMENTS, "cpu", 2000)
    features = {**features, "window": features.get("window") if causal else None}
    shape = SMALL._replace(direction="bwd", dtype="float64", causal=causal, **features)
    inputs = make_inputs(shape, "cpu")
    ours = results_of(shape, by_reference(shape), inputs)
    rows = {name: [] for name in ours}
    for name, place, exact, _ in truth(shape, inputs):
        torch.testing.assert_close(ours[name][place], exact, atol=1e-12, rtol=1e-12)
        assert exact.shape[1:] == (2 if name in ("out", "dq") else 1, 16)
        rows[name] += place[0].flatten().tolist()
    assert all(sorted(found) == list(range(134)) for found in rows.values())


def test_every_key_head_is_looked_at():
    shape = packed("fwd", "9,9,9,9,9", (4, 2, 16), False)
    ((_, place, _, _),) = truth(shape, make_inputs(shape, "cpu"))
    assert place[1].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sequence", range(4))
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_one_wrong_sequence_is_wrong(sequence, direction):
    """Its last row alone, in out or through a gradient."""
    shape = SMALL._replace(direction=direction)
    last = sum(shape.sequences[: sequence + 1]) - 1
    weight = torch.ones(134, 1, 1)
    weight[last] = 1.1 if direction == "fwd" else 1.5

    def attend(q, k, v):
        out = by_reference(shape)(q, k, v)
        wrong = out * weight.to(out.dtype)
        return wrong if direction == "fwd" else wrong + (out - wrong).detach()

    done = timed(Provider("peer", lambda *asked: None, lambda *asked: attend), shape=shape)
    assert done[0].row is None and done[0].wrong.startswith("out" if direction == "fwd" else "d")


def test_a_wrong_long_sequence_does_not_hide_below_short_ones():
    """Its results are small: an error of a fifth of them is less than what a short one may have."""
    shape = packed("fwd", "2048" + ",20" * 30, (2, 1, 64), False)
    inputs = make_inputs(shape, "cpu")
    weight = torch.ones(2648, 1, 1)
    weight[:2048] = 1.2
    right = by_reference(shape)
    expected = truth(shape, inputs)
    wrong = judge(shape, lambda *x: (right(*x) * weight).bfloat16(), inputs, expected, False)
    assert judge(shape, right, inputs, expected).passes and not wrong.passes


def test_a_provider_that_sees_past_the_ends_is_wrong():
    def attend(q, k, v):
        return attention_reference(q[None], k[None], v[None], causal=True)[0]

    (done,) = timed(Provider("one", lambda *asked: None, lambda *asked: attend))
    assert done.row is None and done.wrong


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_run_beside_our_dense_rate(direction, tmp_path):
    file, lines = tmp_path / "rows.jsonl", []
    shape = SMALL._replace(direction=direction)
    done = timed(
        *("tilewise", "flash", "tilewise:cpu"),
        shape=shape,
        save=file,
        show=lines.append,
        with_dense=True,
    )
    ours, forced, dense = rows = load(file)
    assert [one.provider for one in rows] == ["tilewise", "tilewise:cpu", "tilewise"]
    assert [Shape(**one.shape) for one in rows] == [shape, shape, dense_of(shape)]
    assert len({one.run for one in rows}) == 1
    sizes = {"sequences": 4, "longest": 64, "tokens": 134}
    assert ours.extra == {**sizes, "of_dense": done[0].kept.median}
    assert forced.extra == sizes and dense.extra == {"beside": str(shape)}
    assert any("tilewise dense" in line and "packed keeps" in line for line in lines)
    assert any("flash" in line and "packed sequences" in line for line in lines)


def test_a_dense_shape_has_no_dense_one_beside_it():
    assert len(timed("tilewise", shape=dense_of(SMALL), with_dense=True)) == 1


def against_dense(shape, packed_ms, dense_ms):
    """The outcomes of a packed shape, from the times of its rounds; None: not timed."""

    def outcome(at, name, times):
        return Outcome(at, name, times and row(rounds_ms=times), Spread(1.0, 1.0, 1.0))

    ours, dense = (
        outcome(shape, "tilewise", packed_ms),
        outcome(dense_of(shape), "tilewise", dense_ms),
    )
    return hold_against_dense([ours, outcome(shape, "fa3", [1.0, 1.0, 1.0]), dense])


def test_what_is_kept_is_a_ratio_of_flops_round_by_round():
    """The machine gets slower by the round; the ratio stays."""
    shape = packed("fwd", "zipf", (16, 16, 128), False)
    work = shape.flops / dense_of(shape).flops
    first, fa3, dense = against_dense(shape, [1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert first.kept == pytest.approx((work / 2,) * 3)
    assert first.row.extra["of_dense"] == pytest.approx(work / 2)
    assert fa3.kept is None and dense.ratio is None
    assert f"packed keeps {work / 2:.3f}" in lines_of(shape, [first, fa3, dense])[-1]


@pytest.mark.parametrize("lost", [(None, [1.0]), ([1.0], None), (None, None)])
def test_nothing_is_kept_where_one_did_not_run(lost):
    first, _, dense = against_dense(packed("fwd", "zipf", (16, 16, 128), False), *lost)
    assert first.kept is None and dense.kept is None


def test_the_last_lines_say_what_is_kept():
    def kept(name, value, causal=False):
        shape = packed("fwd", name, (16, 16, 128), causal)
        spread = Spread(value, value, value)
        return Outcome(shape, "tilewise", object(), Spread(1, 1, 1), kept=spread)

    done = [kept("equal4096", 0.8), kept("zipf", 0.76), kept("one-long", 0.4), kept("equal512", 1)]
    lines = dense_rates([*done, kept("zipf", 0.19, True)])
    figures = {line.split("  ")[1]: line for line in lines[1:]}
    assert "TFLOP/s of tilewise, packed" in lines[0]
    assert figures["zipf / dense S4096"].split()[4:6] == ["0.380", "0.190"]
    assert "causal" in figures["zipf / dense S4096"]
    assert figures["zipf / equal4096"].split()[3:5] == ["0.950", "0.950"]
    assert figures["one-long / equal4096"].split()[3] == "0.500"
    assert figures["equal512 / dense S512"].split()[4] == "1.000"
    assert not dense_rates([]) and not dense_rates([done[0]._replace(kept=None)])


def test_dense_times_are_no_ratio_to_a_peer():
    """Only what did the same work is divided."""
    lines = standings(timed("tilewise", "tilewise:cpu", with_dense=True))
    assert [line.split()[0] for line in lines] == ["fwd:", "tilewise:cpu"]
