"""Relaunches of the FP8 forward for Hopper read each call's own tensors. No GPU: the launcher is a
function that notes the arguments.
"""

import pytest
import torch
from helpers import fp8
from helpers.fake_kernels import fake_kernels
from helpers.hopper_relaunch import fake_launches

from tilewise import errors
from tilewise.kernels.common.quantized import Scales
from tilewise.kernels.hopper import tile_counter
from tilewise.kernels.hopper.fwd import fp8_launch, transpose
from tilewise.problem import Scalars

HEADS = fp8.Heads(2, 2, 128, 128)


@pytest.fixture
def launched(monkeypatch, memory):
    """Launches of the kernel: how, and what with."""
    fake_launches(monkeypatch)
    return fake_kernels(monkeypatch, fp8_launch, "hopper_fp8_fwd_kernel")


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
    forward = fp8_launch.prepare_fp8(problem, scalars, torch.bfloat16)
    one, *three = (torch.rand(1, 2) for _ in range(4))
    forward(call.quantized._replace(scales=Scales(one, one, one)), call.extras)
    forward(call.quantized._replace(scales=Scales(*three)), call.extras)
    (numbers,) = numbers_again(launched, front=1)
    places = [numbers.index(x.data_ptr()) for x in three]
    assert places == sorted(places) and one.data_ptr() not in numbers


def numbers_again(launched, front):
    """The numbers of launches behind those through Triton's front end."""
    ways = [how for _, how, *_ in launched]
    assert ways == ["front"] * front + ["again"] * (len(ways) - front)
    return [list(numbers_in(args)) for *_, args in launched[front:]]


def test_values_that_the_kernel_transposes(launched, monkeypatch):
    """Each call's V, a V^T of its own, and the words that its programs share."""
    words, tiles = (torch.zeros(n, dtype=torch.int32) for n in (128, 1))
    counts = []

    def counters(*of, count):
        counts.append(count)
        return tiles if count == 1 else words

    monkeypatch.setattr(tile_counter, "counters", counters)
    calls = [fp8.normal_call([128], [200], HEADS, seed=seed) for seed in range(3)]
    scalars = Scalars(128**-0.5, 0.0, -1, -1)
    problem = fp8.problem_of(calls[0], scalars)
    forward = fp8_launch.prepare_fp8(problem, scalars, torch.bfloat16, transposes=True)
    for call in calls:
        forward(call.quantized._replace(v_t=call.v), call.extras)
    again = numbers_again(launched, front=1)
    assert len(again) == 2 and counts == [1, transpose.READY + 2 * 2] * 3
    for call, numbers in zip(calls[1:], again):
        at_k, at_values = (numbers.index(x.data_ptr()) for x in (call.quantized.k, call.v))
        q, v_t = numbers[0], numbers[at_k + 9]
        assert q == call.quantized.q.data_ptr() and at_k < at_values
        assert numbers.count(v_t) == 2 and numbers.count(words.data_ptr()) == 1


def test_what_is_copied_is_copied_at_each_call(launched, monkeypatch):
    """Rows that TMA cannot read."""
    monkeypatch.setattr(errors, "_said", set())
    call = fp8.normal_call([128], [128], HEADS)
    scalars = Scalars(128**-0.5, 0.0, -1, -1)
    problem = fp8.problem_of(call, scalars)
    forward = fp8_launch.prepare_fp8(problem, scalars, torch.bfloat16)
    memory = torch.zeros(1, 128, 2, 136, dtype=torch.uint8).view(fp8.FP8)
    q = memory[..., :128]
    with pytest.warns(match="q in FP8 is copied"):
        for _ in range(3):
            q.copy_(call.quantized.q)
            forward(call.quantized._replace(q=q), call.extras)
    for numbers in numbers_again(launched, front=1):
        assert q.data_ptr() not in numbers
