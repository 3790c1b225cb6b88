"""The mask of a block of scores, with one selection an element.

Where a key has several conditions to pass, the compiler selects an element once for each: for
documents under a causal mask three comparisons and three selections. A comparison can take the
predicate before it as an operand at no cost, so one selection is enough; being assembly, it takes
one predicate, and the compiler has to join them (1,008 to 929 instructions in that loop).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.mask import apply_mask, visible

_SELECT = """{
    .reg .pred is_seen;
    setp.ne.s32 is_seen, $2, 0;
    selp.f32 $0, $1, 0fFF800000, is_seen;
}"""
SELECT = gl.constexpr(_SELECT)


@gluon.jit
def hide(s, q_idx, k_idx, seq, FEATURES: gl.constexpr):
    """`tile.mask.apply_mask`, with one selection an element."""
    # With a single condition the compiler needs no help: a causal block would take 30 % more
    SEVERAL: gl.constexpr = FEATURES.MASK_MOD is not None or (FEATURES.LEFT and FEATURES.RIGHT)
    if SEVERAL:
        s, seen = gl.broadcast(s, visible(q_idx, k_idx, seq, FEATURES).to(gl.int32))
        return gl.inline_asm_elementwise(
            SELECT, "=f,f,r", [s, seen], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return apply_mask(s, q_idx, k_idx, seq, FEATURES)


# What this assembly means to the emulator
ASM = {_SELECT: lambda s, seen: torch.where(seen != 0, s, -torch.inf)}
