"""What methods cost by the model."""

import pytest

import tilewise.distributed as td

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
