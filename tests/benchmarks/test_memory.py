"""Peak memory: what the CPU's profiler counts, slopes, and calls that do not fit."""

import pytest
import torch
from helpers.tiers import sample

from benchmarks import memory
from benchmarks.bench import load
from benchmarks.bench.providers import Provider, provider
from benchmarks.memory import curves, exponent, run_memory, shapes_of
from benchmarks.peak import is_out_of_memory, peak_bytes


def test_the_peak_of_known_allocations():
    """Two temporaries at once, of which one is gone when the second result is made."""
    x = torch.zeros(1 << 18)
    one = x.numel() * 4
    assert one <= peak_bytes(lambda: x + 1, "cpu") < one + 4096
    assert 2 * one <= peak_bytes(lambda: (x + 1) + 1, "cpu") < 2 * one + 4096
    assert 2 * one <= peak_bytes(lambda: ((x + 1) + 1) + 1, "cpu") < 2 * one + 4096


def test_the_profiler_is_stopped_where_a_call_raises(capfd):
    def fail():
        raise KeyError("no")

    with pytest.raises(KeyError):
        peak_bytes(fail, "cpu")
    assert peak_bytes(lambda: torch.zeros(1024), "cpu") >= 4096
    assert "profiler" not in capfd.readouterr().err


def test_gpu_memory_is_counted_beside_what_was_there(monkeypatch):
    seen = []
    for name, answer in (
        ("synchronize", None),
        ("empty_cache", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 100),
        ("max_memory_allocated", 175),
    ):
        fake = lambda *device, name=name, answer=answer: seen.append(name) or answer  # noqa: E731
        monkeypatch.setattr(torch.cuda, name, fake)
    assert peak_bytes(lambda: seen.append("call"), "cuda") == 75
    assert seen.index("reset_peak_memory_stats") < seen.index("call")
    assert seen.index("memory_allocated") < seen.index("call") < seen.index("max_memory_allocated")


def test_exponents():
    assert exponent({1024: 7}) is None
    assert exponent({2**n: 5 * 2**n for n in range(8)}) == pytest.approx(1.0)
    assert exponent({2**n: 2 ** (2 * n) + 2**n for n in range(8, 14)}) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("direction", sample(["fwd", "fwd+bwd"], "fwd"))
def test_standard_attention_grows_with_the_square_and_ours_does_not(direction, tmp_path):
    shapes = shapes_of((direction,), (1024, 2048), (1, 1, 32), "float32", is_causal=True)
    chosen = [provider(name) for name in ("tilewise", "standard", "cudnn")]
    file = tmp_path / "rows.jsonl"
    lines = []
    done = run_memory(shapes, chosen, save=file, show=lines.append)
    found = curves(done)
    assert exponent(found[direction, "tilewise"]) < 1.3
    assert exponent(found[direction, "standard"]) > 1.7
    assert found[direction, "standard"][2048] > 2 * 2048**2 * 4
    assert (direction, "cudnn") not in found and len(lines) == 2
    rows = load(file)
    assert len(rows) == 4 and {row.suite for row in rows} == {"memory"}
    assert all(row.extra["peak_bytes"] > 0 and row.max_error <= row.bound for row in rows)
    inputs = 3 if direction == "fwd" else 4  # q, k, v, and dout
    assert rows[0].extra["input_bytes"] == inputs * 1024 * 32 * 4


def test_no_room_is_a_row_and_a_refusal_is_none():
    """In the check, in the measured call, or foreseen."""

    def prepare_full(shape, device):
        def attend(q, k, v):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB")

        return attend

    def prepare_late(shape, device):
        calls = []

        def attend(q, k, v):
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")
            return provider("standard").prepare(shape, device)(q, k, v)

        return attend

    foreseen = "its score matrices need 9 GiB and 1 GiB are free"
    chosen = [
        Provider("full", lambda shape, device: None, prepare_full),
        Provider("late", lambda shape, device: None, prepare_late),
        Provider("foreseen", lambda shape, device: foreseen, prepare_full),
        Provider("other", lambda shape, device: "not today", prepare_full),
    ]
    shapes = shapes_of(("fwd",), (64,), (1, 1, 16), "float32")
    done = run_memory(shapes, chosen, show=lambda line: None)
    assert [bool(one.no_room) for one in done] == [True, True, True, False]
    for one in done[:3]:
        assert one.row.extra["out_of_memory"] and one.row.max_error is None
    assert done[3].row is None and done[3].refused == "not today"


def test_on_a_gpu_a_size_is_tried():
    foreseen = "its score matrices need 9 GiB and 1 GiB are free"
    one = Provider("one", lambda shape, device: foreseen, provider("standard").prepare)
    shape = shapes_of(("fwd",), (64,), (1, 1, 16), "float32")[0]
    assert memory._trying(one, "cuda").refuse(shape, "cuda") is None
    assert memory._trying(one, "cpu").refuse(shape, "cpu") == foreseen


def test_which_errors_are_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
