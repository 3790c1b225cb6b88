"""Few queries and many keys without a KV cache: a decode step by `scaled_dot_product_attention` or
`flash_attn_func`.

A program for each block of queries would leave most of a GPU's SMs idle, and reads keys once for
each query head. So such a call takes the split-KV kernels (decode.py), which divide the keys into
pieces and read them once for all query heads of a key head. One sequence of 32 query heads on an
H200 (training kernels over these, in a CUDA graph): 8 key heads, a query, 1.2 with 512 keys, 2.2
with 2Ki, 6.8 with 8Ki; 32 key heads 1.3, 2.2, 2.1. Of 64 rows 0.4, 1.0 and 1.2 to 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...problem import NO_MODS, Extras, Problem, Scalars
from ...tile.split_kv import default_split_size
from ..common.cached import Cached
from ..common.program import Program
from ..common.results import FORWARD, forward_of, names_with, outputs_of
from ..common.workspace import Workspace
from .decode_launch import launches_of

Tensor = torch.Tensor
MAX_TILE_ROWS = 16  # queries times query heads of a key head: one tile
LEAST_KEYS = 512


def serves(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether a call has few queries and many keys, and nothing that those kernels lack."""
    has_band = problem.has_left or problem.has_right
    lacks = problem.is_packed or problem.has_seqused_q or problem.has_bias or problem.has_dropout
    if lacks or problem.mods != NO_MODS or (has_band and problem.align == "top_left"):
        return False
    if problem.dtype.itemsize != 2 or max(problem.headdim, problem.headdim_v) > 256:
        return False
    return 0 < q.shape[1] * problem.group <= MAX_TILE_ROWS and k.shape[1] >= LEAST_KEYS


def prepare(problem: Problem, scalars: Scalars) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of all calls of one signature."""
    return forward_of(functools.partial(program_of, problem, scalars))


def program_of(
    problem: Problem, scalars: Scalars, q: Any, k: Any, v: Any, **tensors: Any
) -> Program:
    """The launches of a decode step without pages, of operands."""
    extras, work = Extras(**tensors), Workspace(q.device)
    cached = Cached(q, k, v, None, extras, scalars, default_split_size(problem.group))
    out, lse = outputs_of(problem, q)
    shown = problem._replace(align="bottom_right")  # the same, as there is no band otherwise
    launches = launches_of(cached, shown, out, lse, work)
    return Program(names_with(FORWARD, extras), launches, work, (out, lse))
