"""What methods cost by the model, and what is no call."""

import pytest

import tilewise.distributed as td
from tilewise.errors import ArgumentError

SIZES = dict(nheads=32, nheads_k=8, headdim=128)


@pytest.mark.parametrize("learns, products", [(True, 7), (False, 2)])
def test_the_work_does_not_depend_on_what_is_pulled(learns, products):
    """A rank that pulls nothing computes gradients, too."""
    alone = td.plan(td.contiguous(8192, 1), **SIZES, learns=learns)
    apart = td.plan(td.contiguous(8192, 2).packed([0, 4096, 8192]), **SIZES, learns=learns)
    for plan, seqlen in ((alone, 8192), (apart, 4096)):
        pairs = seqlen * (seqlen + 1) // 2
        for cost in plan.costs:
            assert cost.tflop == pytest.approx(products * pairs * 32 * 256 / 1e12)
    assert alone.costs[0].mbytes == alone.costs[1].mbytes == apart.costs[1].mbytes == 0


def test_windows_and_masks_are_checked():
    """A list is a window, too; another word than those for a mask is none."""
    layout = td.zigzag(1024, 2)
    assert td.plan(layout, **SIZES, window=[64, 0]) == td.plan(layout, **SIZES, window=(64, 0))
    assert layout.work(window=[64, 0]) == layout.work(window=(64, 0))
    for call in (td.plan, lambda layout, causal, **_: layout.work(causal)):
        with pytest.raises(ArgumentError, match="causal='x': it must be False, True, 'bottom"):
            call(layout, causal="x", **SIZES)
        with pytest.raises(ArgumentError, match="causal=1: it must be"):
            call(layout, causal=1, **SIZES)
    with pytest.raises(ArgumentError, match="window=7: it must be a pair"):
        td.plan(layout, **SIZES, window=7)
