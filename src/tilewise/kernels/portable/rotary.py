"""Rotary position embedding of rows in memory, by tables of angles."""

import triton
import triton.language as tl

from ...tile.bounds import clamp


@triton.jit
def turned(x, row, column, inside, position, tables, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x, the columns from `column` on of rows that begin at `row`, turned by the angles of their
    positions, in fp32.

    The first 2 HALF columns are turned, in pairs (0, 1), (2, 3) or (0, HALF), (1, HALF + 1);
    positions past `tables`, of cos, sin and their rows, take the last.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = x.to(tl.float32)
    at = clamp(position, 0, tables.positions - 1).to(tl.int64) * HALF
    if INTERLEAVED:
        angle = column // 2 + tl.arange(0, WIDTH // 2)[None, :]
        is_turned = angle < HALF
        cos = tl.load(tables.cos + (at + angle), mask=is_turned, other=1.0).to(tl.float32)
        sin = tl.load(tables.sin + (at + angle), mask=is_turned, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
        both = tl.join(
            tl.where(is_turned, first * cos - second * sin, first),
            tl.where(is_turned, second * cos + first * sin, second),
        )
        return tl.reshape(both, [ROWS, WIDTH])
    else:
        columns = column + tl.arange(0, WIDTH)[None, :]
        is_turned, is_first = columns < 2 * HALF, columns < HALF
        # Runs of a power of two lie in one half, so that loads are of several elements
        RUN: tl.constexpr = min(HALF & -HALF, 16)
        partner = columns + tl.where(is_first, HALF, -HALF)
        partner = tl.max_contiguous(tl.multiple_of(partner, [1, RUN]), [1, RUN])
        angle = tl.max_contiguous(tl.multiple_of(columns % HALF, [1, RUN]), [1, RUN])
        other = tl.load(row + partner, mask=inside & is_turned, other=0.0).to(tl.float32)
        cos = tl.load(tables.cos + (at + angle), mask=is_turned, other=1.0).to(tl.float32)
        sin = tl.load(tables.sin + (at + angle), mask=is_turned, other=0.0).to(tl.float32)
        return tl.where(is_turned, x * cos + other * tl.where(is_first, -sin, sin), x)
