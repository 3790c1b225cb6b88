"""The tiles of a backward: how many there are, and how many heads' are mixed."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ....problem import Problem
from ....tile.schedule import even_group
from ....tile.types import Queue, Sizes
from ...common.building import num_sms
from ..launch import programs_of
from ..tile_counter import tile_counter
from . import work_tile

ROWS = work_tile.ROWS.value  # of a tile of the kernels before and after: a multiple of BLOCK_M

AT_ONCE = 16 << 20  # bytes of queries: `heads_per_l2_group`


def queue_of(problem: Problem, block_n: int, q: Any, k: Any, sizes: Sizes) -> Queue:
    """The tiles of the call; of packed sequences as many as there can be: each has a block that is
    not full, at most.
    """
    batch, seqlen_k, nheads_k, _ = k.shape
    heads, counter = batch * nheads_k, tile_counter()
    if problem.is_packed:
        n_blocks = seqlen_k // block_n + sizes.packed
        blocks = AT_ONCE // (block_n * bytes_of_row(problem, q))
        mixed = blocks if problem.is_causal and not problem.deterministic else 0
        return Queue(counter, heads * n_blocks, nheads=nheads_k, heads=heads, l2_group=mixed)
    n_blocks = triton.cdiv(seqlen_k, block_n)
    return Queue(counter, heads * n_blocks, nheads_k, heads, heads_per_l2_group(problem, q))


def queue_of_queries(problem: Problem, q: Any, tiles: int) -> Queue:
    """The tiles of queries of the call: query heads that share keys have tiles of their own."""
    heads, alone = q.shape[0] * problem.nheads, problem._replace(nheads_k=problem.nheads)
    return Queue(tile_counter(), tiles, problem.nheads, heads, heads_per_l2_group(alone, q))


def programs_beside_dq(tiles: int, keys: int, device: torch.device) -> int:
    """Programs of the main kernel where dQ is converted beside it: not one on every SM. `keys` are
    those that a query sees.

    An SM converts about three times what it does where all do at a time, so the fewest that end
    with the main kernel are best. That of few tiles a program is as long as its longest program.
    """
    sms = num_sms(device) if device.type == "cuda" else 0
    if tiles < 8 * sms or not sms:
        return programs_of(tiles, device)
    return sms - 45 * sms // (200 + keys)


def heads_per_l2_group(problem: Problem, q: Any) -> int:
    """Key heads whose tiles are mixed, evenly.

    Under a causal mask those whose queries, with dQ, take 16 MB of the L2 cache (H200, headdim 128,
    relative to FlashAttention-3, back to back, at 512, 2Ki, 4Ki and 16Ki: 0.984, 0.998, 0.997,
    1.002; with 32 MB 0.916, 0.988, 0.984, 0.995; with 8 MB 1.002, 0.973, 0.958, 1.005). Query heads
    that share keys count as one: a tile visits one after the other. With all of them, the last
    heads' long tiles would begin late, when nothing levels them out (four query heads a key head,
    4Ki, headdim 128: 1.28 times the time of equal shares, by count, and 1.02 so). Where tiles
    wait for each other as many as have 16Ki rows, at headdim 64 64Ki: neighbours of one head then
    start at different times, and what they add to is still in the L2 cache (H200, back to back, of
    the unordered backward: headdim 256 causal, 16Ki, 0.87 with one head and 0.69 with two, 4Ki,
    0.72, 0.80, 0.89 and 0.65 with 1, 2, 4 and 8; headdim 64, 4Ki, 0.83 with four and 0.95 with 16).
    """
    heads = q.shape[0] * problem.nheads_k
    rows = problem.group * q.shape[1]
    if problem.deterministic:
        most = (65536 if problem.headdim <= 64 else 16384) // rows
    elif problem.is_causal:
        most = AT_ONCE // (q.shape[1] * bytes_of_row(problem, q))
    else:
        most = 1
    return even_group(heads, most)


def bytes_of_row(problem: Problem, q: Any) -> int:
    """The bytes of a query, with its dO and its dQ in fp32."""
    return (problem.headdim + problem.headdim_v) * q.itemsize + problem.headdim * 4
