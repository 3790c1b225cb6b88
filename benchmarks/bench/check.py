"""Correctness at the very shape that is to be timed: a fast wrong kernel has no speed.

Out and the gradients of two key heads with their query heads, the first of the batch and the
last, are held to fp64, computed a block of queries at a time so that memory stays bounded at any
length (ALiBi without a causal mask excepted). Of packed sequences each is held, at one key head; of
a bias the gradient of two key heads' query heads, which takes the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewise.explain.shapes import FP8, Shape
from tilewise.testing import tolerance

from . import fp8
from .arguments import options_of
from .modifiers import bias_of
from .providers import Attend
from .standards import Inputs, Standards, joined, standards

Tensor = torch.Tensor
BY_HEAD = ("alibi_slopes", "sinks")  # options with an entry a query head


class Verdict(NamedTuple):
    """The largest error beside its bound, for the tensor that comes nearest to failing."""

    what: str  # the tensor and its figures
    max_error: float
    bound: float
    passes: bool


# name, where in the tensor, fp64 value, values of the plain runs whose errors are allowed
Truth = list[tuple[str, tuple, Tensor, tuple[Tensor, ...]]]


def make_inputs(shape: Shape, device: str, layout: str = "bshd", seed: int = 0) -> Inputs:
    """Normal inputs, the same for every layout; under a softcap q is larger, to reach it."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, fp8.WIDE if shape.dtype == FP8 else shape.dtype)
    # Scores of unit variance would not show that a softcap of 30 was left out; 7.5 times that does.
    size_q = max(1.0, shape.softcap / 4)
    tensors = []
    for seqlen, nheads, headdim, size in (
        (shape.seqlen_q, shape.nheads, shape.headdim, size_q),
        (shape.seqlen_k, shape.nheads_k, shape.headdim, 1.0),
        (shape.seqlen_k, shape.nheads_k, shape.headdim_v, 1.0),
        (shape.seqlen_q, shape.nheads, shape.headdim_v, 1.0),
    ):
        rows = (sum(shape.sequences),) if shape.lengths else (shape.batch, seqlen)
        sizes = (*rows, nheads, headdim)
        x = torch.randn(sizes, device=device, generator=generator, dtype=torch.float32)
        x = x.mul_(size).to(dtype)
        tensors.append(x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bhsd" else x)
    q, k, v, dout = tensors
    inputs = Inputs(q, k, v, dout, bias_of(shape, device, generator))
    return fp8.in_form(inputs, layout, shape) if shape.dtype == FP8 else inputs


def truth(shape: Shape, inputs: Inputs) -> Truth:
    """The sampled heads' results in fp64 and as plain torch gives them in the inputs' precision."""
    if shape.dtype == FP8:  # their exact values
        inputs = fp8.meant(inputs)
        shape = shape._replace(dtype=str(inputs.q.dtype).removeprefix("torch."))
    options = options_of(shape, str(inputs.q.device))
    if shape.lengths:
        return _truth_of_packed(shape, inputs, options)
    samples = {(0, 0), (shape.batch - 1, shape.nheads_k - 1)}
    wants_dbias = shape.modifier == "learned-bias" and shape.direction != "fwd"
    if wants_dbias:  # the batch shares it
        samples = {(row, head) for row in range(shape.batch) for _, head in samples}
    found: Truth = []
    by_head: dict[int, list[Standards]] = {}
    for batch, head in sorted(samples):
        keys = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        queries = (*keys[:2], _queries_of(shape, head))
        q, k, v = inputs.q[queries], inputs.k[keys], inputs.v[keys]
        bias = None if inputs.bias is None else inputs.bias[:, queries[2]]
        part = Inputs(q, k, v, inputs.dout[queries], bias)
        first = batch, queries[2].start
        held = standards(shape, part, _options_at(queries[2], options), first)
        places = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        found += _entries(places, held)
        by_head.setdefault(head, []).append(held)
    if wants_dbias:
        found += [_dbias_of(shape, head, held) for head, held in by_head.items()]
    return found


def _entries(places: dict[str, tuple], held: Standards) -> Truth:
    return [
        (name, place, held.exact[name], held.plains(name))
        for name, place in places.items()
        if name in held.exact
    ]


def _dbias_of(shape: Shape, head: int, held: list[Standards]) -> tuple:
    """The bias's gradient at the query heads of a key head, summed over the batch."""
    place = (slice(None), _queries_of(shape, head))
    exact, plain, recomputed = (
        functools.reduce(torch.add, [run["dbias"] for run in runs]) for runs in zip(*held)
    )
    return "dbias", place, exact, (plain.to(held[0].plain["dq"].dtype), recomputed)


def _truth_of_packed(shape: Shape, inputs: Inputs, options: dict[str, Any]) -> Truth:
    """Every sequence at one key head, which is the sequence's number modulo the key heads.

    Sequences of lengths within a factor of two, and all below 32, are judged together. Results
    shrink as rows see more keys: a long sequence must not hide below the errors of short ones. And
    a handful of rows has no mean error to speak of.
    """
    alike: dict[int, list[tuple[int, int, int]]] = {}
    start = 0
    for number, length in enumerate(shape.sequences):
        members = alike.setdefault(max(length, 16).bit_length(), [])
        members.append((start, length, number % shape.nheads_k))
        start += length
    found: Truth = []
    for members in alike.values():
        runs, rows, heads = [], [], []
        for start, length, head in members:
            at, of = slice(start, start + length), _queries_of(shape, head)
            q, dout = inputs.q[None, at, of], inputs.dout[None, at, of]
            k, v = (x[None, at, head : head + 1] for x in (inputs.k, inputs.v))
            part = Inputs(q, k, v, dout)
            runs.append(standards(shape.alone(length), part, _options_at(of, options)))
            rows += range(start, start + length)
            heads += [head] * length
        keys = (torch.tensor(rows)[:, None], torch.tensor(heads)[:, None])
        group = shape.nheads // shape.nheads_k
        queries = (keys[0], keys[1] * group + torch.arange(group))
        places = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        found += _entries(places, joined(runs))
    return found


def _queries_of(shape: Shape, head: int) -> slice:
    """The query heads that share a key head."""
    group = shape.nheads // shape.nheads_k
    return slice(head * group, (head + 1) * group)


def _options_at(heads: slice, options: dict[str, Any]) -> dict[str, Any]:
    """The options of these query heads."""
    own = {name: options[name] for name in BY_HEAD if options[name] is not None}
    return {**options, **{name: x[heads] for name, x in own.items()}}


def judge(
    shape: Shape, attend: Attend, inputs: Inputs, expected: Truth, is_ours: bool = True
) -> Verdict:
    """A provider's results beside the truth. Peers are not held to our bound on the mean error."""
    results = results_of(shape, attend, inputs)
    if shape.dtype == FP8:
        error, bound = fp8.error_of(results["out"], expected, inputs)
        what = f"out: norm of the error {error:.2e} of {bound:.0e}"
        return Verdict(what, error, bound, error <= bound)
    verdicts = []
    for name, place, exact, plains in expected:
        verdict = tolerance.judge(results[name][place], exact, *plains)
        passes = verdict.ok if is_ours else verdict.max_error <= verdict.max_bound
        verdicts.append(Verdict(f"{name}: {verdict}", verdict.max_error, verdict.max_bound, passes))
    failed = [verdict for verdict in verdicts if not verdict.passes]
    return max(failed or verdicts, key=lambda verdict: verdict.max_error / (verdict.bound or 1))


def results_of(shape: Shape, attend: Attend, inputs: Inputs) -> dict[str, Tensor]:
    """Out, and the gradients where the shape's direction asks for them."""
    if shape.direction == "fwd":
        with torch.no_grad():
            return {"out": attend(*inputs.arguments)}
    out, backward = backward_of(shape, attend, inputs)
    return {"out": out, **dict(zip(("dq", "dk", "dv", "dbias"), backward()))}


def backward_of(
    shape: Shape, attend: Attend, inputs: Inputs
) -> tuple[Tensor, Callable[[], tuple[Tensor, ...]]]:
    """Out, and the call that gives its gradients again and again: the provider's own where it has
    one that is cheaper than autograd (`direct`), else autograd's, which keeps the graph.
    """
    direct = getattr(attend, "direct", None)
    if direct is not None and shape.direction == "bwd":
        return direct(*inputs.arguments, inputs.dout)
    arguments, wanted = inputs.leaves(shape)
    out = attend(*arguments)
    return out.detach(), lambda: torch.autograd.grad(out, wanted, inputs.dout, retain_graph=True)
