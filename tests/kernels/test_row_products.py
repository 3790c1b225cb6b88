"""Products of rows: right, and with bits of the two rows alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.kernels.cpu.row_products import dots, weighted_sums

DTYPES = [torch.float32, torch.float64]
WIDTHS = [1, 7, 16, 24, 33, 64, 128, 129, 256, 300]
contract = settings(max_examples=25, deadline=None, database=None)


def problem(rows, n, width, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, x = (torch.randn(k, width, generator=generator, dtype=dtype) for k in (rows, count))
    p = torch.rand(rows, n, generator=generator, dtype=dtype)
    return q, p, x, torch.randint(count, (rows, n), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_both_are_the_formula(width, dtype):
    q, p, x, columns = problem(5, 40, width, 90, dtype)
    exact = x.double()[columns.long()]
    tolerance = dict(rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)
    expected = torch.einsum("id,ijd->ij", q.double(), exact) * 0.3
    torch.testing.assert_close(dots(q, x, columns, 0.3).double(), expected, **tolerance)
    expected = torch.einsum("ij,ijd->id", p.double(), exact)
    torch.testing.assert_close(weighted_sums(p, x, columns).double(), expected, **tolerance)


@contract
@given(
    # 50 rows of x, so that some have a column twice
    **dict(rows=st.integers(1, 40), n=st.integers(1, 70), seed=st.integers(0, 2**16)),
    **dict(width=st.sampled_from(WIDTHS), dtype=st.sampled_from(DTYPES)),
    **dict(shift=st.integers(0, 17), threads=st.integers(1, 3)),
)
def test_bits_depend_on_the_two_rows_alone(rows, n, seed, width, dtype, shift, threads):
    """Not on other rows, on where a row lies, on its alignment or on threads."""
    q, p, x, columns = problem(rows, n, width, 50, dtype, seed)
    s, o = dots(q, x, columns, 0.3), weighted_sums(p, x, columns)
    order = torch.randperm(50)
    moved = torch.empty(50 * width + shift, dtype=dtype)[shift:].view(50, width)
    moved[order] = x
    i = seed % rows
    some = order[columns[i : i + 1].long()]  # int64, too
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(dots(q[i : i + 1], moved, some, 0.3), s[i : i + 1])
        assert torch.equal(dots(q, x, columns, 0.3), s)
        assert torch.equal(weighted_sums(p[i : i + 1].clone(), moved, some), o[i : i + 1])
        assert torch.equal(weighted_sums(p, x, columns), o)
    finally:
        torch.set_num_threads(before)


@contract
@given(
    **dict(before=st.integers(0, 9), after=st.integers(0, 9), seed=st.integers(0, 2**16)),
    **dict(width=st.sampled_from(WIDTHS), dtype=st.sampled_from(DTYPES)),
)
def test_zeros_at_the_ends_change_no_sum(before, after, seed, width, dtype):
    _, p, x, columns = problem(3, 20, width, 50, dtype, seed)
    wide = torch.nn.functional.pad(p, (before, after))
    more = torch.randint(50, wide.shape, dtype=torch.int32)
    more[:, before : before + 20] = columns
    assert torch.equal(weighted_sums(wide, x, more), weighted_sums(p, x, columns))


def test_rows_past_2_to_the_31_elements():
    width = 128
    x = torch.empty((1 << 32) // width + 1, width)  # its pages are not touched
    columns = torch.tensor([[0, (1 << 29) // width, (1 << 31) // width, len(x) - 1]]).int()
    x[columns[0]] = torch.randn(4, width)
    rows, q, p = x[columns[0]], torch.randn(1, width), torch.rand(1, 4)
    small = torch.arange(4, dtype=torch.int32).view(1, 4)
    assert torch.equal(dots(q, x, columns, 1.0), dots(q, rows, small, 1.0))
    assert torch.equal(weighted_sums(p, x, columns), weighted_sums(p, rows, small))
