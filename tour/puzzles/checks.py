"""The checks of the puzzles: kernels run in an interpreter, on any machine.

Every output starts as nan, so what is nan in the end was not written, or was made
of what should have been masked.
"""

import sys
from pathlib import Path
from unittest import mock

import answers
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tilewise.testing import interpret

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lesson import Exercises, expect
from lesson import NotYet as NotYet
from lesson import progress as progress

exercises = Exercises("", what="puzzle")
INF = float("inf")


def numbers(*shape, low=1, high=10):
    """Small integers, as floating-point numbers: sums of them are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator).float()


def unwritten(*shape):
    """An output before the launch."""
    return torch.full(shape, torch.nan)


masked_load = InterpreterBuilder.create_masked_load


def load_or_nan(builder, ptrs, mask, other, *options):
    """A masked load. Without `other` it may give anything on a GPU: here, nan."""
    dtype = ptrs.get_element_ty()
    if other is None and dtype.is_fp32():
        nan = np.full(ptrs.data.shape, np.nan, np.float32)
        other = TensorHandle(nan, dtype)
    return masked_load(builder, ptrs, mask, other, *options)


def launch(kernel, grid, *arguments):
    """Runs every program of the grid, one after the other."""
    with mock.patch.object(InterpreterBuilder, "create_masked_load", load_or_nan):
        interpret(kernel)[grid](*arguments)


@exercises.check(1, answers.load_kernel)
def check_load(kernel):
    """Launches `kernel(x, y, n, BLOCK)`, one program."""
    for n in (5, 8, 1):
        x, y = numbers(n), unwritten(n)
        launch(kernel, (1,), x, y, n, 8)
        expect(y, 10 * x, f"y of {n} numbers")
    return "The mask keeps a block within 5, 8 and 1 numbers."


@exercises.check(2, answers.reduce_kernel)
def check_reduce(kernel):
    """Launches `kernel(x, out, columns, BLOCK)`, a program per row."""
    for rows, columns in ((3, 5), (4, 8), (2, 1)):
        x, out = numbers(rows, columns), unwritten(rows)
        launch(kernel, (rows,), x, out, columns, 8)
        expect(out, x.sum(1), f"out for {rows} rows of {columns} numbers")
    return "A program per row, and a sum without what is masked."


@exercises.check(3, answers.tile_sum_kernel)
def check_tile_sum(kernel):
    """Launches `kernel(x, out, M, N, BLOCK_M, BLOCK_N)`, a program per tile."""
    for m, n in ((2, 4), (3, 5), (4, 9)):
        tiles_m, tiles_n = -(-m // 2), -(-n // 4)
        x, out = numbers(m, n), unwritten(tiles_m, tiles_n)
        launch(kernel, (tiles_m, tiles_n), x, out, m, n, 2, 4)
        rows_of_tiles = [x_rows.split(4, dim=1) for x_rows in x.split(2)]
        exact = [[tile.sum() for tile in tiles] for tiles in rows_of_tiles]
        expect(out, torch.tensor(exact), f"out for a matrix of {m} x {n}")
    return "Tiles in the middle, at the edges and in the corner."


@exercises.check(4, answers.matmul_tile_kernel)
def check_matmul_tile(kernel):
    """Launches `kernel(a, b, c, M, N, K, BLOCK)`, a program per tile of C."""
    for m, n, k in ((16, 16, 16), (16, 16, 48), (32, 48, 32)):
        a, b, c = numbers(m, k), numbers(k, n), unwritten(m, n)
        launch(kernel, (m // 16, n // 16), a, b, c, m, n, k, 16)
        expect(c, a @ b, f"C for ({m}, {k}) times ({k}, {n})")
    return "One step along K, three steps, and six tiles."


@exercises.check(5, answers.online_max_kernel)
def check_online_max(kernel):
    """Launches `kernel(x, out, columns, BLOCK)`, a program per row."""
    for columns in (10, 4, 3):
        x, out = numbers(3, columns, low=-99, high=-1), unwritten(3)
        launch(kernel, (3,), x, out, columns, 4)
        expect(out, x.amax(1), f"out for 3 rows of {columns} negative numbers")
    return "Rows of one block and of several, with a last one that is not full."


@exercises.check(6, answers.online_softmax_kernel)
def check_online_softmax(kernel):
    """Launches `kernel(x, m, l, columns, BLOCK)`, a program per row."""
    for columns, scale in ((4, 0.5), (10, 0.5), (10, 500.0)):
        x = numbers(3, columns, low=-9) * scale
        x[0] = x[0].sort().values  # every block raises the maximum
        m_out, l_out = unwritten(3), unwritten(3)
        launch(kernel, (3,), x, m_out, l_out, columns, 4)
        where = f"for rows of {columns} numbers up to {x.max():.6g}"
        expect(m_out, x.amax(1), f"m {where}")
        exact = (x.double() - x.double().amax(1, keepdim=True)).exp().sum(1)
        expect(l_out, exact, f"l {where}", atol=1e-5)
    return "One pass, whichever block has the largest number."


@exercises.check(7, answers.masked_tile_kernel)
def check_masked_tile(kernel):
    """Launches `kernel(s, p, seqlen, BLOCK_M, BLOCK_N)`, a program per tile."""
    for seqlen in (6, 8, 5):
        s, p = numbers(seqlen, seqlen), unwritten(seqlen, seqlen)
        tiles = []
        hidden = torch.ones(seqlen, seqlen).triu(1).bool()
        for tile in s.double().masked_fill(hidden, -INF).split(4, dim=1):
            m = tile.amax(1, keepdim=True)
            tiles.append((tile - m.masked_fill(m == -INF, 0.0)).exp())
        grid = (-(-seqlen // 2), -(-seqlen // 4))
        launch(kernel, grid, s, p, seqlen, 2, 4)
        expect(p, torch.cat(tiles, 1), f"p for seqlen {seqlen}", atol=1e-6)
    return "Keys after the query weigh nothing, and no row is nan."


@exercises.check(8, answers.attention_row_kernel)
def check_attention_row(kernel):
    """Launches `kernel(q, k, v, out, n, D, BLOCK)`, a program per query."""
    for n in (4, 10, 3):
        q, k, v = (numbers(rows, 8, low=-9) for rows in (3, n, n))
        q, k = q / 4, k / 4
        out = unwritten(3, 8)
        launch(kernel, (3,), q, k, v, out, n, 8, 4)
        exact = torch.softmax(q.double() @ k.double().T, 1) @ v.double()
        expect(out, exact, f"out for {n} keys", atol=1e-5)
    return "Attention, and no score was stored. Lesson 04 makes this fast."
