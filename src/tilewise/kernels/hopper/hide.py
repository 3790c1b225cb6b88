"""The mask of a block of scores in assembly: a comparison for each condition, and one selection.

Left to itself the compiler selects an element once for each condition (documents under a causal
mask: three comparisons and three selections), or it computes a tile's comparisons as bits of
integers and takes them out again: packed and causal at headdim 64, the masked branch of the
backward has 574 instructions then, and 289 with this. A comparison takes the predicate before it
as an operand at no cost.
"""

import itertools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.mask import apply_mask, columns_seen, function_allows, has_first, has_stop
from .rescale import in_place


@gluon.constexpr_function
def selection(has_first, has_stop, has_function):
    """$0 = $1 where the column $2 is within the ends that follow, and the function's value not 0;
    else -inf.
    """
    conditions = [("ge", "$2, {}")] * has_first + [("lt", "$2, {}")] * has_stop
    conditions += [("ne", "{}, 0")] * has_function
    lines = ["{ .reg .pred seen;"]
    for i in range(len(conditions)):
        joined, before = (".and", ", seen") if i else ("", "")
        pair = conditions[i][1].format(f"${i + 3}")
        lines.append(f"setp.{conditions[i][0]}{joined}.s32 seen, {pair}{before};")
    return " ".join([*lines, "selp.f32 $0, $1, 0fFF800000, seen; }"])


@gluon.constexpr_function
def registers(*tests):
    """The constraints of the assembly."""
    return "=f,f,r" + ",r" * sum(map(bool, tests))


@gluon.jit
def hide(s, q_idx, k_idx, seq, FEATURES: gl.constexpr):
    """`tile.mask.apply_mask`."""
    TRANSPOSED: gl.constexpr = k_idx.shape[1] == 1
    FUNCTION: gl.constexpr = FEATURES.MASK_MOD is not None
    # Of a function alone the compiler would make bits again: it joins whether it is a key
    JOINED: gl.constexpr = FUNCTION and not (FEATURES.LEFT or FEATURES.RIGHT)
    LEFT: gl.constexpr = FEATURES.LEFT
    FIRST: gl.constexpr = has_first(LEFT, FEATURES.RIGHT, FEATURES.ENDS, TRANSPOSED)
    STOP: gl.constexpr = has_stop(LEFT, FEATURES.ENDS, is_transposed=TRANSPOSED) and not JOINED
    interval = columns_seen(q_idx, k_idx, seq=seq, FEATURES=FEATURES, TRANSPOSED=TRANSPOSED)
    operands = (s, q_idx if TRANSPOSED else k_idx)
    if FIRST:
        operands = operands + (interval.first,)
    if STOP:
        operands = operands + (interval.stop,)
    if FUNCTION:
        is_seen = function_allows(q_idx, k_idx, seq=seq, FEATURES=FEATURES)
        if JOINED:
            is_seen = is_seen & (k_idx < seq.lengths.seqlen_k)
        operands = operands + (is_seen.to(gl.int32),)
    if len(operands) == 2:
        return apply_mask(s, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
    return gl.inline_asm_elementwise(
        selection(FIRST, STOP, has_function=FUNCTION),
        registers(FIRST, STOP, FUNCTION),
        operands,
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def selection_in_warp(n):
    """n registers of an accumulator, of which the first two of every four are of the thread's first
    row: -inf before the row's first column, and from its stop on. A warp of whose rows none begins,
    or ends, within the tile branches over that half.
    """
    columns = [i // 4 * 8 + i % 2 for i in range(n)]
    rows = [2 * n if i % 4 < 2 else 2 * n + 2 for i in range(n)]
    lines = ["{ .reg .pred out, any;"]
    for end, offset, test, edge in (("FIRST", 0, "gt", 0), ("STOP", n, "le", columns[-1])):
        one, other = f"${2 * n + offset}, {edge}", f"${2 * n + offset + 2}, {edge}"
        lines.append(f"setp.{test}.s32 out, {one}; setp.{test}.or.s32 out, {other}, out;")
        lines.append(f"vote.sync.any.pred any, out, 0xffffffff; @!any bra NO_{end};")
        for i in range(n):
            lines.append(f"setp.{test}.s32 out, ${rows[i] + offset}, {columns[i]};")
            lines.append(f"selp.f32 ${i}, 0fFF800000, ${i}, out;")
        lines.append(f"NO_{end}:")
    return " ".join([*lines, "}"])


@gluon.jit
def hide_outside(s, seen):
    """Scores of an accumulator outside of its rows' intervals become -inf; columns are counted from
    a thread's first one on.
    """
    n: gl.constexpr = s.shape[1] // 2
    return gl.inline_asm_elementwise(
        selection_in_warp(n),
        in_place(n, "rr"),
        [s, seen.first, seen.stop],
        dtype=gl.float32,
        is_pure=False,  # a vote is of the whole warp
        pack=n,
    )


def _hide_outside(s, first, stop):
    column = torch.arange(s.shape[1]) & ~6  # without 2 t, which a thread's ends are less
    return torch.where((column >= first) & (column < stop), s, -torch.inf)


def _select(has_first, has_stop, has_function):
    def select(s, column, *tests):
        tests, is_visible = list(tests), torch.ones_like(s, dtype=torch.bool)
        if has_first:
            is_visible &= column >= tests.pop(0)
        if has_stop:
            is_visible &= column < tests.pop(0)
        if has_function:
            is_visible &= tests.pop(0) != 0
        return torch.where(is_visible, s, -torch.inf)

    return select


_WAYS = [way for way in itertools.product((False, True), repeat=3) if any(way)]
# What this assembly means to the emulator
ASM = {
    **{selection(*way): _select(*way) for way in _WAYS},
    **{selection_in_warp(n): _hide_outside for n in (8, 16, 32, 64)},
}
