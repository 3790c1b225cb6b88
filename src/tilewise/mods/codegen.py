"""Masks and score functions for kernels: a tree becomes the source of a Triton function.

    mask_mod(b, h, q_idx, k_idx, captured)           bools
    score_mod(score, b, h, q_idx, k_idx, captured)   fp32, and so its derivative

`q_idx` and `k_idx` broadcast over the tile, whichever of its sides is which, and so does what is
returned: it has the shape of what the tree mentions, which may be one number. `captured` is what
`captured_of` made of the captured tensors. A function is a constant of the kernel, alone or in a
NamedTuple, and called as any other: FEATURES.MASK_MOD(b, h, q_idx, k_idx, captured).

A function's name holds the hash of its text, because Triton knows a constant within a NamedTuple by
its repr alone, which is that name, when it looks for a kernel on disk.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import weakref
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..tile.elementary import expm1, log1p, power, whole
from ..tile.score import tanh
from .expressions import (
    BOOL,
    DIVISIONS,
    FLOAT,
    INDICES,
    INT,
    OPERATORS,
    SCORE,
    SHIFTS,
    TABLE_SIZE,
    Node,
    constant_text,
    lookup,
    nodes_of,
    takes_floats,
)
from .serialize import check_tree
from .widths import BITS_32, BITS_64, Range, long_nodes, ranges_of, wraps

Tensor = torch.Tensor
CONSTANTS = (BOOL, INT, FLOAT)
LEAVES = (*INDICES, SCORE, *CONSTANTS)
TYPES = {BOOL: "tl.int1", INT: "tl.int32", FLOAT: "tl.float32"}
INT64 = "tl.int64"
CALLED = (tanh, expm1, log1p, power, whole)  # by generated functions
SMALLEST = torch.finfo(torch.float32).tiny  # of floats that Triton takes for fp32


class Captured(NamedTuple):
    """A tensor that a function captured, as kernels take it."""

    ptr: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def captured_of(tensors: tuple[Tensor, ...]) -> tuple[Captured, ...]:
    """The captured tensors as generated functions read them."""
    return tuple(Captured(x, tuple(x.shape), strides=x.stride()) for x in tensors)


@functools.lru_cache(maxsize=TABLE_SIZE)
def function_of(key: str) -> JITFunction:
    """The function of an interned tree; one key gives one object, which nothing compiles twice."""
    expr = lookup(key)
    return _jit("mask_mod" if key.startswith("mask") else "score_mod", source_of(expr))


@functools.lru_cache(maxsize=TABLE_SIZE)
def place_function_of(key: str) -> JITFunction:
    """The function (b, h, q_idx, k_idx, captured, target) of an interned load, which says how far
    into `target` the element lies, a tensor of the captured one's sizes. It is always within.
    """
    return _jit("place", source_of_place(lookup(key)))


def _jit(name: str, text: str) -> JITFunction:
    """`name(...)` from its text, which starts at the bracket."""
    digest = hashlib.sha256((text + _sources()).encode()).hexdigest()[:24]
    name = f"{name}_{digest}"
    text, file = f"def {name}{text}", f"<tilewise {name}>"
    scope = {"__name__": __name__, "tl": tl} | {called.fn.__name__: called for called in CALLED}
    # Triton and debuggers read the source through inspect, which reads linecache
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), scope)
    weakref.finalize(scope[name], linecache.cache.pop, file, None)
    return triton.jit(scope[name])


@functools.cache
def _sources() -> str:
    return "".join(inspect.getsource(called.fn) for called in CALLED)


def source_of(expr: Node) -> str:
    """The function's text after its name: a line for each distinct node, in the tree's order."""
    check_tree(expr)
    lines = _Lines(nodes_of(expr))
    score = "" if expr.kind == BOOL else "score, "
    body = [*lines.text, f"return tl.cast({lines.values[expr]}, {TYPES[expr.kind]})"]
    return "".join([f"({score}{', '.join(INDICES)}, captured):\n", *(f"    {x}\n" for x in body)])


def source_of_place(load: Node) -> str:
    """The text of `place`, after its name."""
    check_tree(load)
    lines = _Lines(nodes_of(load)[:-1])
    terms = [f"{index} * target.strides[{d}]" for d, index in enumerate(lines.held(load, "target"))]
    body = [*lines.text, f"return {' + '.join(terms) or 'tl.cast(0, tl.int64)'}"]
    head = f"({', '.join(INDICES)}, captured, target):\n"
    return "".join([head, *(f"    {x}\n" for x in body)])


class _Lines:
    """The lines that compute nodes, and the name or constant that each one's value goes by."""

    def __init__(self, nodes: list[Node]):
        self.ranges = ranges_of(nodes)
        self.long = long_nodes(nodes, self.ranges)
        self.text: list[str] = []
        self.values: dict[Node, str] = {}
        for node in nodes:
            self.values[node] = self._value(node)

    def _assign(self, name: str, text: str) -> str:
        self.text.append(f"{name} = {text}")
        return name

    def _value(self, node: Node) -> str:
        if node.op in CONSTANTS:
            return self._constant(node)
        if node.op in LEAVES:
            return node.op
        name = f"v{len(self.text)}"
        if node.op == "load":
            return self._assign(name, self._load(node))
        operands = self._operands(node)
        if node.op in DIVISIONS:
            return self._assign(name, self._divided(node, operands))
        if node.op in SHIFTS:
            return self._assign(name, self._shifted(node, operands))
        if node.op == "abs" and node in self.long and node.inputs[0] not in self.long:
            # LLVM would take it of the 32 bits, and ptxas that of -2^31 for positive: of 33 bits
            return self._assign(name, f"tl.abs({operands[0]} * 2) >> 1")
        return self._assign(name, OPERATORS[node.op].written(operands))

    def _constant(self, node: Node) -> str:
        """A number; one that Triton would not take for 32 bits with its type."""
        text = constant_text(node.value)
        if node in self.long:
            return f"tl.cast({text}, {INT64})"
        is_tiny = node.op == FLOAT and 0 < abs(node.value) < SMALLEST
        return f"tl.cast({text}, {TYPES[FLOAT]})" if is_tiny else text

    def _operands(self, node: Node) -> list[str]:
        """The operands of an operator: integers as floats where it takes these, and one of those
        that are to give 64 bits in these.
        """
        inputs, as_floats = node.inputs, takes_floats(node)
        operands = [self.values[x] for x in inputs]
        for position, x in enumerate(inputs):
            if as_floats and x.op == INT:
                operands[position] = constant_text(float(x.value))
            elif as_floats and x.kind == INT:
                operands[position] = f"tl.cast({operands[position]}, tl.float32)"
        if all(x.op in CONSTANTS for x in inputs):
            # Else Python computes, and its ~True is -2
            kind = FLOAT if as_floats and inputs[0].op != BOOL else inputs[0].op
            if kind != INT or inputs[0] not in self.long:
                operands[0] = f"tl.cast({operands[0]}, {TYPES[kind]})"
        is_widened = node in self.long and not any(x in self.long for x in inputs)
        if is_widened and not as_floats:
            position = next(position for position, x in enumerate(inputs) if x.kind == INT)
            operands[position] = f"tl.cast({operands[position]}, {INT64})"
        return operands

    def _bounds(self, node: Node) -> tuple[Range, Range]:
        """The ranges of two integers."""
        x, y = (self.ranges[operand] for operand in node.inputs)
        return x, y

    def _divided(self, node: Node, operands: list[str]) -> str:
        """`//` or `%`, as `tilewise.mods.integers` has them: Triton rounds towards zero, and leaves
        open what is divided by 0, or the least integer by -1.
        """
        (x, d), (of_x, of_d) = operands, self._bounds(node)
        bits = BITS_64 if node in self.long else BITS_32
        special = {0: "0" if node.op == "//" else x} if of_d.has(0) else {}
        if of_d.has(-1) and of_x.has(bits.lo):
            special[-1] = f"-{x}" if node.op == "//" else "0"
        if not special:
            return self._rounded_down(node, x, d)
        divisor = self._assign(f"d{len(self.text)}", f"tl.cast({d}, {self._type(node)})")
        matches = [f"({divisor} == {value})" for value in special]
        safe = self._assign(f"s{len(self.text)}", f"tl.where({' | '.join(matches)}, 1, {divisor})")
        quotient = self._rounded_down(node, x, safe)
        for is_match, text in zip(matches, special.values()):
            quotient = f"tl.where({is_match}, {text}, {quotient})"
        return quotient

    def _shifted(self, node: Node, operands: list[str]) -> str:
        """`<<` or `>>`; past the last bit, what moves every bit out gives."""
        last = 63 if node in self.long else 31
        if self.ranges[node.inputs[1]].fits(Range(0, last)):
            return OPERATORS[node.op].written(operands)
        x, y = operands
        is_far = f"({y} < 0) | ({y} > {last})"
        if node.op == ">>":
            return f"({x} >> tl.where({is_far}, {last}, {y}))"
        return f"tl.where({is_far}, 0, {x} << tl.where({is_far}, 0, {y}))"

    def _rounded_down(self, node: Node, x: str, d: str) -> str:
        """`//` or `%` by a divisor that is not 0, rounded down."""
        of_x, of_d = self._bounds(node)
        if of_x.lo >= 0 and of_d.lo >= 0:
            return OPERATORS[node.op].written([x, d])
        turns = -(of_x.lo // of_d.hi) if of_d.lo == of_d.hi > 0 else 0
        if turns and of_x.hi + turns * of_d.hi <= BITS_32.hi:
            # Of a constant: moved by whole turns, x is not negative
            quotient = OPERATORS[node.op].written([f"({x} + {turns * of_d.hi})", d])
            return quotient if node.op == "%" else f"{quotient} - {turns}"
        remainder = self._assign(f"r{len(self.text)}", f"{x} % {d}")
        is_below = f"{remainder} < 0"
        if of_d.lo < 0:
            is_below = f"({remainder} != 0) & (({remainder} ^ {d}) < 0)"
        if node.op == "%":  # neither sum can leave its type, not even where it is not chosen
            return f"{remainder} + tl.where({is_below}, {d}, 0)"
        return f"{x} // {d} - tl.where({is_below}, 1, 0)"

    def _load(self, node: Node) -> str:
        """A captured element, by 64-bit offsets and from within the tensor: computed indices are
        held at its ends (`_within`), and q_idx at its first. Where q_idx or k_idx itself lies past
        its last, in a ragged tile, 0 is read. b, h and constants lie within: callers check.
        """
        # A mask, not a minimum: it leaves the compiler to see that keys are neighbours. A bias in
        # fp32 takes 32 loads of 16 bytes a thread, with a minimum 128 of 4 (128 x 128 on sm_90)
        tensor = f"captured[{node.value[0]}]"
        address, within = [f"{tensor}.ptr"], []
        for d, part in enumerate(node.inputs):
            index, op = self.values[part], part.op
            if op in ("q_idx", "k_idx"):
                within.append(f"({index} < {tensor}.sizes[{d}])")
                index = f"tl.maximum({index}, 0)" if op == "q_idx" else index
            elif op not in ("b", "h", INT):
                index = self._within(node, d, size=f"{tensor}.sizes[{d}]")
            address.append(f"tl.cast({index}, tl.int64) * {tensor}.strides[{d}]")
        mask = f", mask={' & '.join(within)}, other=0" if within else ""
        return f"tl.cast(tl.load({' + '.join(address)}{mask}), {self._type(node)})"

    def _within(self, load: Node, d: int, size: str) -> str:
        """An index of a load, from the end where it may be negative, and held at both ends."""
        index = self.values[load.inputs[d]]
        if wraps(load)[d]:
            index = f"tl.where({index} < 0, {index} + {size}, {index})"
        return f"tl.minimum(tl.maximum({index}, 0), {size} - 1)"

    def _type(self, node: Node) -> str:
        return INT64 if node in self.long else TYPES[node.kind]

    def held(self, node: Node, tensor: str) -> list[str]:
        """The indices of a load, 64-bit, each held within a tensor's ends; for stores, where a mask
        is slower than a minimum.
        """
        indices = []
        for d, part in enumerate(node.inputs):
            index = self.values[part]
            if part.op not in ("b", "h", INT):
                index = self._within(node, d, size=f"{tensor}.sizes[{d}]")
            indices.append(f"tl.cast({index}, tl.int64)")
        return indices
