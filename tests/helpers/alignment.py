"""Tensors that lie anywhere, at multiples of some bytes."""

from fuzz.places import UNITS, lying


def drawn(rng, x, most=UNITS[-1]):
    """x, lying somewhere; often it is all at multiples of `most`."""
    units = [n for n in UNITS if x.itemsize <= n <= most]
    steps = [rng.choice((*units, *units[-1:] * 2)) for _ in x.shape]
    return lying(x, steps[0], steps[1:])


def unit_of(x):
    """The bytes, up to 16, that its address and strides are multiples of."""
    steps = [s * x.itemsize for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    return min(n & -n or UNITS[-1] for n in (x.data_ptr() % 16, *(s % 16 for s in steps)))
