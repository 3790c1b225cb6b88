"""Relaunches of the FP8 forward for Hopper read each call's own tensors. No GPU: the launcher is a
function that notes the arguments.
"""

import contextlib

import pytest
import torch
from helpers import fp8

from tilewise.kernels.common.quantized import Scales
from tilewise.kernels.hopper.fwd import fp8_launch, transpose
from tilewise.problem import Scalars

HEADS = fp8.Heads(2, 2, 128, 128)


class Kernel:
    """What launches: it notes the arguments, as flat numbers."""

    compiled, programs = None, 132

    def __init__(self):
        self.launched = []

    def arguments(self, stream, args):
        return (stream, *args)

    def launcher(self, stream, *args):
        self.launched.append(list(numbers_in(args)))


class Described:
    """Descriptors of which all is an address."""

    def __init__(self, kernel, read):
        pass

    def opened(self, addresses):
        gaps = [object() for _ in addresses]
        return gaps, [*gaps], True

    def first(self, which, address):
        return address


@pytest.fixture
def launched(monkeypatch):
    """Arguments of relaunches, as flat numbers."""
    kernel = Kernel()
    monkeypatch.setattr(fp8_launch, "first_launch", lambda *args, **constants: None)
    monkeypatch.setattr(fp8_launch, "checked", lambda args: args)
    monkeypatch.setattr(fp8_launch, "direct_of", lambda compiled, programs: kernel)
    monkeypatch.setattr(fp8_launch, "Descriptors", Described)
    monkeypatch.setattr(fp8_launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(fp8_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(fp8_launch, "may_relaunch", lambda device: True)
    monkeypatch.setattr(fp8_launch, "counter", lambda *of: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return kernel.launched


def numbers_in(args):
    for x in args:
        if isinstance(x, tuple):
            yield from numbers_in(x)
        elif isinstance(x, int):
            yield x


def test_scales_that_were_one_tensor_may_be_several(launched):
    call = fp8.normal_call([128], [128], HEADS)
    scalars = Scalars(128**-0.5, 0.0, -1, -1)
    problem = fp8.problem_of(call, scalars)
    forward = fp8_launch.Fp8Forward(problem, scalars, torch.bfloat16)
    one, *three = (torch.rand(1, 2) for _ in range(4))
    forward(call.quantized._replace(scales=Scales(one, one, one)), call.extras)
    forward(call.quantized._replace(scales=Scales(*three)), call.extras)
    (numbers,) = launched
    places = [numbers.index(x.data_ptr()) for x in three]
    assert places == sorted(places) and one.data_ptr() not in numbers


def test_values_that_the_kernel_transposes(launched, monkeypatch):
    """Each call's V, a V^T of its own, and the words that its programs share."""
    words = torch.zeros(128, dtype=torch.int32)
    monkeypatch.setattr(fp8_launch, "counters_of", lambda device, count: words)
    calls = [fp8.normal_call([128], [200], HEADS, seed=seed) for seed in range(3)]
    scalars = Scalars(128**-0.5, 0.0, -1, -1)
    problem = fp8.problem_of(calls[0], scalars)
    forward = fp8_launch.Fp8Forward(problem, scalars, torch.bfloat16, transposes=True)
    for call in calls:
        forward(call.quantized._replace(v_t=call.v), call.extras)
    assert len(launched) == 2  # the first through Triton's launcher
    assert forward.relaunch.v_t_shape == (1, 2, 128, 256)
    assert forward.relaunch.counters == transpose.READY + 2 * 2
    for call, numbers in zip(calls[1:], launched):
        q, k, v_t, _, values, _, *rest = numbers
        assert (q, k) == (call.quantized.q.data_ptr(), call.quantized.k.data_ptr())
        assert values == call.v.data_ptr() != v_t
        assert rest.count(v_t) == 1 and rest.count(words.data_ptr()) == 1
