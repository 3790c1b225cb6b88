"""Loads and stores of a (rows, headdim) tile.

A head of a (batch, seqlen, nheads, headdim) tensor is opened once and then read tile by tile:
through a tensor descriptor, which Hopper's TMA and Triton's pipeliner serve without address
registers, or through pointers, which any alignment allows.

Rows are reached with 64-bit arithmetic: a tensor may pass 2^31 elements, and so may one tile of it,
where a large batch lies between rows. It costs nothing: compiled for sm_90 with Triton 3.6, the
forward of headdim 64 takes 113 registers, 121 with 32-bit offsets, and dK and dV spill no more.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import clamp
from ...tile.types import Strided


class HeadRows(NamedTuple):
    """The rows of one head: where they start, how far apart they lie, how many there are."""

    ptr: tl.tensor
    stride: tl.tensor
    limit: tl.tensor


@triton.jit
def head_of(x, batch, head):
    """Address of (batch, row 0, head) of a Strided tensor."""
    return x.ptr + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head


@triton.jit
def from_row(x, first):
    """A Strided tensor without the rows before `first`: those of packed sequences."""
    return Strided(x.ptr + tl.cast(first, tl.int64) * x.row, x.batch, x.row, x.head)


@triton.jit
def open_rows(
    x,
    batch,
    head,
    limit,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """One head, for `load_rows` of (ROWS, BLOCK_D) tiles; rows past `limit` and columns past D read
    as zeros.
    """
    if DESCRIPTOR:
        # A descriptor of no rows is invalid even where nothing is read through it
        rows = tl.maximum(limit, 1)
        return tl.make_tensor_descriptor(
            head_of(x, batch, head), [rows, D], [x.row.to(tl.int64), 1], [ROWS, BLOCK_D]
        )
    else:
        return HeadRows(head_of(x, batch, head), x.row, limit)


@triton.jit
def load_rows(
    source,
    start,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Rows start .. start + ROWS as a (ROWS, BLOCK_D) tile. Unless CHECKED, the caller knows that
    all of them exist.
    """
    if DESCRIPTOR:
        return source.load([start, 0])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        ptrs = (
            source.ptr
            + tl.cast(start, tl.int64) * source.stride
            + (rows.to(tl.int64)[:, None] * source.stride + columns[None, :])
        )
        if CHECKED and D == BLOCK_D:
            return tl.load(ptrs, mask=(start + rows < source.limit)[:, None], other=0.0)
        elif CHECKED:
            return tl.load(
                ptrs,
                mask=(start + rows < source.limit)[:, None] & (columns < D)[None, :],
                other=0.0,
            )
        elif D != BLOCK_D:
            return tl.load(ptrs, mask=(columns < D)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def multiply_rows(
    a,
    b,
    a_start,
    b_start,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A B^T of rows of two heads, opened as pointers, CHUNK columns at a time: (A_ROWS, B_ROWS).

    The loop is one of the GPU: unrolled, what does not change from tile to tile would be read
    before all of them, and kept in shared memory.
    """
    product = tl.zeros([A_ROWS, B_ROWS], tl.float32)
    for column in range(0, D, CHUNK):
        of_a = load_columns(a, a_start, column, A_ROWS, D, CHUNK)
        of_b = load_columns(b, b_start, column, B_ROWS, D, CHUNK)
        product = tl.dot(of_a, tl.trans(of_b), product, input_precision=PRECISION)
    return product


@triton.jit
def load_columns(source, start, column, ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """Columns column .. column + CHUNK of ROWS rows; zeros past either end."""
    rows, columns = start + tl.arange(0, ROWS), column + tl.arange(0, CHUNK)
    ptrs = source.ptr + (rows.to(tl.int64)[:, None] * source.stride + columns[None, :])
    exists = (rows < source.limit)[:, None] & (columns < D)[None, :]
    return tl.load(ptrs, mask=exists, other=0.0)


@triton.jit
def load_once(
    x, batch, head, start, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A tile that a program reads one time: by pointers, as making a descriptor takes longer."""
    source = open_rows(x, batch, head, limit, ROWS, D, BLOCK_D, False)
    return load_rows(source, start, ROWS, D, BLOCK_D, False, True)


@triton.jit
def store_rows(
    x, batch, head, tile, start, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes a (ROWS, BLOCK_D) tile to rows start .. start + ROWS of one head, cut at `limit` and
    at column D.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    ptrs = (
        head_of(x, batch, head)
        + tl.cast(start, tl.int64) * x.row
        + (rows.to(tl.int64)[:, None] * x.row + columns[None, :])
    )
    mask = (start + rows < limit)[:, None]
    if D != BLOCK_D:
        mask = mask & (columns < D)[None, :]
    tl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_stats(ptr, batch, head, sizes):
    """Address of the (batch, head) row of a contiguous (batch, nheads, seqlen_q) tensor such as lse
    or delta.
    """
    return ptr + (batch.to(tl.int64) * sizes.nheads + head) * sizes.seqlen_q


@triton.jit
def load_stats(row, q_idx, sizes, other, CHECKED: tl.constexpr):
    """lse or delta of the rows q_idx; `other` for rows that do not exist."""
    if CHECKED:
        return tl.load(row + q_idx, mask=q_idx < sizes.seqlen_q, other=other)
    else:
        return tl.load(row + q_idx)


@triton.jit
def clear_tail(
    out, lse, starts, sequences, total, nheads, program, programs, columns, D: tl.constexpr
):
    """Rows of packed queries over a KV cache behind all sequences: 0 to `out`, which is None where
    it is the caller's and stays as it is, and -inf to lse. Programs share the rows, of which only
    the device knows the first. `columns` are those of a row, in the caller's layout.
    """
    first = clamp(tl.load(starts + sequences), 0, total)
    for row in range(first + program, total, programs):
        for head in range(nheads):
            if out is not None:
                at = out.ptr + tl.cast(row, tl.int64) * out.row + tl.cast(head, tl.int64) * out.head
                zeros = (columns * 0).to(out.ptr.dtype.element_ty)
                tl.store(at + columns, zeros, mask=columns < D)
            tl.store(lse + tl.cast(head, tl.int64) * total + row, float("-inf"))
