"""Sums of 8-bit products, cut to the bits that a tensor core keeps, against their definition."""

import pytest
import torch

from gluon_emulator.hopper import wgmma

pytestmark = pytest.mark.emulator


def short_sum_by_definition(a, b, before):
    """An instruction at a time, each product cut to the bits that the largest leaves it."""
    total = before.double()
    for left, right in zip(a.double().mT.split(wgmma.STEP), b.double().split(wgmma.STEP)):
        products = left[:, :, None] * right[:, None]
        terms = torch.cat([total[None], products])
        largest = terms.abs().amax(0)
        unit = torch.exp2(torch.floor(torch.log2(largest)) - wgmma.SHORT)
        cut = ((terms / unit).trunc() * unit).sum(0)
        total = torch.where(largest.isfinite() & (largest > 0), cut, terms.sum(0))
    return total.float()


@pytest.mark.parametrize("rows, columns, products", [(64, 16, 64), (64, 40, 96)])
def test_sums_of_8_bit_products_are_cut(rows, columns, products):
    a = torch.randn(rows, products).to(torch.float8_e4m3fn).float()
    b = torch.randn(products, columns).to(torch.float8_e4m3fn).float()
    before = torch.randn(rows, columns) * torch.exp2(torch.randint(-20, 20, (rows, 1)))
    before[:2], a[0], a[1, 0] = 0.0, 0.0, float("nan")
    b[1, :3] = torch.tensor([0.0, float("inf"), -float("inf")])
    found = wgmma._short_sum(a, b, before)
    expected = short_sum_by_definition(a, b, before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    from_zero = wgmma._short_sum(a, b, None)
    assert torch.equal(from_zero.nan_to_num(), wgmma._short_sum(a, b, 0 * before).nan_to_num())
