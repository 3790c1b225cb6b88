"""Gradients of what a score function captured: slopes, tables, temperatures that are learned.

They are an operator of their own, `torch.ops.tilewise.flash_attn_captured_grads`, which recomputes
the scores once more: no cost unless a captured tensor requires grad. Tensors that a mask captured
have no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from .. import dispatch
from ..emulation import emulator_seed, use_interpreter
from ..errors import ArgumentError
from ..mods.derivative import by_loads
from ..mods.flat import captured_by_score
from ..problem import Call, Extras, Saved, extras_of
from . import schema
from .operators import loop_function, parts_of, problem_from
from .schema import SAVED_TENSORS

Tensor = torch.Tensor


def gradients(
    call: Call, needs: Sequence[bool], saved: Saved, extras: Extras
) -> tuple[Tensor | None, ...]:
    """The gradient of each captured tensor, None where `needs` is False or where there is none."""
    grads: list[Tensor | None] = [None] * len(extras.captured)
    mods = call.problem.mods
    if not mods.score or not any(needs):
        return tuple(grads)
    first = len(grads) - len(captured_by_score(mods, extras.captured))
    differentiable = {load.value[0] for load, _ in by_loads(mods.score)}
    wanted = [i for i in sorted(differentiable) if needs[first + i]]
    if wanted:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            computed = schema.apply(_CapturedGrads, (call, wanted), (*saved, *extras.tensors))
        else:
            computed = _computed(call, wanted, saved=saved, extras=extras)
        for i, grad in zip(wanted, computed):
            grads[first + i] = grad
    return tuple(grads)


class _CapturedGrads(schema.Once):
    """What functorch transforms see."""

    @staticmethod
    def forward(request, *tensors):
        call, wanted = request
        saved, extras = Saved._make(tensors[:SAVED_TENSORS]), extras_of(tensors[SAVED_TENSORS:])
        return _computed(call, wanted, saved=saved, extras=extras)


loop_function(_CapturedGrads)


def _computed(call: Call, wanted: list[int], saved: Saved, extras: Extras) -> tuple[Tensor, ...]:
    arguments = {**saved._asdict(), **schema.arguments_of(call, extras)}
    return tuple(torch.ops.tilewise.flash_attn_captured_grads(**arguments, wanted=wanted))


def _kernel(args: tuple):
    saved, extras, options, wanted = _parts_of(args)
    q, k, v = saved.q, saved.k, saved.v
    problem = problem_from((q, k, v), extras, options=options)
    _check_wanted(problem.mods.score, wanted)
    chosen = dispatch.choose_for(problem, q, k, v, extras, options.backend)
    emulated = q.device.type == "cpu" and chosen.NAME != "cpu" and emulator_seed() is not None
    # dS is one tile's on every GPU: there is no kernel for Hopper alone
    module = chosen if chosen.NAME == "cpu" else dispatch.load("portable")
    with use_interpreter() if emulated else contextlib.nullcontext():
        return module.captured_grads(problem, saved, extras, options.scalars, wanted)


def _parts_of(args: tuple) -> tuple[Saved, Extras, schema.Options, list[int]]:
    tensors, extras, options = parts_of(args[:-1], SAVED_TENSORS)
    schema.check_devices(Saved._fields, tensors)
    return Saved._make(tensors), extras, options, args[-1]


def _check_wanted(score: str, wanted: list[int]) -> None:
    """Checks that the requested tensors have gradients; a saved program may request others."""
    differentiable = {load.value[0] for load, _ in by_loads(score)} if score else set()
    if not differentiable.issuperset(wanted):
        raise ArgumentError(
            f"wanted is {list(wanted)}: it must be of {sorted(differentiable)}, what the score "
            "function captured that has a gradient"
        )


def _of_score(args: tuple) -> tuple[tuple[Tensor, ...], list[int]]:
    """The tensors that the score function captured, and which of them require grad."""
    saved, extras, options, wanted = _parts_of(args)
    problem = problem_from((saved.q, saved.k, saved.v), extras, options=options)
    _check_wanted(problem.mods.score, wanted)
    return captured_by_score(problem.mods, extras.captured), wanted


def _fake(args: tuple):
    tensors, wanted = _of_score(args)
    return [torch.empty_like(tensors[i]) for i in wanted]


schema.operator(
    "flash_attn_captured_grads",
    f"({schema.SAVED}, {schema.CALL}, int[] wanted) -> Tensor[]",
    kernel=_kernel,
    fake=_fake,
    backward=schema.no_double_backward,
    is_looped=True,
)
