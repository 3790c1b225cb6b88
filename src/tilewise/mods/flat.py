"""Modifiers of scores as they cross torch.library: names of trees (`Mods`) and a flat list of
tensors (`Extras.captured`). `flatten` makes them of masks and score functions.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..problem import NO_MODS, Extras, Mods
from .block_checks import BlockLists, check_block, check_form
from .expressions import INDICES, INT, MAX_SIZES, Node, loads_of, lookup, nodes_of, slots_of

Tensor = torch.Tensor
BLOCK_TENSORS = 8  # of a block mask: counts and indices, partial and full, by queries and by keys


class FlatMods(NamedTuple):
    """What modifies scores, as `Problem` and `Extras` carry it."""

    mods: Mods = NO_MODS
    captured: tuple[Tensor, ...] = ()


NO_MODIFIERS = FlatMods()


def check_lengths(sizes: dict[str, int]) -> None:
    """Kernels count indices in 32 bits, their sums and differences too."""
    for index, size in sizes.items():
        if isinstance(size, int) and size > MAX_SIZES[index]:
            raise NotImplementedError(
                f"masks and score functions support {index} up to {MAX_SIZES[index]}, and it is "
                f"{size}: pass causal and window as arguments, or cut the call into parts and "
                "join them with tilewise.merge_states"
            )


@functools.lru_cache(maxsize=1024)
def loads_in(name: str) -> list[Node]:
    """The loads of the tree of a name."""
    return loads_of(lookup(name)) if name else []


def check_captured(names: Mods, q: Tensor, k: Tensor, extras: Extras) -> None:
    """Checks that an operator has the tensors that its functions read: a saved program may have
    been changed, and kernels do not check again.
    """
    if names == NO_MODS:
        return
    captured, cu_seqlens = extras.captured, extras.cu_seqlens_q
    sizes = {"b": q.shape[0], "h": q.shape[2], "q_idx": q.shape[1], "k_idx": k.shape[1]}
    if cu_seqlens is not None:
        sizes |= {"b": cu_seqlens.shape[0] - 1, "q_idx": 0, "k_idx": 0}
    check_lengths(sizes)
    if names.block != NO_MODS.block:
        _check_blocks(names, captured, sizes=sizes)
    of_score = captured_by_score(names, captured)
    if bool(names.score) != bool(names.derivative):
        raise ArgumentError("a score_mod and its score_derivative go together: pass both, or none")
    for argument, name, tensors in (
        ("mask_mod", names.mask, captured_by_mask(names, captured)),
        ("score_mod", names.score, of_score),
        ("score_derivative", names.derivative, of_score),
    ):
        for load in loads_in(name):
            _check_load(argument, load, tensors=tensors, sizes=sizes)


def _check_load(name: str, load: Node, tensors: tuple[Tensor, ...], sizes: dict[str, int]) -> None:
    slot, dtype = load.value
    if slot >= len(tensors):
        raise ArgumentError(
            f"{name} reads captured tensor {slot}, and {len(tensors)} are passed for it: pass all"
        )
    x = tensors[slot]
    if x.dtype != dtype or x.ndim != len(load.inputs):
        raise ArgumentError(
            f"{name} reads captured tensor {slot} as {dtype} by {len(load.inputs)} indices, and it "
            f"is {x.dtype} of shape {tuple(x.shape)}: pass the tensor that it was made with"
        )
    for dim, (index, n) in enumerate(zip(load.inputs, x.shape)):
        is_plain = index.op in INDICES
        if not isinstance(n, int):
            fits = True  # a compiler's symbol: kernels are given numbers, which are checked
        elif index.op == INT:
            fits = 0 <= index.value < n
        else:  # lengths that a compiler made symbols were compared when the mask was made
            size = sizes[index.op] if is_plain else 0
            fits = n > 0 and not (isinstance(size, int) and size > n)
        if not fits:
            place = index.op if is_plain else index.value if index.op == INT else "an index"
            raise ArgumentError(
                f"{name} reads captured tensor {slot} of shape {tuple(x.shape)} at {place}, of "
                f"which there are {sizes.get(index.op, 1)}: dimension {dim} is too short"
            )


def _check_blocks(names: Mods, captured: tuple[Tensor, ...], sizes: dict[str, int]) -> None:
    """Checks the lists' block and shapes; kernels hold their values within the sequence."""
    check_block(names.block)
    if len(captured) < BLOCK_TENSORS:
        raise ArgumentError(
            f"mask_block={names.block} and {len(captured)} captured tensors: a block mask has "
            f"{BLOCK_TENSORS}, of BlockMask.partial, full and transposed"
        )
    m_blocks, n_blocks = (-(-sizes[i] // size) for i, size in zip(("q_idx", "k_idx"), names.block))
    names_of_lists = itertools.product(("by queries", "by keys"), ("partial", "full"))
    for lists, (axis, name) in zip(block_lists(names, captured), names_of_lists):
        shape = tuple(lists.counts.shape)
        blocks = m_blocks if axis == "by queries" else n_blocks
        rows = (*(x if x == 1 else sizes[y] for x, y in zip(shape, "bh")), blocks)
        if not all(isinstance(x, int) for x in (*shape, *rows)):
            rows = shape  # a compiler's symbols were compared when the mask was made
        check_form(f"{name}, {axis},", lists, rows=rows)


def block_lists(names: Mods, captured: tuple[Tensor, ...]) -> list[BlockLists]:
    """The lists of a block mask in the order of `BlockMask.lists`; none without one."""
    blocks = captured[: _start(names)]
    return [BlockLists(counts, indices) for counts, indices in zip(blocks[::2], blocks[1::2])]


def captured_by_mask(names: Mods, captured: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of `Extras.captured` that the mask function reads."""
    start = _start(names)
    return captured[start : start + count_tensors(names.mask)]


def captured_by_score(names: Mods, captured: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of `Extras.captured` that the score function reads."""
    return captured[_start(names) + count_tensors(names.mask) :]


def _start(names: Mods) -> int:
    """Where the functions' tensors begin, behind a block mask's lists."""
    return 0 if names.block == NO_MODS.block else BLOCK_TENSORS


@functools.lru_cache(maxsize=1024)
def count_tensors(name: str) -> int:
    """How many tensors the tree of a name reads."""
    return slots_of(lookup(name)) if name else 0


@functools.lru_cache(maxsize=1024)
def indices_used(names: Mods) -> frozenset[str]:
    """What the trees are made of, "b" and "h" among it where they tell rows or heads apart."""
    return frozenset(node.op for name in names[:3] if name for node in nodes_of(lookup(name)))


@functools.lru_cache(maxsize=1024)
def loads_per_pair(names: Mods) -> bool:
    """Whether a mask or score function reads a number of its own for each pair."""
    nodes = (node for name in names[:3] if name for node in nodes_of(lookup(name)))
    indices = ({x.op for x in nodes_of(load)} for load in nodes if load.op == "load")
    return any({"q_idx", "k_idx"} <= ops for ops in indices)
