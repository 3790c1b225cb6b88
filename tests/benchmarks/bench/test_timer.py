"""The timer of a GPU's rounds, over a queue that only counts."""

import types

import torch

from benchmarks.bench.timer import CudaClock


def test_the_queue_is_held_shut_for_one_call_as_for_eight(monkeypatch):
    """A single call through autograd takes the host longer than a quarter of a millisecond."""
    held = []
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append, raising=False)
    clock = CudaClock("cpu", flush_bytes=1)
    for calls in (1, 8, 40, 50):
        assert clock(lambda: None, calls) == [1.0] * calls
    one, eight, forty, fifty = held
    assert one == eight < forty == fifty
