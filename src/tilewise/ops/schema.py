"""How a call crosses torch.library: its tensors, and the Problem's fields as scalars."""

from __future__ import annotations

import torch

from ..mods.flatten import check_captured
from ..mods.serialize import MASK, SCORE_FUNCTION, name_of, text_of
from ..problem import OPTIONAL, Call, Extras, Mods, Problem, Scalars, describe, extras_of

Tensor = torch.Tensor

LIBRARY = torch.library.Library("tilewise", "DEF")
INPUTS = 3  # q, k, v
GIVEN = 7  # to a backward: dout, dlse, q, k, v, out, lse
SCALARS = len(Scalars._fields)
CALL = (
    ", ".join(f"Tensor? {name}" for name in Extras._fields[:OPTIONAL])
    + ", Tensor[]? captured, float scale, float softcap, SymInt left, SymInt right, "
    "float dropout_p, str align, bool deterministic, str mask_mod, str score_mod, "
    "str score_derivative, int[2] mask_block, bool has_bias_grad, bool is_long, str? backend"
)
AFTER_TENSORS = SCALARS + 9  # the arguments from scale on
SAVED = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


def asking(call: Call) -> tuple:
    """The arguments of an operator after its tensors: the inverse of `asked`."""
    problem = call.problem
    mods = problem.mods
    functions = (text_of(name) for name in (mods.mask, mods.score, mods.derivative))
    flags = problem.align, problem.deterministic, *functions, mods.block, problem.has_bias_grad
    return (*call.scalars, *flags, problem.is_long, call.backend)


def flat(args: tuple, before: int) -> tuple[tuple, tuple]:
    """An operator's arguments as tensors in a row, of which `before` come before the extras, and
    the rest of the call.
    """
    captured = before + OPTIONAL
    return (*args[:captured], *(args[captured] or ())), args[captured + 1 :]


def asked(tensors: tuple, rest: tuple) -> tuple[Problem, Extras, Scalars]:
    """What an operator's arguments ask for: q, k, v and the extras, and what begins at scale."""
    q, k, v, *tensors = tensors
    extras, scalars = extras_of(*tensors), Scalars(*rest[:SCALARS])
    align, deterministic, *_, has_bias_grad, is_long, _ = rest[SCALARS:]
    mods = mods_of(rest)
    check_captured(mods, q, k, extras)
    flags = align, deterministic, mods, has_bias_grad, is_long
    return describe(q, k, v, extras, scalars, *flags), extras, scalars


def mods_of(rest: tuple) -> Mods:
    """The modifiers that are told among what begins at scale."""
    mask, score, derivative, block = rest[SCALARS + 2 : SCALARS + 6]
    score, derivative = (name_of(x, SCORE_FUNCTION) for x in (score, derivative))
    return Mods(name_of(mask, MASK), score, derivative, tuple(block))


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
        no_double_backward(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        no_double_backward(ctx, *tangents)
