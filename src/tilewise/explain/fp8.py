"""Which backend serves a call of e4m3 tensors, and whether its products run in 8 bits there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import dispatch
from ..problem import Problem
from .call import call_of
from .cards import Card
from .dense import CPU, Answer, kind_of, standing_in
from .shapes import Shape

DEQUANTISED = "the products do not run in FP8 there: q, k and v are dequantised"


class ExplanationFp8(NamedTuple):
    """The answers. `backend` is "" where nothing serves the call."""

    shape: Shape
    target: str
    card: Card | None  # None: the CPU
    backend: str
    forced: bool
    answers: list[Answer]
    products: str  # of the backend, in words


def explain_fp8(
    shape: Shape, target: str, card: Card | None, backend: str | None = None
) -> ExplanationFp8:
    """Explains a forward of e4m3 tensors on a card, or on the CPU, where there is none."""
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    answers = answers_of(call_of(few).problem, target)
    chosen = backend or next((x.backend for x in answers if x.kind == "serves"), "")
    if any(x.backend == chosen and x.kind in ("avoidable", "refuses") for x in answers):
        chosen = ""
    said = products_of(chosen, target) if chosen else ""
    return ExplanationFp8(shape, target, card, chosen, backend is not None, answers, said)


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
