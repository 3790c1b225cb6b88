"""How many bytes standard attention moves, by formula, step by step.

It writes its score matrix to memory and reads it again, S x S elements a head at every step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.explain.shapes import Shape
from tilewise.explain.traffic import PASSES, sizes_of


class Step(NamedTuple):
    """A step of standard attention, and the bytes that it reads and writes."""

    name: str
    read: float
    written: float


def standard_steps(shape: Shape) -> list[Step]:
    """What `providers.standard_attention` does, one kernel of torch after the other."""
    steps = []
    for direction in PASSES[shape.direction]:
        steps += _standard_forward(shape) if direction == "fwd" else _standard_backward(shape)
    return steps


def _standard_forward(shape: Shape) -> list[Step]:
    (q, k, v, out, _), s = sizes_of(shape), scores_of(shape)
    steps = [Step("q x scale", q, q), Step("S = Q K^T", q + k, s)]
    if shape.causal:
        steps.append(Step("mask", s, s))
    steps.append(Step("P = softmax S", s, s))
    if shape.modifier == "dropout":
        steps.append(Step("dropout", s, s + _kept(shape)))
    return [*steps, Step("O = P V", s + v, out)]


def _standard_backward(shape: Shape) -> list[Step]:
    (q, k, v, out, _), s = sizes_of(shape), scores_of(shape)
    steps = [Step("dV = P^T dO", s + out, v), Step("dP = dO V^T", out + v, s)]
    if shape.modifier == "dropout":
        steps.append(Step("dropout'", s + _kept(shape), s))
    steps.append(Step("dS = softmax' dP", 2 * s, s))
    if shape.causal:
        steps.append(Step("mask'", s, s))
    steps += [Step("dK = dS^T Q", s + q, k), Step("dQ = dS K", s + k, q)]
    return [*steps, Step("dq x scale", q, q)]


def scores_of(shape: Shape) -> float:
    """Bytes of the score matrix."""
    pairs = sum(n * (n if shape.lengths else shape.seqlen_k) for n in shape.sequences)
    return pairs * shape.nheads * getattr(torch, shape.dtype).itemsize


def _kept(shape: Shape) -> float:
    """Bytes of the mask of dropout: one a score."""
    return scores_of(shape) / getattr(torch, shape.dtype).itemsize
