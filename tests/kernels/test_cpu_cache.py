"""A step of decoding on the CPU: what it writes, and how many operators it is."""

import pytest
import torch
from helpers.cached_calls import check_cached
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.kernels.common.outputs import empty_lse
from tilewise.kernels.cpu import cache

HEADS, PAGE = 2, 16


class Written(TorchDispatchMode):
    """Counts operators, and the bytes of tensors that they return and that are no views."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.calls += 1
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, torch.Tensor) and x.layout == torch.strided:
                    self.bytes += x.numel() * x.itemsize
        return found


def keys_first(length, headdim, dtype):
    return torch.randn(1, length, HEADS, headdim, dtype=dtype), None


def heads_first(length, headdim, dtype):
    return torch.randn(1, HEADS, length, headdim, dtype=dtype).transpose(1, 2), None


def in_pages(length, headdim, dtype):
    table = torch.randperm(length // PAGE).to(torch.int32).unsqueeze(0)
    return torch.randn(length // PAGE, PAGE, HEADS, headdim, dtype=dtype), table


def step(layout, length, headdim=128, dtype=torch.float32):
    """What a step writes, and the bytes of its cache."""
    k, table = layout(length, headdim, dtype)
    v = torch.randn_like(k)
    q = torch.randn(1, 1, HEADS, headdim, dtype=dtype)
    lengths = torch.tensor([length], dtype=torch.int32), None
    numbers = True, None, None, None, 512
    cached = check_cached(q, k, v, table, lengths, (None, None, None), numbers, "bshd")
    out, lse = torch.empty_like(q), empty_lse(q)
    cache.forward(cached, out, lse)
    with Written() as written:
        cache.forward(cached, out, lse)
    return written, 2 * k.numel() * k.itemsize


LAYOUTS = [keys_first, heads_first, in_pages]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_read_where_they_lie(layout):
    """In fp32 a step writes, all in all, less than a sixth of what it reads."""
    written, cached = step(layout, 8192)
    assert written.bytes < cached / 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_longer_caches_take_no_more_operators(layout):
    short, _ = step(layout, 1024)
    long, _ = step(layout, 8192)
    assert long.calls == short.calls <= 64


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_keys_of_16_bits_are_copied_once(layout):
    written, cached = step(layout, 8192, dtype=torch.bfloat16)
    assert written.bytes < 2 * cached * 1.1  # to fp32
