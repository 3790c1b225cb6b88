"""What the driver is asked for, of a driver that is not there: which functions, of which arguments,
on which device and stream.
"""

import contextlib
import ctypes
import struct
import warnings
from types import SimpleNamespace

import pytest
import torch

from tilewise.distributed.transport import device_arena, stream_memory
from tilewise.distributed.transport.copies import Piece
from tilewise.distributed.transport.device_arena import DeviceArena
from tilewise.kernels.common.device_words import ARRIVED

CPU = torch.device("cpu")


class Function:
    """A function of the driver, whose arguments are converted as ctypes does."""

    def __init__(self, act):
        self.act, self.argtypes, self.restype, self.calls = act, None, None, []

    def __call__(self, *given):
        assert len(given) == len(self.argtypes) and self.restype is ctypes.c_int
        kept = [ctypes.create_string_buffer(x, len(x)) for x in given if type(x) is bytes]
        given = [ctypes.addressof(kept[0]) if type(x) is bytes else x for x in given]
        values = [kind(x).value or 0 for kind, x in zip(self.argtypes, given)]
        assert values == [int(x) for x in given]  # no address is cut
        self.calls.append(values)
        return self.act(*values)


class Driver:
    """Of memory of the CPU."""

    def __init__(self, status=0):
        self.cuStreamWriteValue32_v2 = Function(self.write)
        self.cuMemcpyDtoDAsync_v2 = Function(self.copy)
        self.cuMemcpy2DAsync_v2 = Function(self.copy_rows)
        self.status = status

    def write(self, stream, address, number, flags):
        assert flags == 0  # behind a fence
        ctypes.c_uint32.from_address(address).value = number
        return self.status

    def copy(self, to, source, nbytes, stream):
        ctypes.memmove(to, source, nbytes)
        return self.status

    def copy_rows(self, parameters, stream):
        """Of CUDA_MEMCPY2D, with addresses of one map in both places."""
        given = struct.unpack("=2QIIQQQQ2QIIQQQQ2Q", ctypes.string_at(parameters, 128))
        (_, _, kind, _, _, source, _, pitch), (_, _, other, _, _, to, _, step) = (
            given[:8],
            given[8:16],
        )
        assert kind == other == 4 and sum(given) == kind + other + source + pitch + to + step + sum(
            given[16:]
        )
        for row in range(given[17]):
            ctypes.memmove(to + row * step, source + row * pitch, given[16])
        return self.status


@pytest.fixture
def driver(monkeypatch):
    """Installs a driver, or what CDLL raises."""

    def install(found):
        def load(name):
            assert name == "libcuda.so.1"
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(ctypes, "CDLL", load)
        return found

    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return install


def test_both_are_seen_to_work(driver):
    words, given = torch.zeros(4, dtype=torch.int32), driver(Driver())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stream_memory.driver_of(words)
    assert (words == 0).all()
    assert [x[0] for x in given.cuStreamWriteValue32_v2.calls] == [5, 5]
    assert [x[3] for x in given.cuMemcpyDtoDAsync_v2.calls] == [5, 5]


@pytest.mark.parametrize("found", [OSError("no libcuda"), SimpleNamespace(), Driver(status=801)])
def test_what_the_driver_lacks_is_done_in_another_way(driver, found):
    words = torch.zeros(4, dtype=torch.int32)
    driver(found)
    with pytest.warns(UserWarning, match="torch copies .*begins when all keys have arrived"):
        assert stream_memory.driver_of(words) is None


def test_pieces_are_copied_by_their_addresses(driver, monkeypatch):
    """From the half of the call, on the stream of copies and the device of the arena."""
    given = driver(Driver())
    devices = []

    @contextlib.contextmanager
    def on_device(device):
        devices.append(device)
        yield

    monkeypatch.setattr(device_arena, "on_device", on_device)
    monkeypatch.setattr(device_arena, "Beside", lambda guard, *_, before: guard)
    arena = DeviceArena.__new__(DeviceArena)
    blocks = [torch.randint(0, 255, (256,), dtype=torch.uint8) for _ in range(3)]
    arena.blocks, arena.starts = blocks, [x.data_ptr() for x in blocks]
    arena.half, arena.parts, arena.room, arena.device = 1, 1, 128, CPU
    arena.pulled, arena.views = 0, {}
    arena.side, arena.last = SimpleNamespace(cuda_stream=9), None
    arena.driver = stream_memory.Driver()
    arena.words, arena.has_streams = torch.zeros(4, dtype=torch.int32), True
    arena.arrived = arena.words.data_ptr() + 4 * ARRIVED
    order = []
    arena._follow_caller = lambda: order.append("follow")
    arena.mark = lambda: order.append(len(given.cuMemcpyDtoDAsync_v2.calls)) or len(order) - 1
    targets = [torch.zeros(64, dtype=torch.uint8), torch.zeros(16, dtype=torch.int32)]
    several = Piece(2, 64, 0, 48, 4, rows=2, pitch=24, step=8, arrived=5)
    pieces = [Piece(2, 16, 0, 8, 32), Piece(1, 64, 1, 4, 12), Piece(0, 0, 0, 40, 8, arrived=2)]
    lists = (*pieces, several), pieces[:1]
    assert arena.pull(lists, targets) == [1, 2]
    assert order == ["follow", 3, 4] and devices == [CPU]
    counts = [[9, arena.arrived, number, 0] for number in (2, 5)]
    assert given.cuStreamWriteValue32_v2.calls == counts
    assert arena.words[ARRIVED] == 5 and arena.pulled == 92
    calls = given.cuMemcpyDtoDAsync_v2.calls + given.cuMemcpy2DAsync_v2.calls
    assert len(calls) == 5 and all(stream == 9 for *_, stream in calls)
    rows = [several._replace(start=64 + 24 * row, offset=48 + 8 * row) for row in range(2)]
    for rank, start, target, at, nbytes, *_ in (*pieces, *rows):
        found = targets[target].view(torch.uint8)[at : at + nbytes]
        assert torch.equal(found, blocks[rank][128 + start : 128 + start + nbytes])
    by_torch, counted = [torch.zeros_like(x) for x in targets], []
    arena.count, arena.copying = counted.append, contextlib.nullcontext
    arena.driver = None
    arena.pull(lists[:1], by_torch)
    assert all(torch.equal(x, y) for x, y in zip(targets, by_torch)) and counted == [2, 5]
