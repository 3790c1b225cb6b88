"""Which calls quantise q and k in one launch, and v in one: no kernel runs."""

import pytest
import torch
from helpers.quantizing import ALL, ints, tensors

from tilewise.kernels.common.operand import operands_of
from tilewise.kernels.common.quantized import WHOLE, Lengths
from tilewise.kernels.cpu.quantize import Steps
from tilewise.kernels.portable import quantize, quantize_memory
from tilewise.kernels.portable.quantize_rows import ROWS

NO_LENGTHS = Lengths()
ONE, TABLE = torch.ones(1, 2), torch.ones(150, 32)
CASES = {
    "short": ({}, True),
    "in use": (dict(of=Lengths(seqused_k=ints(100))), True),
    "the longest": (dict(rows=(1, WHOLE)), True),
    "without means": (dict(steps=Steps(True, False, False)), True),
    "long": (dict(rows=(1, WHOLE + 1)), False),
    "one block": (dict(rows=(1, ROWS.value)), False),
    "the shortest": (dict(rows=(1, ROWS.value + 1)), True),
    "packed": (dict(of=Lengths(*[ints(0, 150)] * 2)), False),
    "a given scale": (dict(scales=(None, ONE, None)), False),
    "turned": (dict(tables=(TABLE, TABLE)), False),
    "not mixed": (dict(steps=Steps(False, True, True)), False),
    "of 32 bits": (dict(dtype=torch.float32), False),
    "another headdim": (dict(headdims=(64, 128)), False),
    "another headdim_v": (dict(headdims=(128, 144)), False),
}


def launches_of(
    rows=(1, 150),
    headdims=(128, 128),
    dtype=torch.bfloat16,
    steps=ALL,
    scales=(None,) * 3,
    of=NO_LENGTHS,
    tables=(None, None),
):
    x = tensors(rows, (4, 2), headdims, dtype=dtype)
    operands = operands_of(quantize.FIELDS, (*x, *scales, *of, *tables))
    return quantize.quantize_program(steps, False, **operands).launches


@pytest.mark.parametrize("name", CASES)
def test_launches(name, monkeypatch):
    call, is_short = CASES[name]
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: "sm90")
    names = [x.kernel.__name__ for x in launches_of(**call)]
    assert ("quantize_short_kernel" in names) == is_short
    assert len(names) == 2 or not is_short


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm100", "gfx942", "interpreter"])
def test_not_where_it_was_not_timed(arch, monkeypatch):
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: arch)
    assert len(launches_of()) > 2


def test_not_if_some_programs_of_a_head_may_not_run(monkeypatch):
    """16 programs share v's scales, 64 q's, 8 k's."""
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: "sm90")
    found = []
    for sms in (87, 88):
        monkeypatch.setattr(quantize_memory, "num_sms", lambda device, sms=sms: sms)
        x = tensors((1, WHOLE), (8, 1), (128, 128))
        operands = operands_of(quantize.FIELDS, (*x, *(None,) * 3, *Lengths(), None, None))
        for name in "qkv":
            operands[name].device = torch.device("cuda")
        recipes = quantize.recipes_of(operands["q"], operands["k"], ALL)
        found.append(quantize_memory.waits_for_heads(operands, recipes))
    assert found == [False, True]
