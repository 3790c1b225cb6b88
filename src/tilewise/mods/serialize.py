"""Trees as text: what crosses torch.library, and so is written into compiled and exported programs.

A text is JSON, a list of [op, numbers of earlier steps, value], the whole tree last. A loaded
program brings its texts, and kernels are generated from them: text that `serialize` could not have
written is refused, here, and where the tensors are, by `mods.flat.check_captured`.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from ..errors import ArgumentError
from .compilers import gives_constant
from .expressions import (
    BOOL,
    DTYPES,
    FLOAT,
    INT,
    SCORE,
    TABLE_SIZE,
    Node,
    intern,
    is_float_constant,
    kind_of_step,
    lookup,
    nodes_of,
    rows_of,
    touch,
    undefined,
)

MASK, SCORE_FUNCTION = "mask", "score function"
MAX_STEPS = 4096  # a derivative has a few for each step of its function
MAX_SLOTS = 1024
MAX_LETTERS = 64 * MAX_STEPS
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
CONSTANTS = {
    BOOL: lambda value: type(value) is bool,
    INT: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    FLOAT: is_float_constant,
}


@gives_constant  # a compiler takes no locks
def serialize(name: str) -> str:
    """A named tree in words that any process understands. "" of ""."""
    return _text(name)


@functools.lru_cache(maxsize=TABLE_SIZE)
def _text(name: str) -> str:
    plan = []
    for op, inputs, value in rows_of(lookup(name)) if name else ():
        if op == "load":
            value = value[0], str(value[1]).removeprefix("torch.")
        plan.append((op, inputs, value))
    return json.dumps(plan) if plan else ""


def deserialize(text: str, what: str) -> str:
    """Registers the tree of a text and returns its name. `what` is MASK or SCORE_FUNCTION."""
    if not text:
        return ""
    name, expr = _told(text, what)
    touch(name, expr)
    return name


@functools.lru_cache(maxsize=TABLE_SIZE)
def _told(text: str, what: str) -> tuple[str, Node]:
    expr = tree_of_text(text, what)
    return intern(expr), expr


def tree_of_text(text: str, what: str) -> Node:
    """The tree of a text, or an ArgumentError."""
    try:
        nodes = _nodes_of_text(text)
        _check_result(nodes, what)
    except _Wrong as error:
        raise ArgumentError(
            f"the text of a {what} is not one that tilewise writes ({error}): export or compile "
            "the program again"
        ) from None
    return nodes[-1]


def check_tree(expr: Node) -> None:
    """Checks that every step is one that a text may have; else an ArgumentError. No tree becomes
    the source of a kernel without this check.
    """
    try:
        for number, node in enumerate(nodes_of(expr)):
            _check_step(number, node.op, operands=node.inputs, value=node.value)
    except _Wrong as error:
        raise ArgumentError(f"no kernel is made of this tree: {error}") from None


class _Wrong(Exception):
    """What is wrong with a text."""


def _nodes_of_text(text: str) -> list[Node]:
    if len(text) > MAX_LETTERS:
        raise _Wrong(f"{len(text)} letters, over {MAX_LETTERS}")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"no JSON, {type(error).__name__}") from None
    if not isinstance(rows, list) or not rows:
        raise _Wrong("no list of steps")
    nodes: list[Node] = []
    for number, step in enumerate(rows):
        if not isinstance(step, list) or len(step) != 3 or not isinstance(step[1], list):
            raise _Wrong(f"step {number} is no [op, inputs, value]")
        op, inputs, value = step
        if op == "load":
            value = _read_of_told(value, number)
        if not all(_is_below(i, number) for i in inputs):
            raise _Wrong(f"an input of step {number} is no earlier step")
        operands = tuple(nodes[i] for i in inputs)
        _check_step(number, op, operands=operands, value=value)
        nodes.append(Node(op, operands, value))
    return nodes


def _read_of_told(value: Any, number: int) -> tuple[Any, torch.dtype]:
    """The slot and the dtype of a load, which is told by its name."""
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not isinstance(value[1], str) or value[1] not in NAMES:
        raise _Wrong(f"step {number} loads from no [slot, dtype]")
    return value[0], NAMES[value[1]]


def _check_step(number: int, op: Any, operands: tuple[Node, ...], value: Any) -> None:
    """Whether a tree may have a step, which comes after `number` others."""
    name = f"step {number}"
    if number == MAX_STEPS:
        raise _Wrong(f"over {MAX_STEPS} steps")
    if op == "load":
        if not _is_below(value[0], MAX_SLOTS) or value[1] not in DTYPES:
            raise _Wrong(f"{name} loads from no captured tensor")
    elif type(op) is str and op in CONSTANTS:
        if not CONSTANTS[op](value):
            raise _Wrong(f"the value of {name} is not {op}")
    elif value is not None:
        raise _Wrong(f"{name} has a value and is neither constant nor load")
    kind = kind_of_step(op, value, kinds=[x.kind for x in operands]) if type(op) is str else ""
    if not kind:
        raise _Wrong(f"{name} is no operator of its operands")
    if wrong := undefined(op, operands):
        raise _Wrong(f"{name} {wrong}")


def _is_below(value: Any, stop: int) -> bool:
    return type(value) is int and 0 <= value < stop


def _check_result(nodes: list[Node], what: str) -> None:
    kind = BOOL if what == MASK else FLOAT
    if nodes[-1].kind != kind:
        raise _Wrong(f"it gives {nodes[-1].kind}, not {kind}")
    if what == MASK and any(node.op == SCORE for node in nodes):
        raise _Wrong("a mask knows no score")
