"""Maxima of rows by integers and by floats, side by side: a kernel, and rows to try them on."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper import row_max
from tilewise.kernels.hopper.layouts import accumulator, column_of, row_of
from tilewise.kernels.hopper.row_max import integers_suffice, running_max_of
from tilewise.tile.softmax import running_max

LAGS = row_max._LAGS
LOWEST = torch.finfo(torch.float32).min
INF = float("inf")


@gluon.jit
def next_max_kernel(s, m, scale, flags, found, expected, N: gl.constexpr, LAG: gl.constexpr):
    """The m of 64 rows after a block of scores (64, N), in two ways."""
    layout: gl.constexpr = accumulator(N)
    rows = gl.arange(0, 64, row_of(layout))
    columns = gl.arange(0, N, column_of(layout))
    s = gl.load(s + rows[:, None] * N + columns[None, :])
    m_i = gl.load(m + rows)
    by_integers = integers_suffice(m_i, LAG)
    one = running_max_of(s, m_i, scale, by_integers)
    other = running_max(s, m_i, scale)
    if LAG > 0.0:
        one = gl.where(one - m_i > LAG, one, m_i)
        other = gl.where(other - m_i > LAG, other, m_i)
    gl.store(flags + rows, by_integers)
    gl.store(found + rows, one)
    gl.store(expected + rows, other)


def run_both(launch, s, m, scale, lag):
    """Flags, maxima with integers where those suffice, and by floats."""
    flags = torch.full((64,), 7, dtype=torch.int32)
    found, expected = torch.zeros(64), torch.zeros(64)
    launch(s, m, scale, flags, found, expected, N=s.shape[1], LAG=lag, num_warps=4)
    return flags, found, expected


def made_rows(lag, seed, n=128):
    """Scores (64, n) and m of 64 rows. Rows are positive, negative, both, near 0 or infinite; every
    value of m that decides about a warp's flag stands in a warp that has it as its only one.
    """
    draw = torch.Generator().manual_seed(seed)
    s = torch.randn(64, n, generator=draw) * 10
    row = torch.arange(64)
    s = torch.where((row % 4 == 1)[:, None], -s.abs() - 1e-3, s)
    s = torch.where((row % 8 == 2)[:, None], s.sign() * 0.0, s)  # of both signs
    s = torch.where((row % 8 == 3)[:, None], -s.abs() * 1e-40, s)
    s[::16] = -s[::16].abs()
    s[::16, 0] = 0.0
    s[4::16, 5], s[12::16] = INF, -INF
    s[13::16], s[13::16, n - 1] = -300.0, -20.0
    s[14::16, ::3] = -INF
    least = torch.tensor(-lag)
    below = torch.nextafter(least, torch.tensor(-INF))
    m = torch.rand(64, generator=draw) * 9 - lag
    m[3], m[19], m[35], m[51] = -0.0 if lag else 0.0, least, INF, least
    m[40 if seed % 2 else 60] = (below, torch.tensor(-INF), torch.tensor(LOWEST))[seed % 3]
    if seed % 4 == 3:  # no warp has rows that are all high enough
        m[1::16] = torch.tensor([below, -INF, LOWEST, -90.0])
    return s, m
