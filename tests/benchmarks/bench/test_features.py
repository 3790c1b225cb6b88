"""Window, softcap, ALiBi and sinks in the bench: counted, checked, given where they are taken."""

import itertools
from pathlib import Path

import pytest
import torch
from helpers.fa3 import BWD, FWD, as_keywords, install
from helpers.tiers import sample_rows

from benchmarks.bench import load, peers, run_suite
from benchmarks.bench.arguments import options_of
from benchmarks.bench.check import judge, make_inputs, results_of, truth
from benchmarks.bench.providers import PROVIDERS, Provider, provider
from benchmarks.bench.shapes import square
from tilewise import attention_reference
from tilewise.explain.shapes import Shape

SMALL = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=64)
FEATURES = [{"window": 5}, {"softcap": 1.5}, {"alibi": True}, {"sinks": True}]
ALL = SMALL._replace(window=5, softcap=1.5, alibi=True, sinks=True)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FWD_CAPPED = FWD.replace("int num_splits=0", "float softcap=0.0, int num_splits=0")
BWD_CAPPED = BWD.replace(
    "float softcap=0.0", "int window_size_left=-1, int window_size_right=-1, float softcap=0.0"
)


def by_reference(shape):
    options = options_of(shape, "cpu")
    return lambda q, k, v: attention_reference(q, k, v, **options)


def names(feature):
    return next(iter(feature))


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_committed_rows_load_as_shapes(file):
    for row in load(file):
        if row.suite in ("matmul", "decode", "distributed", "serving") or row.suite.startswith(
            "tour/"
        ):
            continue  # other products, caches, and whatever a lesson says of its calls
        shape = Shape(**row.shape)
        assert "window" in row.shape or not shape.features


def test_a_shape_names_its_features():
    assert str(SMALL) == "fwd B2 S32 H4 D16 causal float32"
    assert str(ALL) == "fwd B2 S32 H4 D16 causal window 5 softcap 1.5 alibi sinks float32"
    assert "window 0 " in str(SMALL._replace(window=0))


@pytest.mark.parametrize("window", [0, 5, 31, 100])
@pytest.mark.parametrize("lengths", [(32, 32), (32, 48), (48, 32)])
def test_a_windows_flops_are_those_of_its_pairs(window, lengths):
    seqlen_q, seqlen_k = lengths
    shape = SMALL._replace(window=window, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    pairs = int(((distance >= 0) & (distance <= window)).sum())
    assert shape.flops == 4 * shape.batch * shape.nheads * pairs * shape.headdim
    assert shape._replace(softcap=30.0, alibi=True, sinks=True).flops == shape.flops


def test_slopes_and_sinks():
    options = options_of(ALL._replace(dtype="bfloat16"), "cpu")
    assert options["alibi_slopes"].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert options["alibi_slopes"].dtype == torch.float32
    assert options["sinks"].shape == (4,) and options["sinks"].dtype == torch.bfloat16
    assert set(options_of(SMALL, "cpu").values()) == {True, None}  # causal, and nothing else


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", FEATURES, ids=names)
@pytest.mark.parametrize("name", ["tilewise", "tilewise:cpu"])
def test_a_provider_that_leaves_a_feature_out_is_wrong(name, feature, direction, tmp_path):
    shape = SMALL._replace(direction=direction, dtype="bfloat16", nheads_k=2, **feature)
    without = Provider("without", lambda *asked: None, lambda *asked: by_reference(SMALL))
    file = tmp_path / "rows.jsonl"
    done = run_suite([shape], [name, without], rounds=1, round_ms=1, save=file, show=lambda x: None)
    assert done[0].row is not None and done[1].wrong
    (row,) = load(file)
    assert Shape(**row.shape) == shape and row.shape.items() >= feature.items()


@pytest.mark.parametrize("causal", [True, False])
def test_a_wide_softcap_is_reached(causal):
    """Scores of unit variance would not show in half precision that 30 had been left out."""
    shape = square("fwd", 256, 64, causal, tokens=256, hidden=128)._replace(softcap=30.0)
    inputs = make_inputs(shape, "cpu")
    expected = truth(shape, inputs)
    assert judge(shape, by_reference(shape), inputs, expected).passes
    without = judge(shape, by_reference(shape._replace(softcap=0.0)), inputs, expected, False)
    assert without.max_error > 2 * without.bound


def test_a_narrow_softcap_leaves_the_inputs_as_they_are():
    assert torch.equal(
        make_inputs(SMALL._replace(softcap=2.0), "cpu").q, make_inputs(SMALL, "cpu").q
    )


@pytest.mark.parametrize(
    "shape", [ALL, ALL._replace(seqlen_k=48), ALL._replace(causal=False, window=None)], ids=str
)
def test_the_truth_of_features_is_blockwise(shape, monkeypatch):
    from benchmarks.bench import standards

    shape = shape._replace(direction="bwd", nheads_k=2)
    inputs = make_inputs(shape, "cpu")
    monkeypatch.setitem(standards.BLOCK_ELEMENTS, "cpu", 500)
    ours = results_of(shape, by_reference(shape), inputs)
    for name, place, exact, _ in truth(shape, inputs):
        torch.testing.assert_close(ours[name][place].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", FEATURES, ids=names)
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math", "standard"])
def test_a_provider_without_a_feature_says_so(name, feature):
    shape = SMALL._replace(**feature)
    assert PROVIDERS[name].refuse(shape, "cuda") == f"it does not take {shape.features[0]}"


@pytest.mark.parametrize("feature", FEATURES, ids=names)
def test_a_forced_backend_is_asked_with_the_features(feature, monkeypatch):
    from tilewise import dispatch

    asked = []
    monkeypatch.setattr(dispatch, "ask", lambda backend, problem, device: asked.append(problem))
    provider("tilewise:portable").refuse(SMALL._replace(**feature), "cpu")
    has = {"window": "left", "softcap": "softcap", "alibi": "alibi", "sinks": "sinks"}
    for other, field in has.items():
        assert getattr(asked[0], f"has_{field}") is (other in feature)


SHAPES = [SMALL, *(SMALL._replace(**f) for f in FEATURES), ALL]
CASES = list(itertools.product(SHAPES, (True, False)))


@pytest.mark.parametrize("shape, causal", sample_rows(CASES, *CASES[0::4]), ids=str)
def test_flex_expresses_every_feature(shape, causal, monkeypatch):
    """Its unfused form by a compiler that only traces: what its two functions say."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled(f, backend="eager", **how))
    window = shape.window if causal else None
    shape = shape._replace(nheads_k=2, seqlen_k=48, causal=causal, window=window)
    q, k, v = make_inputs(shape, "cpu", "bhsd")[:3]
    with torch.no_grad():
        got = PROVIDERS["flex"].prepare(shape, "cpu")(q, k, v)
    torch.testing.assert_close(got, by_reference(shape)(q, k, v))


def test_flex_has_no_sinks_on_the_cpu():
    assert "LSE" in PROVIDERS["flex"].refuse(SMALL._replace(sinks=True), "cpu")
    assert PROVIDERS["flex"].refuse(ALL._replace(sinks=False), "cpu") is None


@pytest.fixture
def library(monkeypatch):
    """A fake of FA3's library with a window and a softcap, and what it was called with."""
    monkeypatch.setenv(peers.FA3_LIBRARY, "fa3.so")
    called = {}

    def forward(q, k, v, **options):
        called["fwd"] = options
        return q.clone(), q.new_zeros(q.shape[:3]), q.new_empty(0), q.new_empty(0)

    def backward(dout, q, k, v, out, lse, **options):
        called["bwd"] = options
        return lse.clone(), lse.clone()

    fake = torch.library.Library("flash_attn_3", "FRAGMENT")
    for schema, function, tensors in ((FWD_CAPPED, forward, 3), (BWD_CAPPED, backward, 6)):
        fake.define(schema)
        fake.impl(schema.split("(")[0], as_keywords(schema, function, tensors), "CPU")
    yield called
    fake._destroy()


def test_the_library_takes_window_and_softcap(library):
    shape = SMALL._replace(direction="bwd", window=5, softcap=1.5)
    results_of(shape, provider("fa3").prepare(shape, "cpu"), make_inputs(shape, "cpu"))
    wanted = dict(is_causal=True, window_size_left=5, window_size_right=0, softcap=1.5)
    for options in library.values():
        assert options.items() >= wanted.items()
    assert library.keys() == {"fwd", "bwd"}
    results_of(SMALL, provider("fa3").prepare(SMALL, "cpu"), make_inputs(SMALL, "cpu"))
    assert library["fwd"]["is_causal"] is True
    # The dispatcher drops what has its default.
    assert not {"window_size_left", "window_size_right", "softcap"} & library["fwd"].keys()


@pytest.mark.parametrize(
    ("feature", "argument"), [("alibi", "alibi_slopes"), ("sinks", "learnable_sink")]
)
def test_the_library_refuses_alibi_and_sinks(feature, argument, library, monkeypatch):
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    reason = provider("fa3").refuse(SMALL._replace(**{feature: True}), "cpu")
    assert reason == f"it takes no argument {argument!r}"


def test_fa3s_package_takes_window_and_softcap(monkeypatch):
    seen = []

    def function(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
        seen.append((causal, window_size, softcap))
        return q

    install(monkeypatch, "flash_attn_interface", flash_attn_func=function)
    fa3 = provider("fa3")
    fa3.prepare(SMALL._replace(window=5, softcap=1.5), "cpu")(*make_inputs(SMALL, "cpu")[:3])
    assert seen == [(True, (5, 0), 1.5)]
    assert fa3.refuse(SMALL._replace(alibi=True), "cpu") == "it takes no argument 'alibi_slopes'"
    assert fa3.refuse(SMALL._replace(sinks=True), "cpu") == "it takes no argument 'learnable_sink'"


def test_fa4_takes_sinks_too(monkeypatch):
    seen = []

    def function(
        q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None
    ):
        seen.append((window_size, learnable_sink))
        return q

    install(monkeypatch, "flash_attn.cute.interface", flash_attn_func=function)
    fa4, inputs = provider("fa4"), make_inputs(SMALL, "cpu")
    fa4.prepare(SMALL, "cpu")(*inputs[:3])
    fa4.prepare(SMALL._replace(window=5, sinks=True), "cpu")(*inputs[:3])
    assert seen[0] == ((None, None), None)
    assert seen[1][0] == (5, 0) and seen[1][1].shape == (4,)
    assert fa4.refuse(SMALL._replace(softcap=1.5), "cpu") == "it takes no argument 'softcap'"
    assert fa4.refuse(SMALL._replace(alibi=True), "cpu") == "it takes no argument 'alibi_slopes'"
