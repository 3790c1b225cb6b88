"""The text of the mask's assembly says what its stand-in in the emulator computes."""

import itertools
import operator
import re

import pytest
import torch

from tilewise.kernels.hopper.hide import ASM, selection

COMPARISONS = {"ge": operator.ge, "lt": operator.lt, "ne": operator.ne}
SETP = re.compile(r"setp\.(\w+)(\.and)?\.s32 seen, (\S+), (\S+?)(, seen)?;")
WAYS = list(itertools.product((False, True), repeat=3))[1:]


def executed(text, operands):
    """What the text makes of its operands: $1, $2, ..."""
    named = {f"${i + 1}": x for i, x in enumerate(operands)} | {"0": 0}
    tests = SETP.findall(text)
    assert len(tests) == text.count("setp") == len(operands) - 2
    assert text.endswith("selp.f32 $0, $1, 0fFF800000, seen; }")
    seen = torch.ones_like(operands[0], dtype=torch.bool)
    for i, (comparison, joined, left, right, before) in enumerate(tests):
        assert bool(joined) == bool(before) == (i > 0)
        seen &= COMPARISONS[comparison](named[left], named[right])
    return torch.where(seen, operands[0], -torch.inf)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text(way):
    s = torch.randn(6, 8)
    column = torch.arange(8).expand(6, 8)
    first, stop = torch.arange(6)[:, None].expand(6, 8) - 1, torch.arange(6)[:, None] + 3
    given = first, stop.expand(6, 8), torch.randint(2, (6, 8))
    tests = [x for x, is_asked in zip(given, way) if is_asked]
    text = selection(*way)
    found = executed(text, [s, column, *tests])
    assert torch.equal(found, ASM[text](s, column, *tests))
    assert found.isinf().any() and found.isfinite().any()
