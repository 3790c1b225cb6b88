"""Which backend serves a call of e4m3 tensors, and whether its products run in 8 bits there."""

from __future__ import annotations

import torch

from .. import dispatch
from .answers import Explanation, answers_of, chosen_of
from .call import call_of
from .cards import Card
from .shapes import Shape

DEQUANTISED = "the products do not run in FP8 there: q, k and v are dequantised"


def explain_fp8(
    shape: Shape, target: str, card: Card | None, backend: str | None = None
) -> Explanation:
    """Explains a forward of e4m3 tensors on a card, or on the CPU, where there is none."""
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    problem = call_of(few).problem

    def ask(name: str, device: torch.device) -> str | None:
        return dispatch.ask_fp8(name, problem, device, torch.bfloat16)

    answers = answers_of(target, ask)
    chosen = chosen_of(answers, backend)
    how = products_of(chosen, target) if chosen else ""
    return Explanation(shape, target, card, chosen, backend is not None, answers, [], how)


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
