"""Masks, bias, dropout and score functions in the bench: counted to the pair, held to fp64, given
to providers that take them, and compared with their baselines.
"""

import pytest
import torch

from benchmarks.bench import load
from benchmarks.bench.arguments import options_of
from benchmarks.bench.beside import (
    LANES,
    Compared,
    comparison,
    comparisons,
    lines_of,
    run_comparisons,
    summary,
    too_large,
    with_rates,
)
from benchmarks.bench.check import judge, make_inputs, results_of, truth
from benchmarks.bench.modifiers import predicate_of
from benchmarks.bench.providers import PROVIDERS, Provider, provider
from benchmarks.bench.run import Outcome
from tilewise import attention_reference, mods
from tilewise.explain import modifiers
from tilewise.explain.call import block_mask_of
from tilewise.explain.lengths import documents
from tilewise.explain.shapes import Shape

SIZES = dict(tokens=256, heads=(4, 2, 16))


def shape_of(modifier, direction="fwd", seqlen=128, dtype="float32"):
    return comparison(modifier, direction, seqlen, provider("tilewise"), dtype=dtype, **SIZES).shape


def by_reference(shape):
    options = options_of(shape, "cpu")
    return lambda q, k, v, bias=None: attention_reference(q, k, v, bias=bias, **options)


def dense(shape, mask):
    return mods.mask(mask).dense(shape.batch, shape.nheads, shape.seqlen_q, shape.seqlen_k)


@pytest.mark.parametrize("seqlen", [256, 1024, 1536])
@pytest.mark.parametrize("name", modifiers.MASKS)
def test_pairs_are_those_of_the_mask_and_flex_has_the_same(name, seqlen):
    shape = shape_of(name)._replace(batch=1, nheads=1, seqlen_q=seqlen, seqlen_k=seqlen)
    seen = dense(shape, block_mask_of(shape, "cpu").mask)
    assert shape.pairs == seen.sum() == modifiers.pairs_of(name, seqlen)
    assert torch.equal(seen, dense(shape, predicate_of(shape, "cpu")))


def test_a_window_is_1024_keys_where_there_are_more():
    assert [modifiers.window_size(n) for n in (256, 4096, 16384)] == [64, 1024, 1024]
    assert modifiers.pairs_of("window", 16384) == 1024 * 1025 // 2 + (16384 - 1024) * 1024


def test_documents_are_uneven_and_the_same_everywhere():
    lengths = documents(16384)
    assert len(lengths) == 16 and sum(lengths) == 16384
    assert 4 < max(lengths) / min(lengths) <= 17 and len(set(lengths)) > 12
    assert lengths == documents(16384)
    with pytest.raises(ValueError, match="256 tokens"):
        documents(255)


def test_a_shape_names_its_modifier():
    assert str(shape_of("window")) == "fwd B2 S128 H4:2 D16 window mask float32"
    assert str(shape_of("dropout")) == "fwd B2 S128 H4:2 D16 full dropout float32"
    assert shape_of("documents").batch == 1 and shape_of("documents").seqlen_q == 256


@pytest.mark.parametrize("name", modifiers.NAMES)
def test_the_truth_is_that_of_the_whole(name, monkeypatch):
    """Blockwise, at every sampled head: positions, heads and rows of the batch count from where
    they are.
    """
    from benchmarks.bench import standards

    monkeypatch.setitem(standards.BLOCK_ELEMENTS, "cpu", 9000)
    shape = shape_of(name, "bwd", dtype="float64")
    inputs = make_inputs(shape, "cpu")
    ours = results_of(shape, by_reference(shape), inputs)
    assert ("dbias" in ours) is (name == "learned-bias")
    found = truth(shape, inputs)
    assert {entry[0] for entry in found} == ours.keys()
    for tensor, place, exact, plains in found:
        for expected in (exact, *plains):
            torch.testing.assert_close(ours[tensor][place], expected, atol=1e-12, rtol=1e-11)
        assert len(plains) == (1 if tensor == "out" else 2)


@pytest.mark.parametrize("name", modifiers.NAMES)
def test_what_ignores_it_is_wrong(name):
    shape = shape_of(name)
    inputs = make_inputs(shape, "cpu")
    expected = truth(shape, inputs)
    assert judge(shape, by_reference(shape), inputs, expected).passes
    plain = by_reference(shape._replace(modifier=""))
    assert not judge(shape, lambda q, k, v, bias=None: plain(q, k, v), inputs, expected).passes


def test_a_wrong_gradient_of_a_bias_is_wrong():
    """Of one row of the batch alone."""
    shape = shape_of("learned-bias", "bwd")
    inputs = make_inputs(shape, "cpu")
    right = by_reference(shape)

    def attend(q, k, v, bias):
        rows = [right(q[b : b + 1], k[b : b + 1], v[b : b + 1], bias) for b in range(2)]
        biased = right(q[1:], k[1:], v[1:], bias.detach() + 1.01 * (bias - bias.detach()))
        return torch.cat([rows[0], biased])

    verdict = judge(shape, attend, inputs, truth(shape, inputs))
    assert not verdict.passes and verdict.what.startswith("dbias")


@pytest.mark.parametrize("name", modifiers.NAMES)
def test_a_forced_backend_is_asked_for_it(name, monkeypatch):
    from tilewise import dispatch

    asked = []
    monkeypatch.setattr(dispatch, "ask", lambda backend, problem, device: asked.append(problem))
    shape = shape_of(name)
    provider("tilewise:portable").refuse(shape, "cpu")
    (problem,) = asked
    assert bool(problem.mods.mask) is (name in modifiers.MASKS)
    assert problem.mods.block == ((128, 128) if name in modifiers.MASKS else (0, 0))
    assert bool(problem.mods.score) is (name == "score")
    assert problem.has_dropout is (name == "dropout")
    assert problem.has_bias is (name in modifiers.BIASES)
    assert problem.has_bias_grad is (name == "learned-bias")


def test_it_is_the_problem_of_the_call(monkeypatch):
    """A provider asks a backend about the problem of the call that follows; masks of documents are
    asked for as masks, and run as packed sequences.
    """
    from tilewise import dispatch
    from tilewise.ops import calls

    seen = []
    monkeypatch.setattr(dispatch, "ask", lambda backend, problem, *_, **__: seen.append(problem))
    names = [name for name in modifiers.NAMES if not is_of_documents(name)]
    assert len(names) == len(modifiers.NAMES) - 3
    for name in names:
        shape = shape_of(name, "bwd")
        arguments, _ = make_inputs(shape, "cpu").leaves(shape)
        provider("tilewise:cpu").refuse(shape, "cpu")
        calls._entry.cache_clear()  # a known call asks no backend
        provider("tilewise:cpu").prepare(shape, "cpu")(*arguments)
    assert seen[::2] == seen[1::2] and len(seen) == 2 * len(names)


def is_of_documents(name):
    blocks = block_mask_of(shape_of(name), "cpu")
    return blocks is not None and blocks.documents is not None


@pytest.mark.parametrize("name", modifiers.NAMES)
@pytest.mark.parametrize("peer", sorted(PROVIDERS.keys() - {"tilewise", "flex"}))
def test_a_provider_without_modifiers_says_so(peer, name):
    assert modifiers.words_of(name) in PROVIDERS[peer].refuse(shape_of(name), "cuda")


def test_flex_says_what_it_is_not_given():
    refuse = PROVIDERS["flex"].refuse
    assert "no dropout" in refuse(shape_of("dropout"), "cpu")
    assert "bias" in refuse(shape_of("bias"), "cpu")
    assert refuse(shape_of("window"), "cpu") is None
    assert "no backward on the CPU" in refuse(shape_of("window", "bwd"), "cpu")


@pytest.mark.parametrize("name", [*modifiers.MASKS, "score"])
def test_flex_expresses_masks_and_scores(name, monkeypatch):
    """Its unfused form by a compiler that only traces."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled(f, backend="eager", **how))
    shape = shape_of(name)
    q, k, v = make_inputs(shape, "cpu", "bhsd")[:3]
    with torch.no_grad():
        got = PROVIDERS["flex"].prepare(shape, "cpu")(q, k, v)
    torch.testing.assert_close(got, by_reference(shape)(q, k, v), atol=1e-5, rtol=1e-5)


def lanes_of(name, **how):
    return comparison(name, "fwd", 128, provider("tilewise"), **SIZES, **how).lanes


def test_what_each_is_held_against():
    assert [*lanes_of("window")] == ["tilewise", "flex"] == [*lanes_of("score")]
    assert [*lanes_of("documents")] == ["tilewise", "flex", "packed"]
    assert [*lanes_of("dropout")] == ["tilewise", "without"] == [*lanes_of("bias")]
    assert [*lanes_of("documents", against=("packed",))] == ["tilewise", "packed"]
    shape, ours = lanes_of("causal-documents")["packed"]
    assert shape.causal and shape.sequences == documents(256) and ours.name == "tilewise"
    assert not lanes_of("documents")["packed"][0].causal
    assert lanes_of("dropout")["without"][0] == shape_of("dropout", dtype="bfloat16")._replace(
        modifier=""
    )


def test_every_combination_that_there_is():
    asked = comparisons(modifiers.NAMES, ("fwd", "bwd"), (128, 256), provider("tilewise"), **SIZES)
    found = {(one.shape.direction, one.modifier, one.shape.seqlen_q) for one in asked}
    # Six of both lengths and two of one, and the learned bias backward.
    assert len(found) == len(asked) == 2 * (6 * 2 + 2) + 2
    assert ("fwd", "learned-bias", 128) not in found and ("bwd", "learned-bias", 128) in found
    assert ("fwd", "documents", 128) not in found and ("fwd", "documents", 256) in found


RUNS = [
    *((name, "fwd") for name in modifiers.NAMES),
    *((name, "bwd") for name in ("documents", "dropout", "learned-bias")),
]


@pytest.mark.parametrize(("name", "direction"), RUNS)
def test_a_run_on_the_cpu(name, direction, tmp_path):
    file, lines = tmp_path / "rows.jsonl", []
    asked = comparison(name, direction, 128, provider("tilewise"), ("packed", "without"), **SIZES)
    (done,) = run_comparisons([asked], rounds=2, round_ms=1, save=file, show=lines.append)
    rows = load(file)
    assert [Shape(**row.shape) for row in rows] == [shape for shape, _ in asked.lanes.values()]
    assert len({row.run for row in rows}) == 1 and rows[0].suite == "modifiers"
    pairs = int(asked.shape.pairs)
    for row, lane in zip(rows, asked.lanes):
        assert row.extra["modifier"] == name and row.extra["pairs"] == pairs
        assert row.extra.get("lane", "tilewise") == lane
        assert row.tflops * row.median_ms == pytest.approx(asked.shape.flops / 1e9)
    rates = {name: rate.median for name, rate in done.rates.items()}
    assert rows[0].extra["rate_over"] == rates and len(rates) == len(rows) - 1
    assert any(f"{pairs:,} pairs" in line for line in lines)
    assert len(summary([done])) == 2 + len(rates)


def compared(**lanes):
    """A comparison of which these rows were made, from the times of their rounds."""
    from helpers.made_rows import small as row

    from benchmarks.bench.timer import ratio

    asked = comparison("dropout", "fwd", 128, provider("tilewise"), **SIZES)
    base = lanes.get("tilewise")
    outcomes = {}
    for name, (shape, lane) in asked.lanes.items():
        times = lanes.get(name)
        of = base and times and ratio(base, times)
        made = times and row(rounds_ms=times, median_ms=times[0])
        outcomes[name] = Outcome(shape, lane.name, made, of)
    return with_rates(Compared(asked, outcomes))


def test_a_rate_is_ours_over_theirs_round_by_round():
    """The machine gets slower by the round; the rate stays."""
    done = compared(tilewise=[1.0, 2.0, 4.0], without=[0.7, 1.4, 2.8])
    assert done.rates["without"] == pytest.approx((0.7,) * 3)
    assert done.outcomes["tilewise"].row.extra["rate_over"]["without"] == pytest.approx(0.7)
    ours, other = (done.outcomes[name].row for name in ("tilewise", "without"))
    assert ours.tflops / other.tflops == pytest.approx(0.7)
    assert "0.700 (0.700-0.700)" in lines_of(done)[-1]
    assert summary([done])[1].split()[-3:] == ["0.700", "0.700-0.700", "0.75"]


@pytest.mark.parametrize("lanes", [dict(tilewise=[1.0]), dict(without=[1.0]), {}])
def test_no_rate_where_one_did_not_run(lanes):
    done = compared(**lanes)
    assert done.rates == {} and len(summary([done])) == 2


def test_a_wrong_result_has_no_row_and_no_rate():
    def attend(q, k, v):
        return attention_reference(q, k, v)

    wrong = Provider("wrong", lambda *asked: None, lambda *asked: attend)
    asked = comparison("dropout", "fwd", 128, wrong, **SIZES)
    (done,) = run_comparisons([asked], rounds=1, round_ms=1, show=lambda line: None)
    assert done.outcomes["wrong"].wrong and done.rates == {}
    assert done.outcomes["without"].row is not None
    assert "WRONG" in "\n".join(lines_of(done))


def test_a_bias_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    shape = shape_of("learned-bias", "bwd")._replace(seqlen_q=1 << 20, seqlen_k=1 << 20)
    assert "GiB" in too_large(shape, "cpu")
    assert too_large(shape._replace(modifier="dropout"), "cpu") is None
    monkeypatch.setattr("benchmarks.bench.beside.free_memory", lambda: 0)
    asked = comparison("bias", "fwd", 128, provider("tilewise"), **SIZES)
    (done,) = run_comparisons([asked], show=lambda line: None)
    assert {o.refused[:8] for o in done.outcomes.values()} == {"its bias"} and done.rates == {}


def test_lanes_have_names_of_their_own():
    assert not set(LANES) & (PROVIDERS.keys() - {"flex"})
