"""How a call crosses torch.library: its tensors, and the Problem's fields as scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..features import schema_of
from ..mods.flat import check_captured
from ..mods.serialize import MASK, SCORE_FUNCTION, deserialize, serialize
from ..problem import OPTIONAL, Call, Extras, Mods, Problem, Saved, Scalars, describe, extras_of

Tensor = torch.Tensor

LIBRARY = torch.library.Library("tilewise", "DEF")
SAVED_TENSORS = len(Saved._fields)  # to a backward


class Options(NamedTuple):
    """The arguments of an operator after its tensors."""

    scale: float
    softcap: float
    left: int
    right: int
    dropout_p: float
    align: str
    deterministic: bool
    mask_mod: str  # a text, and so are the next two
    score_mod: str
    score_derivative: str
    mask_block: tuple[int, int] | list[int]
    has_bias_grad: bool
    is_long: bool
    backend: str | None

    @property
    def scalars(self) -> Scalars:
        """The numbers among them."""
        return Scalars(self.scale, self.softcap, self.left, self.right, self.dropout_p)

    @property
    def mods(self) -> Mods:
        """The modifiers among them."""
        score, derivative = (
            deserialize(x, SCORE_FUNCTION) for x in (self.score_mod, self.score_derivative)
        )
        rows, keys = self.mask_block
        return Mods(deserialize(self.mask_mod, MASK), score, derivative, (rows, keys))


CALL = schema_of((*Extras._fields, *Options._fields))
FLAGS = "align", "deterministic", "has_bias_grad", "is_long"  # of a Problem
SAVED = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


def check_devices(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Refuses an operator's tensors that are on several devices; what follows those with names is
    captured.
    """
    devices = [(n, x.device) for n, x in enumerate(tensors) if x is not None]
    for n, device in devices:
        if device != devices[0][1]:
            name = names[n] if n < len(names) else f"captured tensor {n - len(names)}"
            raise ArgumentError(
                f"{name} is on {device} and {names[devices[0][0]]} is on {devices[0][1]}: move "
                "them to one device"
            )


def record_of(record: Any, values: Mapping[str, Any]) -> Any:
    """A record of the values of its fields; those that have none keep their defaults."""
    return record(**{name: values[name] for name in record._fields if name in values})


def options_of(call: Call) -> Options:
    """The inverse of `problem_from`."""
    problem, scalars, mods = call.problem, call.scalars, call.problem.mods
    return Options(
        *scalars,
        align=problem.align,
        deterministic=problem.deterministic,
        mask_mod=serialize(mods.mask),
        score_mod=serialize(mods.score),
        score_derivative=serialize(mods.derivative),
        mask_block=mods.block,
        has_bias_grad=problem.has_bias_grad,
        is_long=problem.is_long,
        backend=call.backend,
    )


def flat(args: tuple, before: int) -> tuple[tuple, tuple]:
    """An operator's arguments as tensors in a row, of which `before` come before the extras, and
    the rest of the call.
    """
    captured = before + OPTIONAL
    return (*args[:captured], *(args[captured] or ())), args[captured + 1 :]


def parts_of(args: tuple, before: int) -> tuple[tuple, Extras, Options]:
    """An operator's arguments: the tensors before the extras, the extras, and the rest."""
    tensors, options = flat(args, before)
    return tensors[:before], extras_of(tensors[before:]), Options._make(options)


def problem_from(inputs: Sequence[Tensor], extras: Extras, options: Options) -> Problem:
    """The problem that an operator's arguments ask for; `inputs` are q, k and v."""
    q, k, v = inputs
    check_devices(("q", "k", "v", *Extras._fields[:OPTIONAL]), (*inputs, *extras.tensors))
    mods = options.mods
    check_captured(mods, q, k, extras)
    flags: Any = {x: getattr(options, x) for x in FLAGS}
    return describe(q, k, v, extras=extras, scalars=options.scalars, mods=mods, **flags)


def no_double_backward(ctx, *grads):
    """The derivative of a gradient, refused."""
    raise NotImplementedError(
        "attention is differentiable once: for a second derivative use tilewise.attention_reference"
    )


class Once(torch.autograd.Function):
    """A gradient, as autograd and functorch transforms see it: it has no derivative and says so."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        no_double_backward(ctx)

    @staticmethod
    def jvp(ctx, *tangents):
        no_double_backward(ctx)
