"""The bench core: rows that round-trip, fair interleaving, and no time for a wrong result."""

import dataclasses
import json
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from helpers.made_rows import small as row

from benchmarks.bench import SUITES, append, load, run_suite, time_interleaved
from benchmarks.bench.check import make_inputs, results_of, truth
from benchmarks.bench.providers import PROVIDERS, Provider, provider, standard_attention
from benchmarks.bench.row import validate
from benchmarks.bench.shapes import square
from benchmarks.bench.timer import Spread, ratio
from tilewise.cli.machine import triton_version
from tilewise.explain.shapes import Shape

SMALL = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)


def test_rows_round_trip(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    append(file, [row()])
    append(file, [row(provider="flash", max_error=None), row(extra={"gb_s": 3.0})])
    assert load(file) == [
        row(),
        row(provider="flash", max_error=None),
        row(extra={"gb_s": 3.0}),
    ]
    assert Shape(**load(file)[0].shape) == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_ms": "fast"}, "median_ms"),
        ({"colour": "red"}, "colour"),
        ({"rounds_ms": []}, "rounds_ms"),
        ({"provider": None}, "provider"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, message):
    record = {**dataclasses.asdict(row()), **change}
    with pytest.raises(ValueError, match=message):
        validate(record)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(dataclasses.asdict(row())) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="line 2"):
        load(file)


def test_a_missing_field_is_named():
    record = dataclasses.asdict(row())
    del record["bound"]
    with pytest.raises(ValueError, match="'bound' is missing"):
        validate(record)


def test_providers_take_turns():
    """Each round times every provider once, in another order."""
    costs, order = {"a": 2.0, "b": 3.0}, []

    def clock(call, calls):
        order.append((call(), calls))
        return [costs[call()]] * calls

    calls = {name: (lambda name=name: name) for name in costs}
    times = time_interleaved(calls, clock=clock, rounds=4, round_ms=12.0)
    assert times == {"a": [2.0] * 4, "b": [3.0] * 4}
    assert order[-8:] == [(name, {"a": 6, "b": 4}[name]) for name in "abbaabba"]
    assert ratio(times["a"], times["b"]) == Spread(1.5, 1.5, 1.5)


@pytest.mark.parametrize("count", range(2, 8))
def test_each_follows_every_other_equally_often(count):
    order = []
    calls = {str(i): (lambda i=i: i) for i in range(count)}
    rounds = count if count % 2 == 0 else 2 * count
    time_interleaved(calls, clock=lambda call, n: [order.append(call())] and [1.0], rounds=rounds)
    order = [order[-count * rounds :][at : at + count] for at in range(0, count * rounds, count)]
    followed = Counter(pair for names in order for pair in pairwise(names))
    assert set(followed.values()) == {rounds // count}
    assert len(followed) == count * (count - 1)


@pytest.mark.parametrize("count", range(4, 8))
def test_the_effect_of_a_call_on_the_next_is_balanced(count):
    """A card is cooler after a slow call, and clocks the next one higher, whichever that is. Of
    two calls alone each follows the other in half of the rounds, which no median hides.
    """
    last = []

    def clock(call, calls):
        is_cool = last[-1:] == ["slow"] and call() != "slow"
        last.append(call())
        return [0.95 if is_cool else 1.0] * calls

    names = ["slow", *map(str, range(1, count))]
    times = time_interleaved({n: (lambda n=n: n) for n in names}, clock=clock, rounds=5)
    for name in names[1:]:
        assert ratio(times[name], times["1"]).median == 1.0


def test_the_drift_of_a_machine_cancels_in_a_ratio():
    """Both get slower by the round; the ratio taken round by round stays."""
    slowdown = [1.0, 1.3, 2.0, 4.0, 9.0]
    ours, theirs = [1.0 * s for s in slowdown], [1.5 * s for s in slowdown]
    assert ratio(ours, theirs) == Spread(1.5, 1.5, 1.5)


def test_percentiles_are_interpolated():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == pytest.approx((3.0, 1.8, 4.2))
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_flops():
    assert SMALL.batch == 2 and SMALL.nheads == 2
    assert SMALL.flops == 4 * 2 * 2 * 32 * 32 * 16 / 2
    assert SMALL._replace(direction="bwd").flops == 2.5 * SMALL.flops
    assert SMALL._replace(direction="fwd+bwd").flops == 3.5 * SMALL.flops
    assert SMALL._replace(causal=False).flops == 2 * SMALL.flops


def test_the_dense_suite_is_the_classic_one():
    assert len(SUITES["dense"]) == 2 * 2 * 2 * 5
    for shape in SUITES["dense"]:
        assert shape.batch * shape.seqlen_q == 16384
        assert shape.nheads * shape.headdim == 2048


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_suite_on_the_cpu(direction, tmp_path):
    shapes = [SMALL._replace(direction=direction, nheads=4, nheads_k=2)]
    file = tmp_path / "rows.jsonl"
    lines = []
    names = ["tilewise", "flash", "standard", "cudnn"]
    done = run_suite(shapes, names, rounds=2, round_ms=1, save=file, show=lines.append)
    rows = load(file)
    assert [r.provider for r in rows] == ["tilewise", "flash", "standard"]
    assert len({r.run for r in rows}) == 1
    assert all(len(r.rounds_ms) == 2 and r.max_error <= r.bound for r in rows)
    assert done[0].ratio.median == 1.0
    assert "CUDA" in done[3].refused and done[3].row is None
    assert any("cudnn" in line and "not here" in line for line in lines)


def wrong_provider(calls):
    def attend(q, k, v):
        calls.append(1)
        return standard_attention(q, k, v, True) + 1e-3

    return Provider("wrong", lambda shape, device: None, lambda shape, device: attend)


def test_a_wrong_provider_is_not_timed():
    calls, lines = [], []
    done = run_suite([SMALL], [wrong_provider(calls)], rounds=2, round_ms=1, show=lines.append)
    assert done[0].row is None and done[0].wrong.startswith("out")
    assert len(calls) == 1  # once, to be judged
    assert any("WRONG" in line for line in lines)


def test_a_wrong_gradient_is_not_timed():
    def attend(q, k, v):
        return standard_attention(q, k, v.detach() + 1.001 * (v - v.detach()), True)

    bad = Provider("bad", lambda shape, device: None, lambda shape, device: attend)
    (done,) = run_suite(
        [SMALL._replace(direction="bwd")], [bad], rounds=2, round_ms=1, show=lambda line: None
    )
    assert done.row is None and done.wrong.startswith("dv")


def test_a_provider_that_raises_is_a_refusal():
    def attend(q, k, v):
        raise RuntimeError("no kernel for this")

    broken = Provider("broken", lambda shape, device: None, lambda shape, device: attend)
    (done,) = run_suite([SMALL], [broken], rounds=2, round_ms=1, show=lambda line: None)
    assert "no kernel for this" in done.refused


def test_a_backward_is_timed_without_its_forward():
    from benchmarks.bench.run import call_of

    forwards = []

    def attend(q, k, v):
        forwards.append(1)
        return standard_attention(q, k, v)

    call = call_of(SMALL._replace(direction="bwd"), attend, make_inputs(SMALL, "cpu"))
    grads = [call() for _ in range(3)]
    assert len(forwards) == 1
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[2], strict=True))


def test_the_truth_is_blockwise_and_exact(monkeypatch):
    """A few rows at a time gives what all rows at once give."""
    from benchmarks.bench import standards

    shape = SMALL._replace(direction="bwd", nheads=4, nheads_k=2, seqlen_k=48)
    inputs = make_inputs(shape, "cpu")
    whole = truth(shape, inputs)
    monkeypatch.setitem(standards.BLOCK_ELEMENTS, "cpu", 500)
    for (name, place, exact, _), (_, _, blockwise, _) in zip(
        whole, truth(shape, inputs), strict=True
    ):
        torch.testing.assert_close(blockwise, exact, atol=1e-12, rtol=1e-12)
        ours = results_of(shape, lambda q, k, v: standard_attention(q, k, v, True), inputs)
        torch.testing.assert_close(ours[name][place].double(), exact, atol=1e-5, rtol=1e-5)


def test_layouts_hold_the_same_values():
    one, other = make_inputs(SMALL, "cpu"), make_inputs(SMALL, "cpu", "bhsd")
    assert torch.equal(one.q, other.q)
    assert one.q.is_contiguous() and other.q.transpose(1, 2).is_contiguous()


def test_unknown_providers_are_named():
    with pytest.raises(KeyError, match="flash"):
        provider("flesh")
    with pytest.raises(KeyError, match="no backend 'none'"):
        provider("tilewise:none")
    assert provider("tilewise:cpu").refuse(SMALL, "cpu") is None
    assert provider("tilewise:portable").refuse(SMALL, "cpu") is not None


def test_a_provider_that_is_deterministic(monkeypatch):
    asked = {}
    monkeypatch.setattr("tilewise.attention", lambda *_, **options: asked.update(options))
    provider("tilewise:deterministic").prepare(SMALL, "cpu")(None, None, None)
    assert asked["deterministic"] is True and asked["backend"] is None


def test_the_triton_of_a_row_is_the_one_imported(tmp_path, monkeypatch):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text('"""Newer."""\n__version__ = "99.1"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert triton_version() == "99.1"


def test_torchs_fused_kernels_of_wide_heads():
    """The efficient one alone takes headdims over 256."""
    asked = {name: PROVIDERS[name].refuse for name in ("flash", "cudnn", "efficient")}
    wide, narrow = (square("fwd", 64, d, True, dtype="bfloat16") for d in (512, 256))
    found = {name: refuse(wide, "cuda") for name, refuse in asked.items()}
    assert found.pop("efficient") is None
    assert all("up to 256, not 512" in reason for reason in found.values())
    assert not any(refuse(narrow, "cuda") for refuse in asked.values())
    assert asked["flash"](wide, "cpu") is None


def test_standard_attention_refuses_what_does_not_fit():
    shape = square("fwd", 1 << 20, 64, False, tokens=1 << 20)
    assert "GiB" in PROVIDERS["standard"].refuse(shape, "cpu")


NARROW = {"causal": {}, "softcap": dict(seqlen_q=256, seqlen_k=256, softcap=30.0)}


@pytest.mark.parametrize("features", NARROW.values(), ids=NARROW)
def test_a_backward_in_fp32_may_err_as_one_that_stores_lse(features):
    """Autograd of the plain formula, which stores P, is nearer than any kernel: dq was WRONG."""
    shape = square("bwd", 128, 64, True, dtype="float32", tokens=128, hidden=128)
    (done,) = run_suite(
        [shape._replace(**features)], ["tilewise:cpu"], rounds=1, round_ms=1, show=lambda line: None
    )
    assert done.wrong is None and done.row is not None


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_an_out_is_allowed_the_plain_run_alone(direction):
    shape = SMALL._replace(direction=direction)
    plains = {name: len(plains) for name, _, _, plains in truth(shape, make_inputs(shape, "cpu"))}
    assert plains == ({"out": 1} | (dict(dq=2, dk=2, dv=2) if direction == "bwd" else {}))
