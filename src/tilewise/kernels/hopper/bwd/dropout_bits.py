"""The dropout mask of a tile in the backward: a bit for each pair.

Keys lie down in S^T: a thread has four pairs of each group of 16, two threads of a warp need the
same groups, of keys c and c + 1, c even. Each draws half of the groups for both and
compares four bytes at a time with the threshold. Bits say what it found, and one shuffle exchanges
half of them. Two warps need the same groups as well, but other words of them: each computes all
four, of which the last two depend on the first, and takes two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.dropout import group_words, key_group, query_group
from ..layouts import column_of, half_groups, quads, row_of

# Four bytes at a time. The sum says in bit 7 how the lower seven bits compare; of that and the
# byte's own bit 7 it takes either, where the threshold's is 0, or both. The optimiser would make a
# branch of that choice
_AT_LEAST = """{
    .reg .b32 sums;
    and.b32 sums, $1, 0x7F7F7F7F;
    add.u32 sums, sums, $2;
    lop3.b32 $0, $1, sums, $3, 0xE8;
}"""
AT_LEAST = gl.constexpr(_AT_LEAST)


@gluon.jit
def draw_keep_bits(stream, m_start, n_start, threshold, M: gl.constexpr):
    """Which pairs `tile.dropout.keep_mask` keeps of a (64, M) tile, keys down: a bit for each, 32
    of a thread in one word, (32, 4) or (32, 4, 2).
    """
    if M == 128:
        first = draw_word(stream, m_start, n_start=n_start, threshold=threshold)
        return gl.join(first, draw_word(stream, m_start + 64, n_start=n_start, threshold=threshold))
    else:
        return draw_word(stream, m_start, n_start=n_start, threshold=threshold)


@gluon.jit
def draw_word(stream, m_start, n_start, threshold):
    """Draws the bits of `draw_keep_bits` for 64 queries: (32, 4)."""
    LAYOUT: gl.constexpr = half_groups()
    row = gl.arange(0, 16, row_of(LAYOUT))[:, None]
    r = gl.arange(0, 8, column_of(LAYOUT))[None, :]
    group_k = (key_group(n_start) + row // 8 * 4 + row % 4).to(gl.uint32)
    is_upper = row // 4 % 2 == 1
    threshold = gl.cast(threshold, gl.uint32)
    near = compared(stream, m_start + 0, r, group_k, is_upper, threshold)
    next = compared(stream, m_start + 16, r, group_k, is_upper, threshold)
    first = merged(near, next, MASK=0xC0C0C0C0, SHIFT=2)
    near = compared(stream, m_start + 32, r, group_k, is_upper, threshold)
    next = compared(stream, m_start + 48, r, group_k, is_upper, threshold)
    bits = merged(first, merged(near, next, MASK=0xC0C0C0C0, SHIFT=2), MASK=0xF0F0F0F0, SHIFT=4)
    # Bytes are those of query r and an even key, an odd key, query r + 8 and an even key, an odd
    joined = gl.join(bits, bits >> 8).permute((0, 2, 1)).reshape([32, 8])
    even, odd = gl.split(gl.convert_layout(joined, quads()).reshape([32, 4, 2]))
    return (even & 0x00FF00FF) | ((odd << 8) & 0xFF00FF00)


@gluon.jit
def compared(stream, m_start, r, group_k, is_upper, threshold):
    """Bits 7 and 6 of each byte say whether the pairs of half a group are kept: of two words."""
    group_q = (query_group(m_start) + r).to(gl.uint32)
    w0, w1, w2, w3 = group_words(stream, group_q, group_k=group_k)
    first, second = gl.where(is_upper, w2, w0), gl.where(is_upper, w3, w1)
    return merged(at_least(first, threshold), at_least(second, threshold), MASK=0x80808080, SHIFT=1)


@gluon.jit
def at_least(bytes, threshold):
    """Bit 7 of each byte: whether it is at least the threshold, which is 1 to 255."""
    lower = (0x80 - (threshold & 0x7F)) * 0x01010101
    either = gl.where(threshold < 0x80, 0xFFFFFFFF, 0).to(gl.uint32)
    return gl.inline_asm_elementwise(
        AT_LEAST, "=r,r,r,r", [bytes, lower, either], gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def merged(first, second, MASK: gl.constexpr, SHIFT: gl.constexpr):
    """The upper bits of each byte of two words."""
    return (first & MASK) | ((second >> SHIFT) & (0xFFFFFFFF - MASK))


def _at_least(bytes, lower, either):
    sums = (bytes & 0x7F7F7F7F) + lower
    return (bytes & sums) | (bytes | sums) & either


# What this assembly means to the emulator
ASM = {_AT_LEAST: _at_least}
