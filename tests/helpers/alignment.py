"""Tensors that lie anywhere: address and strides at multiples of so many bytes and of no more."""

import torch

UNITS = (2, 4, 8, 16)  # bytes


def lying(x, address, steps):
    """x at an address and with strides of all dimensions but the last that are multiples of these
    bytes, and, below 16, of no larger power of two; NaN, or any bits, around it.
    """
    size = x.itemsize
    strides, extent = [1], x.shape[-1] if x.dim() else 1
    for n, step in zip(x.shape[-2::-1], steps[::-1]):
        unit = max(step // size, 1)
        stride = -(-extent // unit) * unit
        if unit * size < UNITS[-1] and stride % (2 * unit) == 0:
            stride += unit
        strides.insert(0, stride)
        extent = stride * n
    first = max(address // size, 1) if address < UNITS[-1] else 0
    memory = torch.empty((first + extent) * size + 64, dtype=torch.uint8).fill_(0xFF).view(x.dtype)
    return memory.as_strided(x.shape, strides[-max(x.dim(), 1) :][: x.dim()], first).copy_(x)


def drawn(rng, x, most=UNITS[-1]):
    """x, lying somewhere; often it is all at multiples of `most`."""
    units = [n for n in UNITS if x.itemsize <= n <= most]
    steps = [rng.choice((*units, *units[-1:] * 2)) for _ in x.shape]
    return lying(x, steps[0], steps[1:])


def unit_of(x):
    """The bytes, up to 16, that its address and strides are multiples of."""
    steps = [s * x.itemsize for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    return min(n & -n or UNITS[-1] for n in (x.data_ptr() % 16, *(s % 16 for s in steps)))
