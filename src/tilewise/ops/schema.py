"""How calls cross torch.library: operators, their tensors, and the Problem's fields as scalars."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..features import schema_of
from ..mods.serialize import MASK, SCORE_FUNCTION, deserialize, serialize
from ..problem import OPTIONAL, Call, Extras, Mods, Saved, Scalars

Tensor = torch.Tensor

LIBRARY = torch.library.Library("tilewise", "DEF")
schemas = hashlib.sha256()  # of all operators
direct = SimpleNamespace()  # what computes each operator, for code that Inductor generates
vars(torch.ops.tilewise)["direct"] = direct
SAVED_TENSORS = len(Saved._fields)  # to a backward


class Options(NamedTuple):
    """The arguments of an operator after its tensors."""

    scalars: Scalars  # five arguments
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
    def mods(self) -> Mods:
        """The modifiers among them."""
        score, derivative = (
            deserialize(x, SCORE_FUNCTION) for x in (self.score_mod, self.score_derivative)
        )
        rows, keys = self.mask_block
        return Mods(deserialize(self.mask_mod, MASK), score, derivative, block=(rows, keys))


CALL_NAMES = *Extras._fields, *Scalars._fields, *Options._fields[1:]
CALL = schema_of(CALL_NAMES)
FORWARD = "q", "k", "v", *CALL_NAMES
BACKWARD = *Saved._fields, *CALL_NAMES
SAVED = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


def operator(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    vmap: Callable | None = None,
    is_looped: bool = False,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Defines an operator. What computes it, and what gives its outputs' shapes, take its arguments
    as one tuple; arguments by keyword alone stay so. `is_looped` has vmap compute one by one.
    """
    LIBRARY.define(name + schema, tags=tags)
    schemas.update(f"{name}{schema};".encode())
    full_name = f"{LIBRARY.ns}::{name}"
    defined = getattr(torch.ops.tilewise, name)
    arguments = defined.default._schema.arguments
    has_default = [x.name for x in arguments if x.has_default_value()]

    def call(*args: Any, **named: Any) -> Any:
        if named:  # Inductor passes what has a default by keyword, all of it
            args = *args, *(named.pop(x) for x in has_default if x in named)
        return kernel(args, **named)

    setattr(direct, name, call)
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")

    def trace(*args: Any, **named: Any) -> Any:
        mark_cacheable(f"torch.ops.{LIBRARY.ns}.{name}")
        if "torch._inductor.lowering" in sys.modules:
            with contextlib.suppress(ImportError, AttributeError):  # private names may move
                from .inductor import lower

                lower(name)
        return fake(args, **named)

    torch.library.register_fake(full_name, trace, lib=LIBRARY)
    if backward is not None:
        register = torch.library.register_autograd
        register(full_name, backward, setup_context=setup_context, lib=LIBRARY)
    if is_looped:
        from .vmap import looped

        vmap = looped(lambda args: defined(**{x.name: y for x, y in zip(arguments, args)}))
    if vmap is not None:
        torch.library.register_vmap(full_name, vmap, lib=LIBRARY)


def mark_cacheable(name: str) -> None:
    """Has torch keep compiled graphs with this function or operator on disk, and find them for the
    schemas that they were made with alone: their code passes arguments by place.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    key = f"{sys.modules[LIBRARY.ns].__version__} {schemas.hexdigest()}"
    keys = getattr(config, "unsafe_marked_cacheable_functions", None)
    # Private names may move; then each process compiles
    if keys is not None and keys.get(name) != key:  # a dictionary that is written into is not seen
        config.unsafe_marked_cacheable_functions = {**keys, name: key}


def refusing(message: str) -> Callable[..., Any]:
    """A derivative that is refused."""

    def refuse(ctx, *grads):
        raise NotImplementedError(message)

    return refuse


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


def options_of(call: Call) -> dict[str, Any]:
    """A call's arguments after its tensors, by name: the inverse of `problem_from`."""
    problem, scalars, mods = call.problem, call.scalars, call.problem.mods
    return dict(
        zip(Scalars._fields, scalars),
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


def arguments_of(call: Call, extras: Extras) -> dict[str, Any]:
    """The arguments of a call by name, but for those that are always there."""
    return {**dict(zip(Extras._fields, extras.arguments)), **options_of(call)}


def flat(args: tuple, before: int) -> tuple[tuple, tuple]:
    """An operator's arguments as tensors in a row, of which `before` come before the extras, and
    the rest of the call.
    """
    captured = before + OPTIONAL
    return (*args[:captured], *(args[captured] or ())), args[captured + 1 :]


def options_from(values: Sequence[Any]) -> Options:
    """Options of an operator's arguments after its tensors."""
    numbers = len(Scalars._fields)
    return Options._make((Scalars._make(values[:numbers]), *values[numbers:]))


no_double_backward = refusing(
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


def apply(function: type[torch.autograd.Function], call: Any, tensors: Sequence[Any]) -> Any:
    """A Function of a call, which has no gradient, and of tensors."""
    return function.apply(call, *tensors)
