"""Launches straight to the driver pass what Triton's launcher does.

No GPU: the driver is a fake.
"""

import ctypes
import struct
from types import SimpleNamespace

import pytest
from helpers.driver import Driver, run_of

from tilewise.kernels.common import packed as module
from tilewise.kernels.common.operand import Gap
from tilewise.kernels.common.packed import MAP_BYTES, Map, packed

INVALID_CONTEXT = 201
SIGNATURE = {
    "q": ("*bf16", "i32", "constexpr"),
    "k": "tensordesc<bf16[1, 64],layout>",
    "numbers": ("fp32", ("i64", "*i32")),
    "out": "*bf16",
    "TILE": ("constexpr", "constexpr"),
}
Q, K, OUT, NONE = Gap("q"), Gap("k"), Gap("out"), None
ARGS = (Q, 7, 1), K, 2, 64, 64, 1, (0.5, (-(2**40), NONE)), OUT, (16, 64)
ROW = "q", "k", "out"
FORMATS = "Q", "i", f"{MAP_BYTES}s", "i", "i", "q", "q", "f", "q", "Q", "Q"  # of what is passed
PASSED = 7, 2, 64, 64, 1, 0.5, -(2**40), 0  # what stays, in order


SIZES = [struct.calcsize(x) for x in FORMATS]


@pytest.fixture
def fake(monkeypatch):
    found = Driver([*SIZES, 8, 8])  # two of scratch memory
    monkeypatch.setattr(module, "driver", found.functions)
    return found


def compiled(**other):
    src = SimpleNamespace(signature=SIGNATURE)
    given = dict(run=run_of(), src=src, function=99, packed_metadata=(4, 1, 5000)) | other
    return SimpleNamespace(**given)


def a_map(first):
    found = Map(bytes([first]) * MAP_BYTES)
    found.tensor_map = f"map {first}"
    return found


def test_parameters(fake):
    launch = packed(compiled(), 132, ARGS, ROW, None)
    for stream, q, k, out in ((5, 2**47, 1, 16), (6, 32, 2, 48)):
        launch(stream, [q, a_map(k), out])
    for (config, function, values), (stream, q, k, out) in zip(
        fake.launched, ((5, 2**47, 1, 16), (6, 32, 2, 48))
    ):
        assert struct.unpack("=7I4xQQI4x", config) == (132, 1, 1, 128, 1, 1, 5000, stream, 0, 0)
        assert function == 99
        first, number, tensor_map, *rest = values[:-2]
        assert struct.unpack("Q", first)[0] == q and tensor_map == a_map(k)
        assert struct.unpack("Q", rest[-1])[0] == out
        others = [number, *rest[:-1]]
        formats = FORMATS[1], *FORMATS[3:-1]
        assert tuple(struct.unpack(*x)[0] for x in zip(formats, others)) == PASSED
        assert values[-2:] == [bytes(8)] * 2


def test_numbers_that_move(fake):
    """Such as that of a barrier: each as the kernel was compiled for it."""
    args = (Q, Gap("number"), 1), *ARGS[1:2], 2, 64, 64, 1, (0.5, (Gap("wide"), NONE)), *ARGS[-2:]
    launch = packed(compiled(), 132, args, (*ROW, "number", "wide"), None)
    launch(5, [32, a_map(1), 16, -7, 2**40])
    ((_, _, values),) = fake.launched
    assert (values[1], values[8]) == (struct.pack("i", -7), struct.pack("q", 2**40))


def test_a_kernel_that_may_begin_early(fake):
    """One attribute, programmatic stream serialization, which is allowed."""
    launch = packed(compiled(run=run_of(launch_pdl=True)), 132, ARGS, ROW, None)
    launch(5, [32, a_map(1), 16])
    (config, _, values), *_ = fake.launched
    *_, stream, attributes, count = struct.unpack("=7I4xQQI4x", config)
    assert (stream, count) == (5, 1)
    number, value = struct.unpack("=I4xI60x", ctypes.string_at(attributes, 72))
    assert (number, value) == (6, 1)
    assert values[0] == struct.pack("Q", 32)


def test_what_the_driver_refuses_goes_through_triton(fake):
    found = []
    launch = packed(compiled(), 132, ARGS, ROW, lambda *x: found.append(x))
    fake.result = INVALID_CONTEXT
    launch(5, [32, a_map(1), 16])
    assert found == [(5, [32, "map 1", 16])] and not fake.launched


def test_a_launch_inside_of_a_launch_goes_through_triton(fake):
    """Of a thread that the driver let run, or of a signal's handler."""
    found = []
    launch = packed(compiled(), 132, ARGS, ROW, lambda *x: found.append(x))
    fake.inside = lambda: fake.launched or found or launch(6, [48, a_map(2), 64])
    launch(5, [32, a_map(1), 16])
    assert found == [(6, [48, "map 2", 64])]
    assert [values[0] for *_, values in fake.launched] == [struct.pack("Q", 32)]


@pytest.mark.parametrize(
    "other",
    [
        dict(packed_metadata="of another Triton"),
        dict(packed_metadata=(4, 2, 5000)),
        dict(run=run_of(launch_cooperative_grid=True)),
        dict(run=run_of(global_scratch_size=512)),  # of a program that makes descriptors
        dict(run=run_of(profile_scratch_size=64)),
        dict(src=SimpleNamespace(signature=SIGNATURE | dict(out="bf16"))),
    ],
    ids=str,
)
def test_other_kernels_are_not_packed(fake, other):
    assert packed(compiled(**other), 132, ARGS, ROW, None) is None


@pytest.mark.parametrize("sizes", [SIZES[:-1], [*SIZES, 4], [8, 8, *SIZES[2:]], []], ids=str)
def test_other_parameters_are_not_packed(fake, sizes):
    fake.sizes = sizes
    assert packed(compiled(), 132, ARGS, ROW, None) is None


def test_a_tensor_that_does_not_move_is_not_packed(fake):
    args = (Gap("other"), 7, 1), *ARGS[1:]
    assert packed(compiled(), 132, args, ROW, None) is None


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(module, "driver", lambda: None)
    assert packed(compiled(), 132, ARGS, ROW, None) is None
