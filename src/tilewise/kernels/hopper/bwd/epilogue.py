"""The epilogue: dK and dV from registers to global memory, through shared memory and TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..compat import tma_store
from ..layouts import row_of
from ..tma import store_ragged


@gluon.jit
def used_rows(rows, work, start, FEATURES: gl.constexpr):
    """dK or dV of 64 keys, 0 for those that are not used: their P and dS are 0, but 0 times what a
    query holds may be NaN.
    """
    if FEATURES.SEQUSED_K:
        k_idx = start + gl.arange(0, 64, row_of(rows.type.layout))
        return gl.where((k_idx < work.seqlen_k)[:, None], rows, 0.0)
    else:
        return rows


@gluon.jit
def write_rows(
    rows,
    desc,
    outputs,
    work,
    start,
    WG: gl.constexpr,
    FEATURES: gl.constexpr,
    column: gl.constexpr = 0,
):
    """Stores 64 rows of dK or dV, columns from `column` on, through the warpgroup's buffer."""
    rows = used_rows(rows, work, start=start, FEATURES=FEATURES).to(desc.dtype)
    store_columns(rows, desc, outputs, work, start, column, WG, FEATURES)


@gluon.jit
def store_columns(
    rows, desc, outputs, work, start, column: gl.constexpr, WG: gl.constexpr, FEATURES: gl.constexpr
):
    """Stores columns from `column` on, in halves where the buffer is smaller: in fp32."""
    if rows.shape[1] > outputs.smem.shape[2]:
        HALF: gl.constexpr = rows.shape[1] // 2
        left, right = gl.split(rows.reshape([64, 2, HALF]).permute(0, 2, 1))
        store_columns(left, desc, outputs, work, start, column, WG, FEATURES)
        store_columns(right, desc, outputs, work, start, column + HALF, WG, FEATURES)
    else:
        buffer = outputs.smem.index(WG)
        tma.store_wait(0)  # TMA has read the previous contents
        buffer.store(rows)
        fence_async_shared()  # what threads wrote, before TMA reads it
        store_keys(desc, work, start=start, buffer=buffer, FEATURES=FEATURES, column=column)


@gluon.jit
def store_keys(desc, work, start, buffer, FEATURES: gl.constexpr, column: gl.constexpr = 0):
    """Stores a buffer as rows of a tile's keys; TMA writes none past their end."""
    if FEATURES.PACKED:
        store_ragged(desc, work.stop_k, work.rows_k, work.head, start, buffer, column)
    else:
        shape: gl.constexpr = desc.block_type.shape
        tma_store(desc, [work.batch, work.head, start, column], buffer.reshape(shape))
