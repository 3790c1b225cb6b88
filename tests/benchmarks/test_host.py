"""Host time: which calls are timed, and that each is right before."""

import contextlib

import pytest
import torch

from benchmarks import host
from benchmarks.bench import load, providers
from benchmarks.bench.providers import Provider, provider
from benchmarks.bench.shapes import square
from benchmarks.bench.timer import HostClock
from benchmarks.host import WRAPPED, run_host

SMALL = square("fwd", 16, 16, True, tokens=16, hidden=32, dtype="float32")
QUICK = dict(rounds=2, round_ms=1.0)


def test_modes_take_turns_and_have_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    chosen = [provider("tilewise"), provider("flash")]
    before = torch.get_num_threads()
    done = run_host(SMALL, chosen, ("no_grad", "autograd", "fwd+bwd", "graph"), save=file, **QUICK)
    assert torch.get_num_threads() == before
    found = {(one.mode, one.provider): one for one in done}
    assert len(found) == 8
    for (mode, _), one in found.items():
        if mode == "graph":
            assert one.microseconds is None and "CUDA GPUs" in one.outcome.refused
        else:
            assert one.microseconds > 0
    rows = load(file)
    assert len(rows) == 6 and {row.suite for row in rows} == {"host"}
    assert rows[0].extra["host_us"] == rows[0].median_ms * 1e3 and rows[0].tflops == 0.0
    assert rows[2].extra["mode"] == "autograd" and rows[2].shape["direction"] == "fwd+bwd"


def test_the_forward_under_autograd_records_its_graph():
    seen = []

    def prepare(shape, device):
        def attend(q, k, v):
            out = provider("standard").prepare(shape, device)(q, k, v)
            seen.append(out.requires_grad)
            return out

        return attend

    one = Provider("one", lambda *x: None, prepare)
    run_host(SMALL, [one], ("autograd",), **QUICK)
    assert all(seen)
    seen.clear()
    run_host(SMALL, [one], ("no_grad",), **QUICK)
    assert not any(seen)


def test_a_wrapped_call_is_checked_too(monkeypatch):
    monkeypatch.setitem(host.WRAPPED, "compile", lambda attend: lambda q, k, v: 2 * q)
    (cost,) = run_host(SMALL, [provider("tilewise")], ("compile",), **QUICK)
    assert cost.outcome.wrong and cost.microseconds is None


@pytest.mark.slow
def test_under_torch_compile():
    (cost,) = run_host(SMALL, [provider("tilewise")], ("compile",), **QUICK)
    assert cost.microseconds > 0, cost.outcome.refused


def test_torch_chooses_its_attention_once(monkeypatch):
    """And not at every call, which takes the host longer than the call itself."""
    entered = []

    @contextlib.contextmanager
    def choose(backend):
        entered.append(backend)
        yield

    monkeypatch.setattr(providers, "sdpa_kernel", choose)
    run_host(SMALL, [provider("math")], ("no_grad",), rounds=3, round_ms=5.0)
    assert len(entered) == 1 + 2 + 3  # where it is checked; to warm up and to estimate; a round


def test_the_device_is_idle_before_and_awaited_after(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    times = HostClock("cuda")(lambda: seen.append("call"), 3)
    assert len(times) == 3 and seen == ["wait", "call", "call", "call", "wait"]


def test_a_graph_is_captured_once(monkeypatch):
    """With a fake CUDA: three calls to warm up, one captured, then replays only."""
    import contextlib

    replayed = []

    class Graph:
        def replay(self):
            replayed.append(1)

    class Stream:
        def wait_stream(self, other):
            pass

    nothing = lambda *x: contextlib.nullcontext()  # noqa: E731
    for name, fake in (
        ("CUDAGraph", Graph),
        ("Stream", Stream),
        ("current_stream", Stream),
        ("stream", nothing),
        ("graph", nothing),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    called = []
    captured = WRAPPED["graph"](lambda q, k, v: called.append(1) or q + 1)
    x = torch.ones(2)
    first, second = captured(x, x, x), captured(x, x, x)
    assert first is second and torch.equal(first, x + 1)
    assert len(called) == 4 and len(replayed) == 2
