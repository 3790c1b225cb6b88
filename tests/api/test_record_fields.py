"""A record's field holds what its type says: no None, and no other record, where that is a tensor.

Types are read as they stand; a field of `Any`, or of a union, is not looked at. Records of a cache
are not, either: a known call keeps one without its tensors, and a plan has operands in their place.
"""

import itertools

import pytest
import torch
from helpers.fp8_calls import eight, starts, tensors

import tilewise
from tilewise.kernels.common import quantized
from tilewise.problem import Extras, Grads, Saved

RECORDS = quantized.Scales, quantized.GivenScales, quantized.Source, quantized.Lengths
RECORDS += quantized.Quantized, Extras, Grads, Saved
ONE = torch.ones(())
SCALES = ["".join(x) for n in range(4) for x in itertools.combinations("qkv", n)]


def wrong_fields(record):
    """Fields whose one type, by its name, is not that of what they hold."""
    for name, annotation in type(record).__annotations__.items():
        kind = getattr(annotation, "__forward_arg__", annotation).removeprefix("torch.")
        is_record = kind in {x.__name__ for x in RECORDS}
        value = getattr(record, name)
        if is_record and type(value).__name__ != kind:
            yield name
        if kind == "Tensor" and not isinstance(value, torch.Tensor):
            yield name


@pytest.fixture
def checked(monkeypatch):
    """Names of the records that are built, each of which is right."""
    built = set()

    def watch(cls, record):
        built.add(cls.__name__)
        assert not list(wrong_fields(record)), (cls, record)
        return record

    for cls in RECORDS:
        new, make = cls.__new__, cls._make.__func__
        monkeypatch.setattr(cls, "__new__", lambda c, *x, new=new, **y: watch(c, new(c, *x, **y)))
        monkeypatch.setattr(cls, "_make", classmethod(lambda c, x, make=make: watch(c, make(c, x))))
    return built


def test_a_record_that_is_wrong_is_seen(checked):
    with pytest.raises(AssertionError, match="Scales"):
        quantized.Scales(ONE, ONE, None)
    with pytest.raises(AssertionError, match="Scales"):
        quantized.Scales._make((ONE, None, ONE))
    with pytest.raises(AssertionError, match="Quantized"):
        quantized.Quantized(ONE, ONE, ONE, scales=quantized.GivenScales(None, None, None))
    quantized.GivenScales(None, ONE, None)


@pytest.mark.parametrize("given", SCALES)
def test_scales_of_fp8_inputs(given, checked):
    scales = {f"{name}_descale": ONE for name in given}
    q, k, v = eight()
    lengths = starts(q.shape[1], q.shape[1]), starts(k.shape[1], k.shape[1])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    for _ in range(2):  # a known call, too
        found = [
            tilewise.attention(q, k, v, **scales),
            tilewise.flash_attn_func(q, k, v, **scales),
            tilewise.flash_attn_varlen_func(*packed, *lengths, **scales).unflatten(0, q.shape[:2]),
        ]
        for out in found:
            torch.testing.assert_close(out, found[0])
    assert {"Scales", "GivenScales", "Quantized"} <= checked


@pytest.mark.parametrize("given", SCALES)
def test_scales_of_quantize(given, checked):
    q, k, v = (x.requires_grad_() for x in tensors())
    scales = tuple(ONE if name in given else None for name in "qkv")
    x = tilewise.quantize(q, k, v, scales=scales)
    tilewise.attention(x, backward="bf16").sum().backward()
    assert {"Source", "Saved", "Grads"} <= checked and q.grad is not None


def test_other_calls(checked):
    q, k, v = (x.requires_grad_() for x in tensors())
    bias = torch.zeros(1, 1, q.shape[1], k.shape[1], requires_grad=True)
    for options in ({}, dict(bias=bias), dict(sinks=torch.zeros(q.shape[2], requires_grad=True))):
        tilewise.attention(q, k, v, causal=True, **options).sum().backward()
    assert {"Saved", "Grads", "Extras"} <= checked
