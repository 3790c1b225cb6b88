"""The base of masks and score functions: a tree, and the tensors that it captured."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch

from ..errors import ArgumentError, a_type
from .evaluation import evaluate
from .expressions import INDICES, Node, describe, intern, loads_of, nodes_of, touch
from .flat import check_lengths
from .symbols import Symbol

Tensor = torch.Tensor
LENGTHS = {"b": "batch", "h": "nheads", "q_idx": "seqlen_q", "k_idx": "seqlen_k"}  # in messages


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TracedFunction:
    """A function as its tree."""

    KIND: ClassVar[str]  # in messages

    expr: Node
    tensors: tuple[Tensor, ...] = ()
    _name: str = dataclasses.field(init=False)
    _mentions: frozenset[str] = dataclasses.field(init=False)
    _loads: tuple[Node, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_name", intern(self.expr))
        mentioned = frozenset(node.op for node in nodes_of(self.expr))
        object.__setattr__(self, "_mentions", mentioned)
        loads = tuple(load for tree in self.trees for load in loads_of(tree))
        object.__setattr__(self, "_loads", loads)

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
        try:
            wanted = None if wanted is None else torch.device(wanted)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(f"device={wanted!r}: it must be a device of torch's") from error
        if not devices:
            return wanted or torch.device("cpu")
        device = devices.pop()
        if wanted and (device.type != wanted.type or wanted.index not in (None, device.index)):
            raise ArgumentError(
                f"the {self.KIND} captured tensors on {device} and is asked for on {wanted}: call "
                f'{self.KIND.split()[0]}.to("{wanted}")'
            )
        return device

    def _value(self, b, h, q_idx, kv_idx, score=None) -> Any:
        """The value in torch; inside another function, a part of it."""
        leaves = {"b": b, "h": h, "q_idx": q_idx, "k_idx": kv_idx}
        leaves |= {} if score is None else {"score": score}
        for value in leaves.values():
            if isinstance(value, Symbol):
                tracer = value.tracer
                symbols = {name: tracer.lift(x) for name, x in leaves.items()}
                return tracer.splice(self.expr, symbols, tensors=self.tensors)
        return evaluate(self.expr, b, h, q_idx, k_idx=kv_idx, tensors=self.tensors, score=score)


def check_sizes(function: TracedFunction, shape: tuple[int, int, int, int]) -> None:
    """Checks that captured tensors have an element for every position (computed indices are checked
    where torch reads them, on a CPU); `shape` is batch, nheads, seqlen_q and seqlen_k.
    """
    sizes: dict[str, int] = dict(zip(INDICES, shape))
    if not torch.compiler.is_compiling():  # to a compiler that would be a guard; operators ask too
        check_lengths(sizes)
    for load in function._loads:
        x = function.tensors[load.value[0]]
        for dim, index in enumerate(load.inputs):
            if index.op in sizes and x.shape[dim] < sizes[index.op]:
                raise ArgumentError(
                    f"the {function.KIND} reads {describe(load)} of a tensor of shape "
                    f"{tuple(x.shape)} and {LENGTHS[index.op]} is {sizes[index.op]}: dimension "
                    f"{dim} is too short"
                )


def check_tensor(
    name: str, x: Tensor, ranks: tuple[int, ...], shapes: str, is_float: bool = False
) -> None:
    """Checks a tensor that a named mask or score function captures: of integers, or of floats."""
    if not isinstance(x, Tensor):
        kind = "a float" if is_float else "an int32"
        raise ArgumentError(f"{name} is {a_type(x)}: it must be {kind} torch.Tensor")
    if not (x.dtype.is_floating_point if is_float else x.dtype in (torch.int32, torch.int64)):
        remedy = f"a float, so call {name}.float()"
        remedy = remedy if is_float else f"int32 or int64, so call {name}.int()"
        raise ArgumentError(f"{name}.dtype is {x.dtype}: it must be {remedy}")
    if x.ndim not in ranks:
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be {shapes}")
