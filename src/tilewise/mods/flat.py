"""Modifiers of scores as they cross torch.library: names of trees (`Mods`) and a flat list of
tensors (`Extras.captured`). `flatten` makes them of masks and score functions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..problem import NO_MODS, Extras, Mods
from .block_checks import BlockLists, check_block, check_form
from .expressions import INDICES, INT, MAX_SIZES, Node, lookup, nodes_of, slots_of

Tensor = torch.Tensor
Sides = tuple[BlockLists, BlockLists]  # of n_blocks per m_block, and the transpose
BLOCK_TENSORS = 8  # of a block mask: counts and indices, partial and full, by queries and by keys


class FlatMods(NamedTuple):
    """What modifies scores, as `Problem` and `Extras` carry it."""

    mods: Mods = NO_MODS
    captured: tuple[Tensor, ...] = ()


NO_MODIFIERS = FlatMods()


class Parts(NamedTuple):
    """`Extras.captured`, taken apart again."""

    partial: Sides | None
    full: Sides | None
    mask: tuple[Tensor, ...]
    score: tuple[Tensor, ...]


def check_lengths(sizes: dict[str, int]) -> None:
    """Kernels count indices in 32 bits, their sums and differences too."""
    for index, size in sizes.items():
        if isinstance(size, int) and size > MAX_SIZES[index]:
            raise NotImplementedError(
                f"masks and score functions support {index} up to {MAX_SIZES[index]}, and it is "
                f"{size}: pass causal and window as arguments, or cut the call into parts and "
                "join them with tilewise.merge_states"
            )


class Load(NamedTuple):
    """The requirements of a tree's load on its tensor."""

    slot: int
    dtype: torch.dtype
    indices: tuple[int | str | None, ...]  # constants, INDICES as they are, None for all others


@functools.lru_cache(maxsize=1024)
def loads_of(name: str) -> tuple[Load, ...]:
    """The loads of the tree of a name."""
    nodes = nodes_of(lookup(name)) if name else []
    loads = [(*x.value, x.inputs) for x in nodes if x.op == "load"]
    return tuple(Load(slot, dtype, tuple(map(_index, inputs))) for slot, dtype, inputs in loads)


def _index(node: Node) -> int | str | None:
    return node.value if node.op == INT else node.op if node.op in INDICES else None


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
    functions, of_mask = captured, count_tensors(names.mask)
    if names.block != NO_MODS.block:
        _check_blocks(names, captured, sizes=sizes)
        functions = captured[BLOCK_TENSORS:]
    if bool(names.score) != bool(names.derivative):
        raise ArgumentError("a score_mod and its score_derivative go together: pass both, or none")
    for argument, name, tensors in (
        ("mask_mod", names.mask, functions[:of_mask]),
        ("score_mod", names.score, functions[of_mask:]),
        ("score_derivative", names.derivative, functions[of_mask:]),
    ):
        for load in loads_of(name):
            _check_load(argument, load, tensors=tensors, sizes=sizes)


def _check_load(name: str, load: Load, tensors: tuple[Tensor, ...], sizes: dict[str, int]) -> None:
    slot, dtype, indices = load
    if slot >= len(tensors):
        raise ArgumentError(
            f"{name} reads captured tensor {slot}, and {len(tensors)} are passed for it: pass all"
        )
    x = tensors[slot]
    if x.dtype != dtype or x.ndim != len(indices):
        raise ArgumentError(
            f"{name} reads captured tensor {slot} as {dtype} by {len(indices)} indices, and it is "
            f"{x.dtype} of shape {tuple(x.shape)}: pass the tensor that it was made with"
        )
    for dim, (index, n) in enumerate(zip(indices, x.shape)):
        if not isinstance(n, int):
            fits = True  # a compiler's symbol: kernels are given numbers, which are checked
        elif index is None:
            fits = n > 0
        elif isinstance(index, int):
            fits = 0 <= index < n
        else:  # lengths that a compiler made symbols were compared when the mask was made
            fits = n > 0 and not (isinstance(sizes[index], int) and sizes[index] > n)
        if not fits:
            raise ArgumentError(
                f"{name} reads captured tensor {slot} of shape {tuple(x.shape)} at "
                f"{'an index' if index is None else index}, of which there are "
                f"{sizes.get(str(index), 1)}: dimension {dim} is too short"
            )


def _check_blocks(names: Mods, captured: tuple[Tensor, ...], sizes: dict[str, int]) -> None:
    """Checks the lists' block and shapes; kernels hold their values within the sequence."""
    check_block(names.block)
    if len(captured) < BLOCK_TENSORS:
        raise ArgumentError(
            f"mask_block={names.block} and {len(captured)} captured tensors: a block mask has "
            f"{BLOCK_TENSORS}, of BlockMask.partial, full and transposed"
        )
    blocks = [-(-sizes[axis] // size) for axis, size in zip(("q_idx", "k_idx"), names.block)]
    for name, by_queries_and_keys in zip(("partial", "full"), _lists_in(captured)):
        for lists, n, axis in zip(by_queries_and_keys, blocks, ("by queries", "by keys")):
            shape = tuple(lists.counts.shape)
            rows = (*(x if x == 1 else sizes[y] for x, y in zip(shape, "bh")), n)
            if not all(isinstance(x, int) for x in (*shape, *rows)):
                rows = shape  # a compiler's symbols were compared when the mask was made
            check_form(f"{name}, {axis},", lists, rows=rows)


def take_apart(names: Mods, captured: tuple[Tensor, ...]) -> Parts:
    """Splits the captured tensors by the function that captured them."""
    partial = full = None
    if names.block != (0, 0):
        partial, full = _lists_in(captured)
        captured = captured[BLOCK_TENSORS:]
    of_mask = count_tensors(names.mask)
    return Parts(partial, full, mask=captured[:of_mask], score=captured[of_mask:])


def _lists_in(captured: tuple[Tensor, ...]) -> tuple[Sides, Sides]:
    """The lists that come first, partial and full."""
    blocks = captured[:BLOCK_TENSORS]
    lists = [BlockLists(counts, indices) for counts, indices in zip(blocks[::2], blocks[1::2])]
    return (lists[0], lists[2]), (lists[1], lists[3])


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
