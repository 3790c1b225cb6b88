"""The mask's assembly computes what its function in the emulator computes."""

import itertools
import operator
import re

import pytest
import torch

from tilewise.kernels.hopper.hide import ASM, selection, selection_in_warp

COMPARISONS = {"ge": operator.ge, "lt": operator.lt, "ne": operator.ne}
SETP = re.compile(r"setp\.(\w+)(\.and)?\.s32 seen, (\S+), (\S+?)(, seen)?;")
OUT = re.compile(r"setp\.(\w+)(?:\.or)?\.s32 out, (\S+), (\S+?)[,;]")
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


@pytest.mark.parametrize("n", [8, 64])
def test_the_text_of_a_warp(n):
    """Of one thread: half of two rows of an accumulator, columns 8 i and 8 i + 1 of each."""
    text = selection_in_warp(n)
    halves = re.split(r"NO_\w+:", text)
    for first, stop in itertools.product(((0, 0), (3, 9), (0, 30)), ((256, 256), (9, 1), (-4, 12))):
        s = torch.randn(n)
        found = s.clone()
        named = {f"${2 * n + i}": first[i // 2] for i in (0, 2)}
        named |= {f"${3 * n + i}": stop[i // 2] for i in (0, 2)}
        for half in halves[:2]:
            one, other, *pairs = re.findall(
                r"setp\.(\w+)(?:\.or)?\.s32 out, (\S+), (\S+?)[,;]", half
            )
            compare = {"gt": operator.gt, "le": operator.le}[one[0]]
            taken = re.findall(r"selp\.f32 \$(\d+), 0fFF800000, \$(\d+), out;", half)
            assert len(taken) == len(pairs) == n
            hides = [compare(named[row], int(column)) for _, row, column in pairs]
            if any(compare(named[row], int(edge)) for _, row, edge in (one, other)):
                for (to, of), is_out in zip(taken, hides):
                    assert to == of
                    found[int(to)] = -torch.inf if is_out else found[int(to)]
            else:
                assert not any(hides)  # what is branched over changes nothing
        register = torch.arange(n)
        row, column = register // 2 % 2, register // 4 * 8 + register % 2
        seen = (column >= torch.tensor(first)[row]) & (column < torch.tensor(stop)[row])
        assert torch.equal(found, torch.where(seen, s, -torch.inf))
