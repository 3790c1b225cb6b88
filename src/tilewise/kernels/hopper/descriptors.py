"""TMA descriptors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ...tile.types import Features, Strided
from ..common.arguments import strided
from .padded import UNIT

Tensor = torch.Tensor
BILLION = 2**30  # rows that a ragged descriptor has
MAX_ROWS = 0x7FFF0000  # of a dimension whose coordinates are not checked
OF_QUERIES = "stats_desc", "bias_desc", "dbias_desc"
GL_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class DescriptorFields(NamedTuple):
    """A TensorDescriptor's fields, without its checks, which take as long as the launch."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # Triton 3.8 and later ask


class Plan(NamedTuple):
    """What a `Problem` selects: a kernel's constants, and the arguments `block` and `layout` of its
    descriptors, by operand.
    """

    features: Features
    tile: Any
    blocks: dict[str, dict[str, Any]]


def block_of(headdim: int) -> int:
    """The columns of a tile of so many."""
    return max(64, triton.next_power_of_2(headdim))


def in_shared(dtypes: Mapping[str, Any], blocks: Mapping[str, list[int]]) -> dict[str, dict]:
    """Blocks of descriptors with their layouts in shared memory, of elements of these types."""
    layout_of = gl.NVMMASharedLayout.get_default_for
    return {
        name: dict(block=block, layout=layout_of(block, dtypes[name]))
        for name, block in blocks.items()
    }


def by_head(x: Tensor, block: list[int], layout: Any) -> DescriptorFields:
    """A (batch, rows, nheads, columns) tensor as (batch, nheads, rows, columns)."""
    batch, rows, heads, columns = x.shape
    by_batch, by_row, by_head, _ = x.stride()
    shape = [batch, heads, rows]
    strides = valid(shape, [by_batch, by_head, by_row])
    return DescriptorFields(x, [*shape, columns], [*strides, 1], block, layout)


def of_queries(x: Tensor, block: list[int], layout: Any, group: int) -> DescriptorFields:
    """A (batch, rows, nheads, columns) tensor as (batch, nheads_k, rows, group, columns), with the
    query heads of a key head as a dimension of their own.
    """
    batch, rows, heads, columns = x.shape
    by_batch, by_row, by_head, _ = x.stride()
    shape = [batch, heads // group, rows, group]
    strides = valid(shape, [by_batch, by_head * group, by_row, by_head])
    return DescriptorFields(x, [*shape, columns], [*strides, 1], block, layout)


def ragged_by_head(x: Tensor, block: list[int], layout: Any) -> DescriptorFields:
    """A (batch, rows, nheads, columns) tensor of sequences that end anywhere, as (1, 1, nheads,
    rows, columns), for the coordinates of fwd/varlen.py. Batches follow each other as more heads.

    TMA cuts a block at the end of a tensor. The two dimensions before move what it copies so that a
    sequence ends there. Their strides are -1 and 1 rows. As no stride may be negative, the first is
    2^34 elements minus a row, and is taken 2^30 times: the 2^64 elements vanish, as addresses have
    64 bits. Triton does the same in `triton.tools.ragged_tma`.
    """
    batch, _, heads, columns = x.shape
    by_row, by_head, heads_per_batch = ragged_steps(x)
    shape = [MAX_ROWS, MAX_ROWS, (batch - 1) * heads_per_batch + heads, BILLION, columns]
    return DescriptorFields(x, shape, [2**34 - by_row, by_row, by_head, by_row, 1], block, layout)


def ragged_steps(x: Tensor) -> tuple[int, int, int]:
    """Elements from a row, and from a head, to the next, and heads from a batch to the next."""
    batch, rows, heads, _ = x.shape
    by_batch, by_row, by_head = valid([batch, rows, heads], [*x.stride()[:3]])
    if heads == 1:
        by_head = by_batch
    return by_row, by_head, by_batch // by_head if batch > 1 else 0


def flat(x: Any) -> Tensor:
    """A view of the memory as one head, whose rows hold all heads."""
    batch, rows, heads, columns = x.shape
    shape = batch, rows, 1, (heads - 1) * x.stride(2) + columns
    return x.as_strided(shape, (*x.stride()[:2], UNIT, 1))


def is_in_steps(x: Tensor) -> bool:
    """Whether its batches are a whole number of heads apart, as `ragged_by_head` needs them."""
    batch, _, heads, _ = x.shape
    by_batch, _, by_head, _ = x.stride()
    return batch == 1 or heads == 1 or (by_head > 0 and by_batch % by_head == 0)


def descriptors(
    problem: Problem,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
) -> tuple[DescriptorFields | Strided | None, ...]:
    """q and out as (batch, head_k, row, member of the group, headdim), k and v without members.

    Rows past the end of a sequence read as zeros and are not written, and so are columns past the
    head dim, up to the block's. Where sequences end inside the tensor, k, v and out are ragged. Not
    q: what follows in its tile are rows of scores that are never written.

    Out is none where its rows are no whole number of 16 bytes.
    """
    blocks, is_copied = plan.blocks, plan.tile.BIAS_COPIED and bias is not None
    of_keys = ragged_by_head if is_ragged(problem) else by_head
    queries = functools.partial(of_queries, group=problem.group)
    of_out = ragged_by_head if problem.is_packed else queries
    is_whole = problem.headdim_v % UNIT == 0
    return (
        queries(q, **blocks["q"]),
        of_keys(k, **blocks["k"]),
        of_keys(flat(v) if plan.tile.V_FLAT else v, **blocks["v"]),
        of_out(out, **blocks["out"]) if is_whole else strided(out),
        by_head(bias.transpose(1, 2), **blocks["bias"]) if is_copied else None,
    )


def of_backward(plan: Plan, tensors: Mapping[str, Any]) -> dict[str, DescriptorFields]:
    """Tensors of the backward, by the names of its plan's blocks, of which ragged ones have a
    dimension more. Of each query or pair, (batch, nheads, rows, columns), are OF_QUERIES.
    """
    described = {}
    for name, x in tensors.items():
        of_rows = ragged_by_head if len(plan.blocks[name]["block"]) == 5 else by_head
        x = x.transpose(1, 2) if name in OF_QUERIES else x
        described[name] = of_rows(x, **plan.blocks[name])
    return described


def is_ragged(problem: Problem) -> bool:
    """Whether rows past a sequence's end may lie inside the tensor."""
    return problem.is_packed or problem.has_seqused_k


def valid(shape: list[int], strides: list[int]) -> list[int]:
    """Between elements of which there is one, any stride; TMA needs a multiple of 8."""
    return [stride if size > 1 else 16 for size, stride in zip(shape, strides)]


def checked(args: tuple) -> tuple:
    """The arguments as Triton's front end takes them."""
    return tuple(TensorDescriptor(*x[:6]) if isinstance(x, DescriptorFields) else x for x in args)
