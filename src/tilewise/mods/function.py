"""The base of masks and score functions: a tree, and the tensors that it captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Self, overload

import torch

from ..errors import ArgumentError
from .evaluation import evaluate
from .expressions import INDICES, Node, describe, descriptions, intern, nodes_of, touch
from .flat import check_lengths
from .symbols import Symbol

Tensor = torch.Tensor
Index = Tensor | int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TracedFunction:
    """A function as its tree."""

    KIND: ClassVar[str]  # in messages

    expr: Node
    tensors: tuple[Tensor, ...] = ()
    _name: str = dataclasses.field(init=False)
    _mentions: frozenset[str] = dataclasses.field(init=False)
    _reads: tuple[Read, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_name", intern(self.expr))
        mentioned = frozenset(node.op for node in nodes_of(self.expr))
        object.__setattr__(self, "_mentions", mentioned)
        object.__setattr__(self, "_reads", tuple(_reads(self.trees)))

    @property
    def key(self) -> str:
        """The name of what is computed, equal for equal functions; tensors' values are no part.

        >>> from tilewise.mods import causal, mask
        >>> causal().key == mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).key
        True
        """
        if not torch.compiler.is_compiling():  # a compiler takes no locks
            touch(self._name, self.expr)
        return self._name

    @property
    def trees(self) -> tuple[Node, ...]:
        """Everything that is computed from the captured tensors."""
        return (self.expr,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.expr)})"

    def to(self, device: torch.device | str) -> Self:
        """The function with its tensors on another device."""
        return dataclasses.replace(self, tensors=tuple(x.to(device) for x in self.tensors))

    def depends_on(self, index: str) -> bool:
        """Whether the tree mentions an index: "b", "h", "q_idx" or "k_idx"."""
        return index in self._mentions

    def device(self, wanted: torch.device | str | None = None) -> torch.device:
        """The device of the captured tensors, which must be the one asked for; else the CPU."""
        devices = {x.device for x in self.tensors}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ArgumentError(
                f"the {self.KIND} captured tensors on {names}: move them to one device"
            )
        device = devices.pop() if devices else None
        if wanted is None:
            return device or torch.device("cpu")
        wanted = torch.device(wanted)
        if device is None:
            return wanted
        if device.type != wanted.type or wanted.index not in (None, device.index):
            raise ArgumentError(
                f"the {self.KIND} captured tensors on {device} and is asked for on {wanted}: call "
                f'{self.KIND.split()[0]}.to("{wanted}")'
            )
        return device

    @overload
    def _value(
        self, b: Index, h: Index, q_idx: Index, kv_idx: Index, score: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def _value(self, b, h, q_idx, kv_idx, score=None) -> Any: ...  # a Symbol

    def _value(self, b, h, q_idx, kv_idx, score=None):
        """The value in torch; inside another function, a part of it."""
        leaves = {"b": b, "h": h, "q_idx": q_idx, "k_idx": kv_idx}
        leaves |= {} if score is None else {"score": score}
        for value in leaves.values():
            if isinstance(value, Symbol):
                tracer = value.tracer
                symbols = {name: tracer.lift(x) for name, x in leaves.items()}
                return tracer.splice(self.expr, symbols, tensors=self.tensors)
        return evaluate(self.expr, b, h, q_idx, kv_idx, tensors=self.tensors, score=score)


class Read(NamedTuple):
    """An index, as it is, of a captured tensor."""

    slot: int
    dim: int
    op: str  # of INDICES
    text: str


def _reads(trees: tuple[Node, ...]) -> Iterator[Read]:
    for tree in trees:
        texts = descriptions(tree)
        for node, text in texts.items():
            if node.op == "load":
                for dim, index in enumerate(node.inputs):
                    if index.op in INDICES:
                        yield Read(node.value[0], dim, op=index.op, text=text)


def check_sizes(function: TracedFunction, shape: tuple[int, int, int, int]) -> None:
    """Checks that captured tensors have an element for every position (indices with offsets are
    clamped); `shape` is batch, nheads, seqlen_q and seqlen_k.
    """
    sizes: dict[str, int] = dict(zip(INDICES, shape))
    names: dict[str, str] = dict(zip(INDICES, ("batch", "nheads", "seqlen_q", "seqlen_k")))
    if not torch.compiler.is_compiling():  # to a compiler that would be a guard; operators ask too
        check_lengths(sizes)
    for use in function._reads:
        x, size = function.tensors[use.slot], sizes[use.op]
        if x.shape[use.dim] < size:
            raise ArgumentError(
                f"the {function.KIND} reads {use.text} of a tensor of shape {tuple(x.shape)} and "
                f"{names[use.op]} is {size}: dimension {use.dim} is too short"
            )
