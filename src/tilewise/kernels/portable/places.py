"""Where the keys and values of a tile lie: their pages, and their rows in these."""

import triton
import triton.language as tl


@triton.jit
def first_places(n_start, cache, BLOCK_N: tl.constexpr):
    """The pages of a tile's keys, as the sequence counts them, and the keys' rows in these."""
    k_idx = n_start + tl.arange(0, BLOCK_N)
    if cache.page_table is None:
        return k_idx * 0, k_idx
    else:
        return k_idx // cache.page_size, k_idx % cache.page_size


@triton.jit
def next_places(nth, row, cache, BLOCK_N: tl.constexpr):
    """The pages and rows of the next tile's keys, without a division per key."""
    if cache.page_table is None:
        row = row + BLOCK_N
    elif cache.tile_pages is not None:
        nth = nth + cache.tile_pages
    else:
        row = row + BLOCK_N
        row = row - BLOCK_N // cache.page_size * cache.page_size
        is_past = row >= cache.page_size
        row = tl.where(is_past, row - cache.page_size, row)
        nth = nth + BLOCK_N // cache.page_size + is_past.to(tl.int32)
    return nth, row


@triton.jit
def find_pages(batch, nth, n_start, stop, cache, BLOCK_N: tl.constexpr):
    """The page of each key of a tile, which is there whatever the table says."""
    k_idx = n_start + tl.arange(0, BLOCK_N)
    if cache.page_table is None:
        return batch + k_idx * 0
    else:
        table = cache.page_table + batch.to(tl.int64) * cache.table_stride
        page = tl.load(table + nth, mask=k_idx < stop, other=0)
        # A negative one is large without a sign
        page = tl.minimum(page.to(tl.uint32, bitcast=True), tl.cast(cache.num_pages - 1, tl.uint32))
        return page.to(tl.int32, bitcast=True)


@triton.jit
def find_keys(cache, page, row, n_start, rows, BLOCK_N: tl.constexpr):
    """Where keys begin, and where values do, of the tile from key `n_start` on: what its keys have
    in common, and of each key what is left.
    """
    k_first, k_at = offsets_of(cache.k, page, row, n_start, cache, rows, BLOCK_N)
    v_first, v_at = k_first, k_at
    if cache.v.batch is not None:
        v_first, v_at = offsets_of(cache.v, page, row, n_start, cache, rows, BLOCK_N)
    return (cache.k.ptr + k_first, k_at), (cache.v.ptr + v_first, v_at)


@triton.jit
def offsets_of(x, page, row, n_start, cache, rows, BLOCK_N: tl.constexpr):
    """Elements before rows of keys or values. Without a table, those of a key are the same in all
    tiles.
    """
    first = rows.head_k.to(tl.int64) * x.head
    if cache.page_table is None:
        first = first + rows.seq.batch.to(tl.int64) * x.batch + n_start.to(tl.int64) * x.row
        return first, tl.arange(0, BLOCK_N).to(tl.int64) * x.row
    else:
        return first, wide(page) * x.batch + wide(row) * x.row


@triton.jit
def wide(x):
    """In 64 bits, of what is not negative: a product takes half the instructions."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64)
