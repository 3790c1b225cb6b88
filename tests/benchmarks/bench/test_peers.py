"""FlashAttention-3 and -4 as peers, with fakes in their place: found, driven, refused by reason."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers.fa3 import BWD, FWD, as_keywords, install

from benchmarks.bench import load, peers, run_suite
from benchmarks.bench.check import make_inputs, results_of
from benchmarks.bench.providers import PROVIDERS, Provider, provider, standard_attention
from benchmarks.bench.run import call_of
from benchmarks.bench.shapes import square

SMALL = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)
HALF = SMALL._replace(dtype="bfloat16")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.delenv(peers.FA3_LIBRARY, raising=False)
    for name in ("flash_attn_interface", "flash_attn_3", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def register(fwd, bwd=None):
    """A fake of FA3's library: its operators for CPU tensors, and what they were called with."""
    called = {}

    def forward(q, k, v, **options):
        called["fwd"] = options
        out = standard_attention(q, k, v, options.get("is_causal", False))
        lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
        return out, lse, q.new_empty(0), q.new_empty(0)

    def backward(dout, q, k, v, out, lse, **options):
        called["bwd"] = options
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = standard_attention(*leaves, options.get("is_causal", False))
        got = torch.autograd.grad(again, leaves, dout)
        for name, value in zip(("dq", "dk", "dv"), got, strict=True):
            options[name].copy_(value)
        return lse.clone(), lse.clone()

    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(fwd)
    library.impl("fwd", as_keywords(fwd, forward, 3), "CPU")
    if bwd is not None:
        library.define(bwd)
        library.impl("bwd", as_keywords(bwd, backward, 6), "CPU")
    return library, called


@pytest.fixture
def operators(monkeypatch):
    monkeypatch.setenv(peers.FA3_LIBRARY, "fa3.so")
    library, called = register(FWD, BWD)
    yield called
    library._destroy()


def test_the_backends_of_sdpa_go_by_two_names():
    for name in ("flash", "cudnn", "efficient", "math"):
        assert provider(f"sdpa-{name}") is provider(name)
    assert {"fa3", "fa4", "flex"} <= PROVIDERS.keys()


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
def test_the_backend_of_sdpa_is_pinned(name, monkeypatch):
    seen = []

    def spy(q, k, v, **options):
        enabled = torch.backends.cuda
        seen.append(
            {
                "flash": enabled.flash_sdp_enabled(),
                "cudnn": enabled.cudnn_sdp_enabled(),
                "efficient": enabled.mem_efficient_sdp_enabled(),
                "math": enabled.math_sdp_enabled(),
            }
        )
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    provider(name).prepare(SMALL, "cpu")(*make_inputs(SMALL, "cpu")[:3])
    assert seen == [{other: other == name for other in seen[0]}]


def test_two_spellings_are_one_provider():
    done = run_suite([SMALL], ["flash", "sdpa-flash"], rounds=1, round_ms=1, show=lambda line: None)
    assert [outcome.provider for outcome in done] == ["flash"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fa3", "flash_attn_interface is not installed, and TILEWISE_FA3 names no library"),
        ("fa4", "flash_attn.cute.interface is not installed"),
    ],
)
def test_what_is_not_installed_says_so(name, reason, hopper):
    assert provider(name).refuse(HALF, "cuda") == reason


def test_a_library_that_is_not_there_or_does_not_load(tmp_path, monkeypatch, hopper):
    monkeypatch.setenv(peers.FA3_LIBRARY, str(tmp_path / "fa3.so"))
    assert "which is not there" in provider("fa3").refuse(HALF, "cuda")
    (tmp_path / "fa3.so").write_bytes(b"no library")
    assert "LD_LIBRARY_PATH" in provider("fa3").refuse(HALF, "cuda")


def test_a_package_whose_own_needs_are_missing(tmp_path, monkeypatch, hopper):
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    (tmp_path / "flash_attn_interface.py").write_text("import no_such_runtime")
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not import: No module named 'no_such_runtime'" in provider("fa3").refuse(
        HALF, "cuda"
    )


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (10, 0), "this GPU has 10.0"),
        ({"dtype": "float32"}, (9, 0), "float16 and bfloat16"),
        ({"headdim": 320}, (9, 0), "up to 256"),
        ({"headdim_v": 20}, (9, 0), "steps of 8, not 20"),
    ],
)
def test_what_fa3_does_not_serve_is_refused(change, capability, reason, monkeypatch, operators):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert reason in provider("fa3").refuse(HALF._replace(**change), "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert provider("fa3").refuse(HALF._replace(headdim=256, headdim_v=256), "cuda") is None


def test_arguments_that_do_not_exist_are_left_out():
    wanted = dict(softmax_scale=0.5, window_size_left=-1, softcap=0.0)
    assert peers.keywords({"softmax_scale", "sm_margin"}, **wanted) == {"softmax_scale": 0.5}
    for name, value in {"softmax_scale": 0.5, "window_size_right": 0, "softcap": 30.0}.items():
        with pytest.raises(peers.Absent, match=name):
            peers.keywords({"q"}, **{name: value})


def test_the_library_is_driven_by_its_schema(operators):
    shape = SMALL._replace(nheads=4, nheads_k=2)
    q, k, v = make_inputs(shape, "cpu")[:3]
    got = provider("fa3").prepare(shape, "cpu")(q, k, v)
    torch.testing.assert_close(got, standard_attention(q, k, v, True))
    options = operators["fwd"]
    assert options["softmax_scale"] == 0.25 and options["is_causal"] is True
    assert options["page_table"] is None  # an argument without a default, as in older schemas
    assert "softcap" not in options


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_the_library_is_timed_beside_us(direction, operators, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    shape, file = SMALL._replace(direction=direction), tmp_path / "rows.jsonl"
    done = run_suite(
        [shape],
        ["tilewise", "fa3", "fa4"],
        rounds=2,
        round_ms=1,
        save=file,
        show=lambda line: None,
    )
    assert [row.provider for row in load(file)] == ["tilewise", "fa3"]
    assert "not installed" in done[2].refused
    assert ("bwd" in operators) == (direction != "fwd")
    if direction != "fwd":
        assert operators["bwd"]["is_causal"] is True


def test_the_backward_of_the_library_is_its_operator_into_the_same_gradients(operators):
    """What is timed is what is held to the truth: no autograd, nothing allocated."""
    shape = SMALL._replace(direction="bwd")
    attend, inputs = provider("fa3").prepare(shape, "cpu"), make_inputs(shape, "cpu")
    want = results_of(shape, lambda q, k, v: standard_attention(q, k, v, True), inputs)
    torch.testing.assert_close(results_of(shape, attend, inputs), want)
    del operators["fwd"]
    call = call_of(shape, attend, inputs)
    del operators["fwd"]
    first, second = call(), call()
    assert "fwd" not in operators and operators["bwd"]["is_causal"] is True
    for name, one, again in zip(("dq", "dk", "dv"), first, second, strict=True):
        assert one is again and not one.requires_grad
        torch.testing.assert_close(one, want[name])


def test_the_backward_of_fa4_is_replayed_from_a_graph(monkeypatch):
    """Its functions below autograd, with the arguments of the shape."""
    seen = []

    def forward(q, k, v, return_lse=False, **options):
        seen.append(options)
        out = standard_attention(q, k, v, options["causal"])
        return out, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), None, None

    def backward(q, k, v, out, dout, lse, dq=None, dk=None, dv=None, **options):
        seen.append(options)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again = standard_attention(*leaves, options["causal"])
        for into, value in zip((dq, dk, dv), torch.autograd.grad(again, leaves, dout)):
            into.copy_(value)

    def function(q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
        raise AssertionError("autograd's")

    functions = dict(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    install(monkeypatch, peers.FA4_MODULES[0], flash_attn_func=function, **functions)
    graphs = []
    monkeypatch.setattr(
        peers,
        "Replayed",
        lambda calls: graphs.append(calls) or (lambda: [call() for call in calls]),
    )
    shape = SMALL._replace(direction="bwd")
    attend, inputs = provider("fa4").prepare(shape, "cuda"), make_inputs(shape, "cpu")
    got = results_of(shape, attend, inputs)
    want = results_of(shape, lambda q, k, v: standard_attention(q, k, v, True), inputs)
    torch.testing.assert_close(got, want)
    options = dict(softmax_scale=0.25, causal=True, window_size_left=None, window_size_right=None)
    assert seen == [options, options] and len(graphs) == 1
    provider("fa4").prepare(shape._replace(window=5), "cuda").fwd(*inputs.arguments)
    assert seen[-1] == options | dict(window_size_left=5, window_size_right=0)


def test_a_backward_that_is_wrong_in_the_operator_is_seen(operators, monkeypatch):
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    direct = peers.Passes.direct

    def wrong(self, q, k, v, dout):
        return direct(self, q, k, v, 1.01 * dout)

    monkeypatch.setattr(peers.Passes, "direct", wrong)
    quick = dict(rounds=1, round_ms=1, show=lambda line: None)
    (done,) = run_suite([SMALL._replace(direction="bwd")], ["fa3"], **quick)
    assert done.row is None and done.wrong.startswith("d")


def test_a_package_that_registers_operators_is_driven_by_them(operators, monkeypatch):
    monkeypatch.delenv(peers.FA3_LIBRARY)
    fake = types.ModuleType("flash_attn_interface")
    fake.flash_attn_func = lambda q, k, v, softmax_scale=None, causal=False: q
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake)
    shape = SMALL._replace(direction="bwd")
    assert isinstance(provider("fa3").prepare(shape, "cpu"), peers.Passes)
    monkeypatch.setattr(peers, "BWD_TAKES", ["dout", "k"])  # operators that are not known
    q = make_inputs(shape, "cpu").q
    assert provider("fa3").prepare(shape, "cpu")(q, q, q) is q


def test_a_backward_that_is_not_known_is_refused(monkeypatch, hopper):
    monkeypatch.setenv(peers.FA3_LIBRARY, "fa3.so")
    library, _ = register(FWD, "bwd(Tensor q, Tensor dout) -> Tensor")
    try:
        assert provider("fa3").refuse(HALF, "cuda") is None
        backward = HALF._replace(direction="bwd")
        assert "schema that is not known" in provider("fa3").refuse(backward, "cuda")
    finally:
        library._destroy()


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    ("name", "module"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute.interface")]
)
def test_a_package_is_called_with_what_it_takes(name, module, with_lse, monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        seen.append((softmax_scale, causal))
        out = standard_attention(q, k, v, causal)
        return (out, None) if with_lse else out

    install(monkeypatch, module, flash_attn_func=flash_attn_func)
    shape = SMALL._replace(direction="bwd")
    inputs = make_inputs(shape, "cpu")
    got = results_of(shape, provider(name).prepare(shape, "cpu"), inputs)
    want = results_of(shape, lambda q, k, v: standard_attention(q, k, v, True), inputs)
    torch.testing.assert_close(got, want)
    assert seen == [(0.25, True)]


def broken(name, when):
    """Raises at causal shapes: when asked, when prepared, or once it is timed."""
    calls = []

    def raises(shape, now):
        if shape.causal and when == now:
            raise RuntimeError(f"no {now} for causal")

    def prepare(shape, device):
        raises(shape, "preparation")

        def attend(q, k, v):
            calls.append(1)
            if len(calls) > 2:
                raises(shape, "time")
            return standard_attention(q, k, v, shape.causal)

        return attend

    return Provider(name, lambda shape, device: raises(shape, "refusal"), prepare)


@pytest.mark.parametrize("when", ["refusal", "preparation", "time"])
def test_a_peer_that_raises_at_one_shape_is_listed_and_the_bench_goes_on(when, tmp_path):
    file, lines = tmp_path / "rows.jsonl", []
    done = run_suite(
        [SMALL, SMALL._replace(causal=False)],
        ["standard", broken("peer", when), "tilewise"],
        rounds=2,
        round_ms=1,
        save=file,
        show=lines.append,
    )
    assert f"no {when} for causal" in done[1].refused and done[1].row is None
    assert any("not here" in line and f"no {when}" in line for line in lines)
    names = [row.provider for row in load(file)]
    assert names == ["standard", "tilewise", "standard", "peer", "tilewise"]
