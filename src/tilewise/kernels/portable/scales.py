"""Scales of a KV cache of 8 bits, as `decode.Cache` has them."""

import triton
import triton.language as tl


@triton.jit
def k_sequence_scale(cache, rows):
    """What a sequence's scores are multiplied with, unless each row has its own scale."""
    return load_sequence_scale(
        cache.k_scale, cache.k_scale_batch, cache.k_scale_row, cache.k_scale_head, rows
    )


@triton.jit
def v_sequence_scale(cache, rows):
    """What its outputs are multiplied with, unless each row has its own scale."""
    return load_sequence_scale(
        cache.v_scale, cache.v_scale_batch, cache.v_scale_row, cache.v_scale_head, rows
    )


@triton.jit
def k_row_scales(cache, otherwise, page, row, is_used, rows):
    """What a tile's scores are multiplied with."""
    return load_row_scales(
        otherwise, cache.k_scale, cache.k_scale_batch, cache.k_scale_row, cache.k_scale_head,
        page, row, is_used, rows,
    )  # fmt: skip


@triton.jit
def v_row_scales(cache, page, row, is_used, rows):
    """What a tile's probabilities are multiplied with, if each row has its own scale."""
    return load_row_scales(
        1.0, cache.v_scale, cache.v_scale_batch, cache.v_scale_row, cache.v_scale_head,
        page, row, is_used, rows,
    )  # fmt: skip


@triton.jit
def load_sequence_scale(ptr, batch_stride, row_stride, head_stride, rows):
    """The scale of a sequence's head, read where it has keys; 1 where each row has its own."""
    if ptr is None or row_stride is not None:
        return 1.0
    else:
        addresses = ptr + rows.seq.batch.to(tl.int64) * batch_stride + rows.head_k * head_stride
        return tl.load(addresses, mask=rows.seq.lengths.seqlen_k > 0, other=1.0)


@triton.jit
def load_row_scales(
    otherwise, ptr, batch_stride, row_stride, head_stride, page, row, is_used, rows
):
    """The scales of a tile of keys, (1, BLOCK_N), read where `is_used`; where rows share one,
    `otherwise`.
    """
    if ptr is None or row_stride is None:
        return otherwise
    else:
        addresses = ptr + rows.head_k.to(tl.int64) * head_stride
        addresses = addresses + page.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride
        return tl.load(addresses, mask=is_used, other=1.0)[None, :]
