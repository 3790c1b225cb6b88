"""Evaluates a tree in torch."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from ..errors import ArgumentError
from .expressions import (
    FLOAT,
    INDICES,
    INT,
    OPERATORS,
    SCORE,
    Node,
    compute,
    describe,
    kind_of_dtype,
    takes_floats,
)
from .widths import wraps

Tensor = torch.Tensor
# What needs no care where the second operand is a positive constant.
BY_CONSTANT = {
    **{"//": operator.floordiv, "%": operator.mod},
    **{"<<": operator.lshift, ">>": operator.rshift},
}


def evaluate(
    expr: Node, b, h, q_idx, k_idx, tensors: tuple[Tensor, ...] = (), score: Tensor | None = None
) -> Tensor:
    """The value of a mask's or score function's tree (`.expr`) at given indices, in plain torch.

    Example:
        >>> import torch
        >>> from tilewise import mods
        >>> mask = mods.causal()
        >>> mods.evaluate(mask.expr, 0, 0, torch.tensor([[0], [1]]), torch.tensor([0, 1]))
        tensor([[ True, False],
                [ True,  True]])

    Args:
        expr: the tree.
        b: batch indices, an int or integer tensor; all indices broadcast against each other and
            the score.
        h: head indices.
        q_idx: query positions.
        k_idx: key positions.
        tensors: the captured tensors, `.tensors`.
        score: the scores, for the tree of a score function.

    Returns:
        A tensor, shaped as the broadcast of the indices and scores that the tree uses.
    """
    leaves = {name: _tensor(x).long() for name, x in zip(INDICES, (b, h, q_idx, k_idx))}
    dtype = torch.float32
    if score is not None:
        score = _tensor(score)
        dtype = torch.promote_types(score.dtype, dtype)
        leaves[SCORE] = score.to(dtype)

    def value_of(node: Node, operands: list[Tensor]) -> Tensor:
        if node.op not in OPERATORS:
            return _leaf(node, operands, leaves=leaves, tensors=tensors, dtype=dtype)
        if takes_floats(node):
            pairs = zip(operands, node.inputs)
            operands = [x.to(dtype) if part.kind == INT else x for x, part in pairs]
        return _compute_of(node)(*operands)

    return compute(expr, value_of)


def _tensor(x) -> Tensor:
    """A tensor as it is, a number as one that goes with those of any device."""
    return x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")


def _compute_of(node: Node) -> Callable[..., Tensor]:
    if node.op in BY_CONSTANT:
        second = node.inputs[1]
        if second.op == INT and second.value > 0:
            return BY_CONSTANT[node.op]
    return OPERATORS[node.op].compute


def _leaf(node: Node, index: list, leaves: dict[str, Tensor], tensors, dtype) -> Tensor:
    if node.op in leaves:
        return leaves[node.op]
    if node.op == "load":
        values = load(tensors[node.value[0]], node, index)
        return values.to(dtype) if node.kind == FLOAT else values
    kind = dtype if node.op == FLOAT else None
    return torch.full((), node.value, dtype=kind, device=leaves["q_idx"].device)


def load(x: Tensor, node: Node, index: list) -> Tensor:
    """The elements that a load reads of a captured tensor; integers come as int64."""
    if x.dtype in (torch.uint16, torch.uint32):  # which torch does not index on every device
        x = x.to(torch.int64)
    index = [torch.full((), i, device=x.device) if isinstance(i, int) else i for i in index]
    indices = within(x, node, [i.to(x.device) for i in index])
    try:  # Not x[...]: under vmap that asks for the value of an index
        values = torch.ops.aten.index.Tensor(x, indices) if indices else x
    except IndexError as error:
        raise ArgumentError(
            f"{describe(node)} of a captured tensor of shape {tuple(x.shape)}: {error}; keep "
            "computed indices in it, with torch.clamp or %"
        ) from error
    return values.to(torch.int64) if kind_of_dtype(x.dtype) == INT else values


def within(x: Tensor, node: Node, index: list[Tensor]) -> list[Tensor]:
    """The indices of a load of a tensor, which count from the end where they are negative and
    `wraps` says so. Computed ones past either end are left for torch to refuse on a CPU; elsewhere
    they are held there, as in kernels.
    """
    indices = []
    for i, n, part, may_wrap in zip(index, x.shape, node.inputs, wraps(node)):
        if part.op in INDICES or part.op == INT:
            indices.append(i.clamp(0, n - 1))
        elif i.is_cpu:
            indices.append(i if may_wrap else i.clamp(min=0))
        else:
            indices.append((torch.where(i < 0, i + n, i) if may_wrap else i).clamp(0, n - 1))
    return indices
