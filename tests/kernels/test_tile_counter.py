"""Counters of captured graphs. No GPU: tensors are on "meta", and captures what a test says."""

import threading

import pytest
import torch

from tilewise.kernels.common import kept
from tilewise.kernels.hopper import tile_counter

META = torch.device("meta", 0)


class Captures:
    """What streams are in, and what is made during a capture."""

    def __init__(self):
        self.stream, self.capture, self.made, self.numbers = 0, None, [], True
        self.external = False  # whether the stream is another library's
        self.threads = []  # that made zeros outside of captures

    def number_of(self, stream):
        return self.capture if self.numbers else None


@pytest.fixture
def cuda(monkeypatch):
    state, zeros = Captures(), torch.zeros

    def noted(*shape, **options):
        if state.capture is not None:
            state.made.append(shape)
        else:
            state.threads.append(threading.get_ident())
        return zeros(*shape, **options)

    monkeypatch.setattr(tile_counter, "_counters", {})
    monkeypatch.setattr(kept, "_kept", [])
    monkeypatch.setattr(tile_counter, "_captured", tile_counter.Captured())
    monkeypatch.setattr(tile_counter, "capture_of", state.number_of)
    monkeypatch.setattr(kept, "_ones", {})
    monkeypatch.setattr(torch, "zeros", noted)
    capturing, stream = "_cuda_isCurrentStreamCapturing", "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, capturing, lambda: state.capture is not None, raising=False)
    monkeypatch.setattr(torch._C, stream, lambda index: state.stream, raising=False)

    def numbered(index):  # as torch does: its own are odd
        return (state.stream if state.external else 2 * state.stream + 1), index, 1

    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", numbered, raising=False)
    monkeypatch.setattr(tile_counter, "_last", {})
    return state


def counter_of_stream():
    """The counter of a launch on the current stream."""
    return counters_of(1)


def counters_of(count):
    """The counters of a launch on the current stream."""
    return tile_counter.counters(META, 0, torch._C._cuda_getCurrentRawStream(0), count)


def place(x):
    return range(x.storage_offset(), x.storage_offset() + x.numel())


def test_a_capture_after_a_plain_call_makes_no_zeros(cuda):
    """They would be one node more in front of each launch."""
    plain = counters_of(40)
    cuda.capture = 7
    first = counters_of(40)
    assert counter_of_stream().numel() >= 1
    assert not cuda.made and first.numel() >= 40
    assert first.untyped_storage() is not plain.untyped_storage()


def test_what_is_kept_is_of_no_pool_of_the_caller(cuda):
    """torch.compile warms its graphs up with memory of their pool, by thread, and refuses what is
    kept of it.
    """
    counters_of(40)
    counter_of_stream()
    assert len(cuda.threads) == 3 and threading.get_ident() not in cuda.threads


def test_launches_of_a_capture_on_one_stream_share_counters(cuda):
    counters_of(40)
    cuda.capture = 7
    first = counters_of(40)
    assert place(counters_of(20)) == place(first)
    larger = counters_of(1000)
    assert larger.numel() >= 1000 and not set(place(larger)) & set(place(first))
    cuda.stream = 1
    beside = counters_of(40)
    assert not set(place(beside)) & {*place(first), *place(larger)}


def test_captures_share_no_counters(cuda):
    """One may be replayed beside the other. Where the driver does not number them, no launch of a
    capture shares any.
    """
    counters_of(40)
    seen = []
    for capture in (1, 2, 3):
        cuda.capture = capture
        seen += place(counters_of(33))
    cuda.numbers = False
    for _ in range(3):
        seen += place(counters_of(33))
    assert len(seen) == len(set(seen)) and not cuda.made


def test_a_capture_without_a_plain_call_before_or_without_room_makes_its_own(cuda):
    cuda.capture = 1
    assert counters_of(40).numel() == 40 and len(cuda.made) == 1
    cuda.capture = None
    counters_of(40)
    cuda.capture = 2
    count = tile_counter.RESERVED + 1
    assert counters_of(count).numel() == count and len(cuda.made) == 2


def test_what_is_set_aside_is_renewed(cuda):
    """What was set aside before is kept: graphs that count there are replayed at any time."""
    counters_of(40)
    cuda.capture = 1
    counters_of(tile_counter.RESERVED)
    cuda.capture, cuda.stream = None, 5
    counters_of(40)
    cuda.capture = 2
    counters_of(40)
    sizes = [x.numel() for x in kept._kept]
    assert not cuda.made and sizes.count(tile_counter.RESERVED) == 2


def test_counters_are_kept_when_there_are_more(cuda):
    """A launch before may still count in them."""
    first = counters_of(40)
    assert counters_of(2 * first.numel()) is not first
    assert any(x is first for x in kept._kept)


@pytest.mark.parametrize("count", [1, 40])
def test_a_handle_that_is_destroyed_and_used_again_shares_no_counter(cuda, count):
    """Kernels of the old stream may still count. Torch's streams are never destroyed."""

    def taken():
        return counter_of_stream() if count == 1 else counters_of(count)

    cuda.stream, cuda.external = 4096, True
    first, again = taken(), taken()
    assert first.untyped_storage() is not again.untyped_storage() and not kept._kept
    assert first.numel() == again.numel() == count
    cuda.external = False  # a stream of torch's has the handle now
    own = taken()
    assert own is taken() and own.untyped_storage() is not again.untyped_storage()
    cuda.stream = 0
    assert taken() is taken(), "the default stream is torch's"


def test_ones_are_of_32_bits_whatever_the_default_is(cuda):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert kept.ones(6, META).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_ones_are_shared(cuda):
    """No launch makes them, but the first of a device; not while a graph is captured."""
    first, again = kept.ones(6, META), kept.ones(40, META)
    assert first.numel() == 6 and again.numel() == 40
    assert first._base is again._base is kept._kept[0] and len(kept._kept) == 1
    cuda.capture = 7
    assert kept.ones(6, META).numel() == 6
    kept._ones.clear()
    assert kept.ones(6, META) is None and len(kept._kept) == 1
    cuda.capture = None
    assert kept.ones(kept.ONES + 1, META) is None
