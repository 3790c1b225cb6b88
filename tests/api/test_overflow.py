"""Quantising saturates itself: torch before 2.13 casts what is larger than 448 to NaN in e4m3."""

import contextlib

import pytest
import torch
import triton.language as tl
from helpers import overflow
from triton.runtime import interpreter

import tilewise
from gluon_emulator.hopper import values
from gluon_emulator.triton import repair
from tilewise import cache
from tilewise.testing import use_interpreter
from tilewise.tile import quantize as plain

E4M3, INF, NAN = torch.float8_e4m3fn, torch.inf, torch.nan
WAYS = {"cpu": contextlib.nullcontext, "portable": use_interpreter}
GIVEN = torch.tensor([1.0, -449, 465, 1e9, -1e30, INF, -INF, NAN] + 8 * [0.5])
STORED = torch.tensor([1.0, -448, 448, 448, -448, 448, -448, NAN] + 8 * [0.5])


@pytest.fixture(autouse=True)
def before_2_13(monkeypatch):
    overflow.before_2_13(monkeypatch)
    found = torch.tensor([464.0, 465.0]).to(E4M3).float()
    assert found[0] == 448 and found[1].isnan()


def assert_stored(codes):
    torch.testing.assert_close(codes.float(), STORED.expand(codes.shape), equal_nan=True)


def test_rows():
    assert_stored(plain.quantize(2 * GIVEN, torch.tensor(2.0), E4M3))


@pytest.mark.parametrize("way", WAYS)
def test_appending_to_a_cache(way):
    pools = [torch.zeros(1, 4, 1, 16, dtype=E4M3) for _ in "kv"]
    rows, two = GIVEN.expand(1, 3, 1, 16), torch.tensor(2.0)
    slots = torch.arange(3)
    with WAYS[way]():
        new = [(scale * rows[0]).contiguous() for scale in (1.0, 2.0)]
        cache.append(*pools, *new, slots=slots, k_descale=torch.tensor(1.0), v_descale=two)
    for pool in pools:
        assert_stored(pool[0, :3])


def test_quantize():
    """By scales that are given; those of the data leave nothing beyond."""
    given = GIVEN.expand(1, 3, 1, 16).contiguous()
    scales = [torch.tensor(1.0)] * 3
    x = tilewise.quantize(given, given, given, rotate=False, smooth=False, scales=scales)
    own = tilewise.quantize(*(torch.randn(1, 70, 2, 16) for _ in "qkv"))
    assert_stored(x.q)
    assert_stored(x.k)
    assert_stored(x.v_t[0, 0, :, 0])
    assert all(codes.float().isfinite().all() for codes in own[:3])


def test_what_stands_in_for_a_gpu():
    """The emulator's conversion, and the interpreter's of bits."""
    assert_stored(values.convert(GIVEN, tl.float8e4nv))
    repair.repair()
    given = GIVEN.view(torch.int32).numpy()
    bits = interpreter._convert_float(given, tl.float32, tl.float8e4nv, None)
    assert_stored(torch.from_numpy(bits).view(E4M3))
