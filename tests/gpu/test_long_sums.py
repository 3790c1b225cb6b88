"""Sums of very many equal rows keep 1 %: tensor cores cut each product to the accumulator's digits.

A product loses half of 2^-25 of the power of two below the accumulator on average, so that n equal
ones lose n * 2^-27.6 of their sum: 0.5 % at 2^20. See docs/design/hopper-backward.md.
"""

import pytest
import torch

from tilewise import attention

pytestmark = pytest.mark.gpu

ROWS, HEADDIM = 1 << 20, 64
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
BACKENDS = ["portable", pytest.param("hopper", marks=needs_hopper)]


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("nheads", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dv_of_few_keys_under_many_queries(backend, nheads):
    """Each row of P sums to 1, and so each column of dV to the number of rows of all heads."""
    q = normal(1, ROWS // nheads, nheads, HEADDIM)
    k, v = normal(1, 128, 1, HEADDIM), normal(1, 128, 1, HEADDIM).requires_grad_()
    out = attention(q, k, v, backend=backend)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    sums = dv.double().sum((0, 1, 2))
    assert ((sums - ROWS).abs() <= 0.01 * ROWS).all(), sums.min().item() / ROWS


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_over_many_keys(backend):
    """Values of 1 are 1 again."""
    q, k = normal(1, 64, 1, HEADDIM), normal(1, ROWS, 1, HEADDIM)
    with torch.no_grad():
        out = attention(q, k, torch.ones_like(k), backend=backend)
    assert ((out.double() - 1).abs() <= 0.01).all(), out.min().item()
