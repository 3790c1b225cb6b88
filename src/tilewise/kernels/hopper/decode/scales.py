"""Scales of a KV cache of 8 bits: one for each sequence and key head, or one for each row, copied
beside the rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import copy_async


class Scales(NamedTuple):
    """The scales of keys and of values, fp32, and their strides, over sequences, or over pages if
    each row has a scale; all None without scales.
    """

    k: Any = None
    k_batch: Any = None
    k_row: Any = None  # None where rows share one
    k_head: Any = None
    v: Any = None
    v_batch: Any = None
    v_row: Any = None
    v_head: Any = None


class Rows(NamedTuple):
    """Where rows of keys and values lie."""

    page: Any
    row: Any  # in its page
    is_used: Any  # else neither is read


class RowScales(NamedTuple):
    """The scales per row of keys or values: memory, and strides."""

    ptr: Any
    batch: Any
    row: Any
    head: Any


@gluon.jit
def k_rows(scales):
    """The scales per row of keys."""
    return RowScales(scales.k, scales.k_batch, row=scales.k_row, head=scales.k_head)


@gluon.jit
def v_rows(scales):
    """The scales per row of values."""
    return RowScales(scales.v, scales.v_batch, row=scales.v_row, head=scales.v_head)


@gluon.jit
def sequence_scale(scales, WHICH: gl.constexpr, batch, head_k, has_keys):
    """The scale of a sequence's keys (WHICH is 0) or values; 1 without keys, or if rows have it."""
    if WHICH == 0:
        ptr, by_batch, by_row, by_head = scales.k, scales.k_batch, scales.k_row, scales.k_head
    else:
        ptr, by_batch, by_row, by_head = scales.v, scales.v_batch, scales.v_row, scales.v_head
    if ptr is None or by_row is not None:
        return 1.0
    else:
        first = ptr + gl.to_tensor(batch).to(gl.int64) * by_batch
        return gl.load(first + head_k * by_head, mask=has_keys, other=1.0)


@gluon.jit
def room_for_scales(row_stride, STAGES: gl.constexpr, N: gl.constexpr):
    """Shared memory for scales of a ring's rows, (STAGES, N), where each has its own; else 0."""
    if row_stride is None:
        return 0
    else:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return gl.allocate_shared_memory(gl.float32, [STAGES, N], layout)


@gluon.constexpr_function
def have_scales(k_row, v_row):
    """Whether rows of keys or of values have their own."""
    return k_row is not None or v_row is not None


@gluon.jit
def copy_row_scales(scales, smem, head_k, rows):
    """Starts to copy the scales of rows, 4 bytes a thread at a time; zeros, and nothing read, for
    rows that are not in use.
    """
    ptrs = scales.ptr + head_k.to(gl.int64) * scales.head + rows.page * scales.batch
    ptrs = ptrs + rows.row * scales.row
    copy_async(smem, ptrs, mask=rows.is_used)
