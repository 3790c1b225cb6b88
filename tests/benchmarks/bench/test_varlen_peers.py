"""Which providers take packed sequences, and how they are called; FlashAttention is a fake."""

import pytest
import torch
from helpers.fa3 import BWD_PACKED, FWD_PACKED, as_keywords, install

from benchmarks.bench import load, peers, run_suite
from benchmarks.bench.check import make_inputs
from benchmarks.bench.providers import PROVIDERS, provider
from benchmarks.bench.shapes import dense_of, packed
from tilewise import attention_reference

SMALL = packed("fwd", "40,7,64,23", (4, 2, 16), True)


@pytest.mark.parametrize("name", sorted(PROVIDERS.keys() - {"tilewise", "fa2", "fa3", "fa4"}))
def test_a_provider_without_packed_sequences_says_so(name):
    assert "packed sequences" in PROVIDERS[name].refuse(SMALL, "cuda")


def test_a_forced_backend_is_asked_for_packed_sequences(monkeypatch):
    from tilewise import dispatch

    asked = []
    monkeypatch.setattr(dispatch, "ask", lambda backend, problem, device: asked.append(problem))
    for shape in (SMALL, dense_of(SMALL)):
        provider("tilewise:portable").refuse(shape, "cpu")
    assert [problem.is_packed for problem in asked] == [True, False]


def test_we_are_called_with_lengths_on_the_device(monkeypatch):
    asked = {}
    monkeypatch.setattr("tilewise.attention", lambda *_, **options: asked.update(options))
    provider("tilewise:cpu").prepare(SMALL, "cpu")(None, None, None)
    right_packing(asked)
    assert asked["causal"] is True and asked["backend"] == "cpu"


def right_packing(options, with_longest=True):
    for side in "qk":
        starts = options[f"cu_seqlens_{side}"]
        assert starts.dtype == torch.int32 and starts.device.type == "cpu"
        assert starts.tolist() == [0, 40, 47, 111, 134]
        if with_longest:
            assert options[f"max_seqlen_{side}"] == 64
            assert type(options[f"max_seqlen_{side}"]) is int


@pytest.fixture
def operators(monkeypatch):
    """A fake of FA3's library for packed sequences, and what it was called with."""
    monkeypatch.setenv(peers.FA3_LIBRARY, "fa3.so")
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    called = {}

    def attend(q, k, v, options):
        starts = {name: x for name, x in options.items() if name.startswith("cu_seqlens")}
        return attention_reference(q, k, v, causal=options["is_causal"], **starts)

    def forward(q, k, v, **options):
        called["fwd"] = options
        lse = q.new_zeros(q.shape[1], q.shape[0])
        return attend(q, k, v, options), lse, q.new_empty(0), q.new_empty(0)

    def backward(dout, q, k, v, out, lse, **options):
        called["bwd"] = options
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            grads = torch.autograd.grad(attend(*leaves, options), leaves, dout)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            options[name].copy_(grad)
        return lse.clone(), lse.clone()

    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for schema, function, tensors in ((FWD_PACKED, forward, 3), (BWD_PACKED, backward, 6)):
        library.define(schema)
        library.impl(schema.split("(")[0], as_keywords(schema, function, tensors), "CPU")
    yield called
    library._destroy()


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_the_library_takes_packed_sequences(direction, operators, tmp_path):
    shape, file = SMALL._replace(direction=direction), tmp_path / "rows.jsonl"
    quick = dict(rounds=2, round_ms=1, show=lambda line: None)
    run_suite([shape], ["tilewise", "fa3"], save=file, **quick)
    assert [one.provider for one in load(file)] == ["tilewise", "fa3"]
    assert operators.keys() == ({"fwd"} if direction == "fwd" else {"fwd", "bwd"})
    for options in operators.values():
        right_packing(options)
        assert options["is_causal"] is True and options["softmax_scale"] == 0.25
        assert options.get("seqused_q") is None and options.get("seqused_k") is None
        assert options.get("deterministic", False) is False


def test_a_library_for_dense_batches_only_refuses(monkeypatch):
    monkeypatch.setenv(peers.FA3_LIBRARY, "fa3.so")
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale=None) -> Tensor[]")
    try:
        reason = provider("fa3").refuse(SMALL._replace(causal=False), "cpu")
        assert reason == "it takes no argument 'cu_seqlens_q'"
    finally:
        library._destroy()


PACKAGES = {
    "fa2": "flash_attn",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute.interface",
}


@pytest.mark.parametrize(("name", "module"), PACKAGES.items())
def test_a_package_has_a_function_for_packed_sequences(name, module, monkeypatch):
    seen = []

    def remember(q, options):
        seen.append(options)
        return q

    def with_longest(  # as flash-attn 2 and 3 have it
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        deterministic=False,
    ):
        return remember(q, locals())

    def without(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False):
        return remember(q, locals())

    asks_for_longest = name != "fa4"
    function = with_longest if asks_for_longest else without
    install(monkeypatch, module, flash_attn_varlen_func=function, flash_attn_func=None)
    assert provider(name).refuse(SMALL, "cpu") is None
    provider(name).prepare(SMALL, "cpu")(*make_inputs(SMALL, "cpu")[:3])
    right_packing(seen[0], asks_for_longest)
    assert seen[0]["causal"] is True and seen[0]["softmax_scale"] == 0.25
    assert not seen[0].get("deterministic")


@pytest.mark.parametrize(("name", "module"), PACKAGES.items())
def test_a_package_without_it_refuses(name, module, monkeypatch):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return q

    install(monkeypatch, module, flash_attn_func=flash_attn_func)
    assert "has no flash_attn_varlen_func" in provider(name).refuse(SMALL, "cpu")
    assert provider(name).refuse(dense_of(SMALL), "cpu") is None
