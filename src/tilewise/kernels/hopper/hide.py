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


@gluon.constexpr_function
def selection(has_first, has_stop, has_function):
    """$0 = $1 where the column $2 is within the ends that follow, and the function's value not 0;
    else -inf.
    """
    asked = [("ge", "$2, {}")] * has_first + [("lt", "$2, {}")] * has_stop
    asked += [("ne", "{}, 0")] * has_function
    lines = ["{ .reg .pred seen;"]
    for i in range(len(asked)):
        joined, before = (".and", ", seen") if i else ("", "")
        pair = asked[i][1].format(f"${i + 3}")
        lines.append(f"setp.{asked[i][0]}{joined}.s32 seen, {pair}{before};")
    return " ".join([*lines, "selp.f32 $0, $1, 0fFF800000, seen; }"])


@gluon.constexpr_function
def registers(*tests):
    """Its constraints."""
    return "=f,f,r" + ",r" * sum(map(bool, tests))


@gluon.jit
def hide(s, q_idx, k_idx, seq, FEATURES: gl.constexpr):
    """`tile.mask.apply_mask`."""
    LEFT: gl.constexpr = FEATURES.LEFT
    TRANSPOSED: gl.constexpr = k_idx.shape[1] == 1
    FUNCTION: gl.constexpr = FEATURES.MASK_MOD is not None
    # Of a function alone the compiler would make bits again: it joins whether it is a key
    JOINED: gl.constexpr = FUNCTION and not (LEFT or FEATURES.RIGHT)
    FIRST: gl.constexpr = has_first(LEFT, FEATURES.RIGHT, TRANSPOSED)
    STOP: gl.constexpr = has_stop(LEFT, TRANSPOSED) and not JOINED
    seen = columns_seen(q_idx, k_idx, seq, LEFT, FEATURES.RIGHT, TRANSPOSED)
    operands = (s, q_idx if TRANSPOSED else k_idx)
    if FIRST:
        operands = operands + (seen.first,)
    if STOP:
        operands = operands + (seen.stop,)
    if FUNCTION:
        is_seen = function_allows(q_idx, k_idx, seq, FEATURES)
        if JOINED:
            is_seen = is_seen & (k_idx < seq.lengths.seqlen_k)
        operands = operands + (is_seen.to(gl.int32),)
    if len(operands) == 2:
        return apply_mask(s, q_idx, k_idx, seq, FEATURES)
    return gl.inline_asm_elementwise(
        selection(FIRST, STOP, FUNCTION),
        registers(FIRST, STOP, FUNCTION),
        operands,
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


def _select(has_first, has_stop, has_function):
    def select(s, column, *tests):
        tests, seen = list(tests), torch.ones_like(s, dtype=torch.bool)
        if has_first:
            seen &= column >= tests.pop(0)
        if has_stop:
            seen &= column < tests.pop(0)
        if has_function:
            seen &= tests.pop(0) != 0
        return torch.where(seen, s, -torch.inf)

    return select


_WAYS = [way for way in itertools.product((False, True), repeat=3) if any(way)]
# What this assembly means to the emulator
ASM = {selection(*way): _select(*way) for way in _WAYS}
