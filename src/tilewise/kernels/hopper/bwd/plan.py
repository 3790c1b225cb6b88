"""What a backward on Hopper selects: tiles, and the blocks of its descriptors."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl

from ....problem import NO_MODS, Problem, Scalars
from ....tile.seqlen import padded_row
from ....tile.types import KeyPipeline, Sizes
from ...common.arguments import features_of
from ...common.building import num_sms
from ..bias_memory import has_tiles
from ..descriptors import GL_DTYPES, Plan, block_of, in_shared, is_in_steps
from ..layouts import column_groups, used_columns
from .bias_pairs import SUMMED, sums_of, way_of
from .queue import ROWS

# Of long causal tiles: the next head's would else add to one block of dQ at a time (H100, back to
# back: headdim 128, 4Ki, 16Ki, documents: 1.010, 1.027, 1.018; 256, 16Ki: 1.009; 64, 16Ki: 0.988)
SPREAD = 32
# Tiles of queries an SM from which on a kernel for dQ is faster, by whether the mask is causal
# (H200, sustained, one kernel's time over two's: without a mask 1.13, 1.10 at 0.97, 1.9 tiles; with
# one 0.91, 0.93, 1.05, 1.00, 1.07 at 0.97, 1.9, 2.9, 3.9, 5.8)
LEAST_TILES = {False: 0.9, True: 2.5}
TINY = 1e-30  # a scale under this is no divisor


def plan_of(
    problem: Problem,
    has_scale: bool,
    is_copied: bool = False,
    bias_grad: bool = False,
    in_heads: bool = True,
    has_dq: bool = True,
) -> Plan:
    """The plan of a problem. `has_scale`: its scale is large enough to divide by; `is_copied`:
    TMA can read its bias; `bias_grad`: and write dS as the gradient of that; `in_heads`:
    batches of K and V are a whole number of heads apart; `has_dq`: no other kernel has dQ.

    To headdim 128 both head dims are padded to the wider one.
    """
    if not has_dq:  # no sum needs an order
        problem = problem._replace(deterministic=False)
    block_d, block_dv = map(block_of, (problem.headdim, problem.headdim_v))
    widest = max(block_d, block_dv)
    if widest <= 128:
        block_d = block_dv = widest
    elif is_three_quarters(problem):
        block_d = 192
    n = 128 if widest <= 128 or block_d == 192 else 64
    # 128 queries at a time leave no registers for positions or derivatives
    m = 128 if widest == 64 and problem.has_plain_scores else 64
    # Tall tiles have none to load lse ahead of S. Of a bias of -1e9 the quotient of lse and scale
    # times scale is another number than lse
    is_linear = not (problem.has_derivative or problem.has_bias)
    lse_first = m == 64 and has_scale and is_linear
    # Tall blocks of sequences that are all as long are ragged, too: the compiler then spills no
    # address of the loop (H200, back to back, headdim 64, full: 5 % at 4Ki, 2 % at 512)
    is_ragged = problem.is_packed or problem.has_seqused_k or (m == 128 and in_heads)
    has_metadata = problem.mods.block != NO_MODS.block or problem.has_dropout
    is_copied = is_copied and n == 128  # wide heads leave no shared memory
    flags = problem.deterministic, lse_first, is_ragged, has_metadata, is_copied, bias_grad
    features = features_of(problem, has_fast_tanh=True)
    is_causal = features.RIGHT and not (features.LEFT or problem.deterministic)
    is_spread = is_causal and problem.group == 1 and m == 64 and block_d != 192
    tile = KeyPipeline(m, n, block_d, block_dv, *flags, SPREAD=SPREAD * is_spread, HAS_DQ=has_dq)
    before = [1, 1, 1] if problem.is_packed else [1, 1]  # the dimensions of `ragged_by_head`
    before_keys = [1, 1, 1] if is_ragged else [1, 1]
    exact = problem.has_fp32_key_grads
    halves = 2 if exact else 1  # through a staging buffer of as many bytes
    columns = block_d // column_groups(block_d)
    blocks = dict(
        q_desc=[*before, m, columns],
        do_desc=[*before, m, block_dv],
        k_desc=[*before_keys, n, columns],
        v_desc=[*before_keys, n, block_dv],
        stats_desc=[1, 1, 1, m],
        dk_desc=[*before, 64, columns // halves],
        dv_desc=[*before, 64, (columns if block_d == 192 else block_dv) // halves],
        bias_desc=[1, 1, m, 64],
        dbias_desc=[1, 1, m, 64],
        dq_desc=[*before, 64, columns],
    )
    dtypes = dict.fromkeys(blocks, GL_DTYPES[problem.dtype]) | dict(stats_desc=gl.float32)
    if exact:
        dtypes |= dict(dk_desc=gl.float32, dv_desc=gl.float32)
    return Plan(features, tile, in_shared(dtypes, blocks))


def is_three_quarters(problem: Problem) -> bool:
    """Whether tiles have 192 columns of Q and K, and 128 keys (mma_192.py)."""
    return 128 < problem.headdim <= 192 and problem.headdim_v <= 128 and not problem.is_modified


def has_own_dq(problem: Problem, q: Any, sizes: Sizes) -> bool:
    """Whether dQ has a kernel of its own (mma_dq.py): of plain scores at headdim 256, where the
    last tiles of queries leave few SMs idle.

    docs/design/hopper-backward.md has the times of one kernel and of two.
    """
    sms = num_sms(q.device) if q.device.type == "cuda" else 0
    is_served = problem.headdim == problem.headdim_v == 256 and problem.has_plain_scores
    tiles = q.shape[0] * problem.nheads * padded_blocks(problem, sizes)
    return is_served and tiles >= LEAST_TILES[problem.is_causal] * sms


def plan_for(
    problem: Problem, scalars: Scalars, sizes: Sizes, q: Any, k: Any, v: Any, bias: Any, dbias: Any
) -> tuple[Plan, tuple[int, ...] | None]:
    """The plan of a call, and the shape of the dS that is summed for the gradient of the bias."""
    way = way_of(problem, bias, dbias, q, k)
    has_scale, in_heads = abs(scalars.scale) > TINY, is_in_steps(k) and is_in_steps(v)
    has_dq = not has_own_dq(problem, q, sizes=sizes)
    plan = plan_of(problem, has_scale, has_tiles(bias, q), bool(way), in_heads, has_dq)
    return plan, sums_of(q, k) if way == SUMMED else None


def columns_of_dq(problem: Problem, tile: KeyPipeline) -> int:
    """The columns of dQ's accumulator: narrow heads add no more of their padding than to 32."""
    is_narrow = max(tile.BLOCK_D, tile.BLOCK_DV) <= 128
    return used_columns(problem.headdim, tile.BLOCK_D) if is_narrow else tile.BLOCK_D


def padded_blocks(problem: Problem, sizes: Sizes) -> int:
    """Blocks of ROWS queries of a head, in which no two sequences share a block. Packed sequences
    can have as many, whatever their lengths.
    """
    if problem.is_packed:
        return padded_row.fn(sizes.seqlen_q, sizes.packed, ROWS) // ROWS
    return triton.cdiv(sizes.seqlen_q, ROWS)
