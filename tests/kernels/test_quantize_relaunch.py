"""Quantising again for other tensors of a signature: kernels get what Triton's launcher would give
them. No GPU: kernels are fakes that record their calls.
"""

import pytest
import torch
from helpers.fake_kernels import fake_kernels, plain
from helpers.quantizing import ALL, NONE

import tilewise
from tilewise.cache import Rotary
from tilewise.kernels.common import program
from tilewise.kernels.common.quantized import FP8, Lengths, Scales
from tilewise.kernels.portable import quantize, quantize_launches, quantize_memory
from tilewise.ops import quantize as ops

NAMES = [
    *("quantize_statistics_kernel", "quantize_means_kernel", "quantize_cast_kernel"),
    *("quantize_loss_kernel", "transpose_values_kernel", "quantize_short_kernel"),
]


@pytest.fixture
def log(monkeypatch, memory):
    """Calls of kernels. Memory that a call makes is the same for all calls."""
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: "sm90")
    return fake_kernels(monkeypatch, quantize_launches, *NAMES)


def starts(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


def counts(*used):
    return torch.tensor(used, dtype=torch.int32)


def draw(seed, rows=(2, 150), dtype=torch.bfloat16, headdims=(64, 64)):
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, headdims[0]), (2, headdims[0]), (2, headdims[1])
    return [torch.randn(*rows, *size, generator=generator).to(dtype) for size in sizes]


def tables():
    return Rotary(*torch.randn(2, 150, 32), False)


def one_for_both():
    cu = starts(100, 150)
    return Lengths(cu, cu)


CALLS = {
    "a batch": lambda: (ALL, (None,) * 3, Lengths(), None),
    "128 channels": lambda: (ALL, (None,) * 3, Lengths(), None),
    "a wide v": lambda: (ALL, (None,) * 3, Lengths(), None),
    "in use": lambda: (ALL, (None,) * 3, Lengths(seqused_k=counts(150, 90)), tables()),
    "given scales": lambda: (NONE, tuple(torch.rand(3, 2, 2)), Lengths(), None),
    "one scale for all": lambda: (NONE, (torch.rand(2, 2),) * 3, Lengths(), tables()),
    "packed": lambda: (ALL, (None,) * 3, one_for_both(), tables()),
}


@pytest.mark.parametrize("name", CALLS)
def test_quantising_again(name, log, memory):
    """Of other tensors, of one tensor as q and k, and of other ones again."""
    rows = (1, 150) if name == "packed" else (2, 150)
    again = None
    for seed in range(3):
        steps, scales, of, rotary = CALLS[name]()
        headdims = {"a wide v": (64, 144), "128 channels": (128, 128)}.get(name, (64, 64))
        q, k, v = draw(seed, rows, headdims=headdims)
        given = q, (q[:, :, :2] if seed == 1 else k).clone(), v, scales, of, rotary
        again = again or quantize.prepare_quantize(steps)
        memory.begin()
        again(*given)
        found, log[:] = plain(log), []
        assert {kind for _, kind, *_ in found} == {"again" if seed else "front"}
        memory.begin()
        quantize.prepare_quantize(steps)(*given)
        expected, log[:] = plain(log), []
        assert [(n, *rest) for n, _, *rest in found] == [(n, *rest) for n, _, *rest in expected]
        assert len(found) == (2 + 1 + 2 + 1 if steps == ALL and name != "128 channels" else 2)


def test_transposing_again(log, memory):
    used = counts(150, 90)
    transpose = quantize.prepare_transposed()
    for seed in range(3):
        v = draw(seed)[2].to(FP8)
        memory.begin()
        transpose(v, used, None)
        found, log[:] = plain(log), []
        memory.begin()
        quantize.prepare_transposed()(v, used, None)
        assert found[0][1] == ("again" if seed else "front")
        assert found[0][2:] == plain(log)[0][2:]
        log[:] = []


def test_a_hook_of_a_profiler_is_called(log, monkeypatch):
    """By Triton's launcher."""
    again = quantize.prepare_quantize(NONE)
    again(*draw(0), (None,) * 3, Lengths(), None)
    monkeypatch.setattr(program, "may_relaunch", lambda device: False)
    log[:] = []
    again(*draw(1), (None,) * 3, Lengths(), None)
    assert {kind for _, kind, *_ in log} == {"front"}


def test_a_copy_is_made_each_time(log):
    """What kernels read is not what the caller passed then; they are launched past Triton."""
    again = quantize.prepare_quantize(NONE)
    for seed in range(2):
        q, k, v = draw(seed, dtype=torch.float64)
        again(q, k, v.mT.contiguous().mT, (None,) * 3, Lengths(), None)
    assert [kind for _, kind, *_ in log] == ["front"] * 4 + ["again"] * 4


def test_calls_of_a_signature_are_prepared_once(monkeypatch):
    """And those of another one again: shapes, strides, dtypes, alignment, steps, tables."""
    prepared = []
    real = ops.plain.prepare_quantize

    def counted(steps):
        prepared.append(steps)
        return real(steps)

    monkeypatch.setattr(ops.plain, "prepare_quantize", counted)
    q, k, v = draw(0, (2, 37), torch.float32)
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    calls = [
        dict(),
        dict(smooth="v"),
        dict(rotate=False),
        dict(scales=(torch.tensor(0.1), None, None)),
        dict(scales=(None, torch.tensor(0.1), None)),
        dict(scales=Scales(*torch.rand(3, 2, 2))),
        dict(scales=[*torch.rand(3, 2, 2)], smooth=False),
        dict(rotary=tables()),
        dict(rotary=tables()._replace(interleaved=True)),
        dict(rotary=Rotary(*torch.randn(2, 150, 16))),
    ]
    for options in calls:
        for _ in range(2):
            tilewise.quantize(q, k, v, **options)
    assert len(prepared) == len(calls)
    for other in (shifted, q.transpose(0, 1).contiguous().transpose(0, 1)):
        for _ in range(2):
            tilewise.quantize(other, k, v)
    assert len(prepared) == len(calls) + 2
    tilewise.quantize(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert len(prepared) == len(calls) + 3


def test_a_cached_signature_hides_no_argument():
    q, k, v = draw(0, (2, 41), torch.float32)
    for _ in range(2):
        tilewise.quantize(q, k, v)
        with pytest.raises(tilewise.ArgumentError, match="rotary is a tuple"):
            tilewise.quantize(q, k, v, rotary=tuple(tables()))
        with pytest.raises(tilewise.ArgumentError, match="three"):
            tilewise.quantize(q, k, v, scales=[None])
        with pytest.raises(tilewise.ArgumentError, match="rotate=3"):
            tilewise.quantize(q, k, v, rotate=3)
