"""Which backend serves a call of e4m3 tensors, and whether its products run in 8 bits there."""

from __future__ import annotations

import torch

from .. import dispatch
from ..problem import Problem
from .call import call_of
from .cards import Card
from .dense import CPU, Answer, Explanation, chosen_of, kind_of, standing_in
from .shapes import Shape

DEQUANTISED = "the products do not run in FP8 there: q, k and v are dequantised"


def explain_fp8(
    shape: Shape, target: str, card: Card | None, backend: str | None = None
) -> Explanation:
    """Explains a forward of e4m3 tensors on a card, or on the CPU, where there is none."""
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    answers = answers_of(call_of(few).problem, target)
    chosen = chosen_of(answers, backend)
    return Explanation(
        shape=shape,
        target=target,
        card=card,
        backend=chosen,
        forced=backend is not None,
        answers=answers,
        launches=[],
        how=products_of(chosen, target) if chosen else "",
        work=None,
    )


def answers_of(problem: Problem, target: str) -> list[Answer]:
    """Each backend's, in the order in which they are asked."""
    device = torch.device("cpu" if target == CPU else "cuda")
    with standing_in(target):
        reasons = {
            name: dispatch.ask_fp8(name, problem, device, torch.bfloat16)
            for name in dispatch.BACKENDS
        }
    return [Answer(name, str(reason or ""), kind_of(reason)) for name, reason in reasons.items()]


def products_of(backend: str, target: str) -> str:
    """Whether Q K^T and P V of a backend are products of 8 bits on a target, in words."""
    if backend == "hopper":
        return "the products run in FP8, on the tensor cores"
    if backend == "portable":
        from ..kernels.portable.fp8_launch import has_product

        if has_product(target):
            return "the products run in FP8, by Triton's dot"
        return f"{DEQUANTISED} to bfloat16, tile by tile"
    return f"{DEQUANTISED} to float32"
