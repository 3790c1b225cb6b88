"""Correctness at the very shape that is to be timed: a fast wrong kernel has no speed.

Out and the gradients of two key heads with their query heads, the first of the batch and the
last, are held to fp64, computed a block of queries at a time so that memory stays bounded at any
length (ALiBi without a causal mask excepted). Of packed sequences each is held, at one key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..reference import attention_reference
from ..testing import tolerance
from .features import options_of
from .providers import Attend
from .shapes import Shape

Tensor = torch.Tensor
BLOCK_ELEMENTS = {
    "cuda": 1 << 27,
    "cpu": 1 << 24,
}  # of one block of scores: 1 GiB and 128 MiB in fp64


class Inputs(NamedTuple):
    """(batch, seqlen, nheads, headdim), in a provider's memory order; packed (tokens, nheads,
    headdim).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Verdict(NamedTuple):
    """The largest error beside its bound, for the tensor that comes nearest to failing."""

    what: str  # the tensor and its figures
    max_error: float
    bound: float
    passes: bool


Truth = list[
    tuple[str, tuple, Tensor, Tensor]
]  # name, where in the tensor, fp64 value, plain value


def make_inputs(shape: Shape, device: str, layout: str = "bshd", seed: int = 0) -> Inputs:
    """Normal inputs, the same for every layout; under a softcap q is larger, to reach it."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
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
    return Inputs(*tensors)


def truth(shape: Shape, inputs: Inputs) -> Truth:
    """The sampled heads' results in fp64 and as plain torch gives them in the inputs' precision."""
    options = options_of(shape, str(inputs.q.device))
    if shape.lengths:
        return _truth_of_packed(shape, inputs, options)
    samples = {(0, 0), (shape.batch - 1, shape.nheads_k - 1)}
    found: Truth = []
    for batch, head in sorted(samples):
        keys = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        queries = (*keys[:2], _queries_of(shape, head))
        part = Inputs(inputs.q[queries], inputs.k[keys], inputs.v[keys], inputs.dout[queries])
        exact, plain = _standards(shape, part, _options_at(queries[2], options))
        places = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        found += [(name, places[name], exact[name], plain[name]) for name in exact]
    return found


def _truth_of_packed(shape: Shape, inputs: Inputs, options: dict[str, Any]) -> Truth:
    """Every sequence, at one key head: the heads take turns.

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
            runs.append(_standards(shape.alone(length), part, _options_at(of, options)))
            rows += range(start, start + length)
            heads += [head] * length
        keys = (torch.tensor(rows)[:, None], torch.tensor(heads)[:, None])
        group = shape.nheads // shape.nheads_k
        queries = (keys[0], keys[1] * group + torch.arange(group))
        places = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        exact, plain = (
            {name: torch.cat([run[name][0] for run in of]) for name in of[0]} for of in zip(*runs)
        )
        found += [(name, places[name], exact[name], plain[name]) for name in exact]
    return found


def _queries_of(shape: Shape, head: int) -> slice:
    """The query heads that share a key head."""
    group = shape.nheads // shape.nheads_k
    return slice(head * group, (head + 1) * group)


def _options_at(heads: slice, options: dict[str, Any]) -> dict[str, Any]:
    """The options of these query heads: tensors have an entry a head."""
    return {name: x[heads] if isinstance(x, Tensor) else x for name, x in options.items()}


def _standards(
    shape: Shape, part: Inputs, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One key head in fp64, and in the precision of its inputs."""
    exact = _blockwise(shape, Inputs(*(x.double() for x in part)), options, upcast=True)
    return exact, _blockwise(shape, part, options, upcast=False)


def judge(
    shape: Shape, attend: Attend, inputs: Inputs, expected: Truth, is_ours: bool = True
) -> Verdict:
    """A provider's results beside the truth. Peers are not held to our bound on the mean error."""
    results = results_of(shape, attend, inputs)
    verdicts = []
    for name, place, exact, plain in expected:
        got = results[name][place]
        verdict = tolerance.judge(got, exact, plain)
        passes = verdict.ok if is_ours else verdict.max_error <= verdict.max_bound
        verdicts.append(Verdict(f"{name}: {verdict}", verdict.max_error, verdict.max_bound, passes))
    failed = [verdict for verdict in verdicts if not verdict.passes]
    return max(failed or verdicts, key=lambda verdict: verdict.max_error / (verdict.bound or 1))


def results_of(shape: Shape, attend: Attend, inputs: Inputs) -> dict[str, Tensor]:
    """Out, and the gradients where the shape's direction asks for them."""
    if shape.direction == "fwd":
        with torch.no_grad():
            return {"out": attend(*inputs[:3])}
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _blockwise(
    shape: Shape, part: Inputs, options: dict[str, Any], upcast: bool
) -> dict[str, Tensor]:
    """One key head, a block of queries at a time; dk and dv are summed in fp32 or better."""
    q, k, v, dout = part
    rows = max(BLOCK_ELEMENTS[q.device.type] // (shape.seqlen_k * q.shape[2]), 1)
    if shape.alibi and not shape.causal:
        rows = shape.seqlen_q  # distances are from the last key, which no block but one ends at
    outs, dqs = [], []
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    with_grads = shape.direction != "fwd"
    for start in range(0, shape.seqlen_q, rows):
        stop = min(start + rows, shape.seqlen_q)
        # Bottom-right causal of these rows alone: cut the keys where the last of them stops seeing.
        last = shape.seqlen_k - shape.seqlen_q + stop if shape.causal else shape.seqlen_k
        leaves = [
            x.detach().requires_grad_(with_grads)
            for x in (q[:, start:stop], k[:, :last], v[:, :last])
        ]
        out = attention_reference(*leaves, **options, upcast=upcast)
        outs.append(out.detach())
        if with_grads:
            dq_rows, dk_rows, dv_rows = torch.autograd.grad(out, leaves, dout[:, start:stop])
            dqs.append(dq_rows)
            dk[:, :last] += dk_rows
            dv[:, :last] += dv_rows
    results = {"out": torch.cat(outs, 1)}
    if with_grads:
        results |= {"dq": torch.cat(dqs, 1), "dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}
    return results
