"""Products of rows: their bits depend on the two rows alone.

    dots            s[i, j] = scale * q[i] . x[columns[i, j]]
    weighted_sums   o[i] = sum over j of p[i, j] * x[columns[i, j]], from left to right

`x` (any number, width) is memory in units of one row, so that keys and values are read where they
lie, whatever the layout of a cache, and once. A BLAS chooses a kernel by the shapes, strides and
alignment of its matrices, and promises no bits. These two are loops over rows in torch itself,
`torch.sparse.sampled_addmm` and `torch.embedding_bag`: one vector routine serves every row, and
threads share rows.

Times of them and of other ways are in docs/design/cache.md.
"""

from __future__ import annotations

import warnings

import torch

Tensor = torch.Tensor


def dots(q: Tensor, x: Tensor, columns: Tensor, scale: float) -> Tensor:
    """(rows, n) of q (rows, width) and columns (rows, n), in fp32 or fp64."""
    rows, n = columns.shape
    if len(x) < n:  # more than a matrix of that size holds
        x = torch.nn.functional.pad(x, (0, 0, 0, n - len(x)))
    values = q.new_zeros(rows * n)  # beta = 0 does not hide NaN
    # Columns of a row are neither sorted nor distinct, which this product does not ask for
    starts, indices, size = _starts(columns), columns.view(-1), (rows, len(x))
    pattern = torch.sparse_csr_tensor(
        starts, indices, values, size=size, device="cpu", check_invariants=False
    )
    torch.sparse.sampled_addmm(pattern, q, x.T, beta=0.0, alpha=scale, out=pattern)
    return values.view(rows, n)


def weighted_sums(p: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """(rows, width) of p and columns, both (rows, n)."""
    weights = p.view(-1)
    return torch.embedding_bag(
        x, columns.view(-1), _starts(columns), per_sample_weights=weights, include_last_offset=True
    )[0]


def _starts(columns: Tensor) -> Tensor:
    """The end of each row of columns behind a 0."""
    rows, n = columns.shape
    return torch.arange(0, rows * n + 1, n, dtype=columns.dtype, device="cpu")


with warnings.catch_warnings():  # torch says once in a process that CSR is in beta
    warnings.simplefilter("ignore")
    _one = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    dots(_one, _one, columns=_one.int(), scale=1.0)
