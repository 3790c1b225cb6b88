"""What transformers generates with the same weights: the tokens to be equal to, and its speed.

Tokens are compared with eager attention, one request after the other, without padding. In fp32 two
right computations differ in the last bits of a logit; where the first and the second logit are
nearer than that, either may win. So the smallest gap between the two is given beside the largest
difference of logits: equality is no luck where the one is far above the other.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from .requests import Request

GREEDY = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


class Expected(NamedTuple):
    """The tokens of one request, eager and greedy."""

    tokens: list[int]
    logits: list[float]  # of those tokens
    gaps: list[float]  # between the first and the second logit


def eager_tokens(model, request: Request) -> Expected:
    """One request, alone."""
    prompt = torch.tensor([request.prompt], device=model.device)
    how = dict(output_logits=True, return_dict_in_generate=True)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.new_tokens,
        **(GREEDY | how),
    )
    best, second = torch.cat(found.logits).topk(2).values.T
    tokens = found.sequences[0, len(request.prompt) :].tolist()
    return Expected(tokens, best.tolist(), (best - second).tolist())


class Alone(NamedTuple):
    """All requests, one after the other."""

    found: list[Expected]
    seconds: float


def warm_up(model) -> None:
    """A short request by both attentions, so that nothing is loaded in what is timed."""
    eager_tokens(model, Request([1, 2], 2))
    padded_seconds(model, [Request([1, 2], 2)])


def generate_alone(model, requests: list[Request]) -> Alone:
    """Every request's expected tokens."""
    start = time.perf_counter()
    found = [eager_tokens(model, request) for request in requests]
    return Alone(found, time.perf_counter() - start)


def padded_seconds(model, requests: list[Request]) -> float:
    """All requests as one batch, padded on the left, with torch's SDPA, until the longest ends."""
    longest = max(len(request.prompt) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        first = longest - len(request.prompt)
        ids[row, first:], mask[row, first:] = torch.tensor(request.prompt), 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    steps = max(request.new_tokens for request in requests)
    model.set_attn_implementation("sdpa")
    start = time.perf_counter()
    model.generate(ids, attention_mask=mask, max_new_tokens=steps, **GREEDY).tolist()
    seconds = time.perf_counter() - start
    model.set_attn_implementation("eager")
    return seconds


class Comparison(NamedTuple):
    """A request's tokens beside the expected ones."""

    is_equal: bool
    differs_at: int | None  # the first token that is another
    gap: float  # the smallest, or that of the token that is another
    error: float  # the largest difference of the logits, up to there


def compare(request: Request, expected: Expected) -> Comparison:
    """Tokens after the first other one say nothing: they follow another text."""
    pairs = zip(request.generated, expected.tokens, strict=True)
    differs_at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    upto = len(expected.tokens) if differs_at is None else differs_at + 1
    errors = [abs(a - b) for a, b in zip(request.logits[:upto], expected.logits)]
    gap = min(expected.gaps) if differs_at is None else expected.gaps[differs_at]
    return Comparison(differs_at is None, differs_at, gap, max(errors))
