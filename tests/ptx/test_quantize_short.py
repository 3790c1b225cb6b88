"""Quantising short sequences, whose programs wait for each other, instruction by instruction."""

import pytest
import torch
from helpers.quantizing import ALL, NO_SCALES, ints, quantized, tensors

from ptx import executing
from tilewise.kernels.common.quantized import Lengths
from tilewise.kernels.cpu.quantize import Steps
from tilewise.kernels.portable import quantize, quantize_memory
from tilewise.testing import use_interpreter

NO_MEANS = Steps(True, False, False)
CASES = {
    "two blocks": ((1, 140), (1, 1), Lengths(), ALL),
    "in use": ((2, 140), (1, 1), Lengths(seqused_k=ints(140, 120)), ALL),
    "heads that share a scale": ((1, 140), (2, 1), Lengths(), NO_MEANS),
}


def bits_of(x):
    tensors = *x[:3], *x.scales, x.k_mean, x.v_mean
    return [None if t is None else t.contiguous().view(torch.uint8) for t in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [None, 1])
def test_bits_are_those_of_one_pass_after_another(name, seed, monkeypatch):
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: "sm90")
    rows, heads, of, steps = CASES[name]
    x = tensors(rows, heads, (128, 128))
    with executing(monkeypatch, seed=seed), use_interpreter():
        found = quantized(*x, steps, NO_SCALES, of)
        monkeypatch.setattr(quantize, "waits_for_heads", lambda *of_call: False)
        expected = quantized(*x, steps, NO_SCALES, of)
    for mine, theirs in zip(bits_of(found), bits_of(expected)):
        assert mine is theirs is None or mine.equal(theirs)
