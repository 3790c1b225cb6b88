"""Intervals may be wide and are never wrong."""

import itertools

import pytest
import torch
from helpers import random_masks as masks
from hypothesis import example, given, settings

from tilewise.mods import intervals
from tilewise.mods.expressions import OPERATORS
from tilewise.mods.intervals import Blocks, Interval, bound


@given(text=masks.predicates() | masks.wrapping())
@example("((((q << 40) << 22) + 0 * k) < 0)")
@example("(((q * 1640531527) * ((k + 1) * 2654435761)) >= 0)")
@example("(abs((q << 40) << 23) < 0)")
@settings(max_examples=200, deadline=None, database=None)
def test_intervals_never_claim_wrongly(text):
    """Without the evaluation that settles what they leave open."""
    made, size = masks.traced(text), 8
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    q = torch.arange(56).clamp(max=49).view(-1, size)
    blocks = Blocks(b, h, q, torch.arange(64).view(-1, size))
    lo, hi = (x.expand(2, 2, 7, 8) for x in bound(made.expr, blocks, made.tensors))
    tiles = made(b[..., None, None], h[..., None, None], q[:, None, :, None], blocks.k_idx[:, None])
    tiles = tiles.expand(2, 2, 7, 8, size, size).flatten(4)
    assert not (lo & ~tiles.all(4)).any(), f"claimed full: {text}"
    assert not (~hi & tiles.any(4)).any(), f"claimed skipped: {text}"


BINARY = [op for op in intervals._OF_INTS if op not in ("~", "neg", "abs", "where")]
TIGHT = {"+", "-", "*", "<", "<=", "minimum", "maximum", "~", "neg", "abs"}


@pytest.mark.parametrize("op", [*BINARY, "~", "neg", "abs"])
def test_every_interval_holds_every_value(op):
    """All intervals of -4..9 by brute force, and of some the tightest."""
    values = [*range(-4, 5), 9] if op in BINARY else range(-9, 10)
    ends = [(lo, hi) for lo in values for hi in values if lo <= hi]
    boxes = list(itertools.product(ends, ends)) if op in BINARY else [(end,) for end in ends]
    sides = [torch.tensor(side, dtype=torch.float64).T for side in zip(*boxes)]
    found = intervals._OF_INTS[op](*(Interval(*side) for side in sides))
    undefined = {"//": lambda y: y == 0, "%": lambda y: y == 0}
    undefined |= dict.fromkeys(("<<", ">>"), lambda y: y < 0)
    known = {
        at: int(OPERATORS[op].compute(*map(torch.tensor, at)))
        for at in itertools.product(values, repeat=len(sides))
        if not undefined.get(op, lambda y: False)(at[-1])
    }
    for box, lo, hi in zip(boxes, found.lo.tolist(), found.hi.tolist()):
        inside = itertools.product(*([v for v in values if a <= v <= b] for a, b in box))
        held = [known[at] for at in inside if at in known]
        if held:
            assert lo <= min(held) and max(held) <= hi, (op, box, lo, hi)
        if op in TIGHT:
            assert (lo, hi) == (min(held), max(held)), (op, box, lo, hi)
