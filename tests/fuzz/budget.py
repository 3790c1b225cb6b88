"""What a result may be off by: the oracle, and the largest error allowed for each of its tensors.

An element of a tensor X may be off by

    2 x the largest error of plain code in the same precision (the oracle's own code, run in it)
    + 2 ulps of the largest element of X
    + 2 x what the rounding of `out` makes of delta = rowsum(dout * out), which the backward reads:
      dS is off by p times that, as the gradient of lse by that number is
    + 2 ulps of the largest score, and one of 1, times the sum of the sizes of X's terms, since s is
      rounded behind lse and, in p = exp(s - lse), again; ulps are those of the sums, fp32 or fp64,
      and one for every 4 terms where all are about equal and so rounded to one side
    + 2^-10 of the largest score, times that sum, where a softcap is a GPU's own instruction for
      tanh, whose error that is

lse may be off by 2e-5 of the largest score, or of 1 (1e-12 in fp64), and by that of a softcap; in
half precision also by 2^-13 where torch's own kernel for the CPU may serve, whose exp is no better.
Plain code keeps its scores in fp32, so that in half precision the budget is tighter than that of a
matrix of scores in half.

Rows that see no key, and gradients of keys that no query sees, are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .reference import Result, Span, Steps, Terms, attention

Tensor = torch.Tensor


class Standard(NamedTuple):
    """What is right, and how far from it is allowed."""

    values: dict[str, Tensor]  # fp64
    allowed: dict[str, float]
    zeros: dict[str, Tensor]  # bool (rows, heads): where a tensor is exactly 0


class Given(NamedTuple):
    """A question to the oracle: tensors by name and rows, and which gradients are asked for."""

    tensors: dict[str, Tensor]
    wanted: tuple[str, ...]
    spans: list[Span]
    terms: Terms
    dout: Tensor
    dlse: Tensor | None
    softcap: float  # the largest of any kind, 0 for none
    tanh_off: float = 0.0  # of itself
    lse_off: float = 0.0  # what lse may be off by beside, in half precision
    equal: bool = False  # sums are of equal numbers, whose roundings have one sign

    def dtype_of(self, result: str) -> torch.dtype:
        """Of out or of a gradient."""
        return self.tensors["q" if result == "out" else result.removeprefix("d")].dtype

    @property
    def longest(self) -> int:
        """The most rows of queries or keys of a sequence."""
        return max((1, *(max(span.queries, span.keys) for span in self.spans)))

    def grown(self, terms: int) -> float:
        """How many ulps of itself a sum is off by: one for numbers of any sign."""
        return max(1.0, terms / 4) if self.equal else 1.0


def standard(given: Given) -> Standard:
    """The oracle's answer and the budget around it."""
    dtype = given.tensors["q"].dtype
    result, leaves = _attend(given, torch.float64)
    values = {"out": result.out, "lse": result.lse} | _grads(given, result, leaves, keep=True)
    found = _plain(given, dtype)
    by_delta = _rounded_delta(given, result, leaves, dtype)
    sizes, largest = _sizes_of_terms(given, result, leaves)
    exact = torch.promote_types(dtype, torch.float32)
    grown = given.grown(given.tensors["q"].shape[2])
    is_half = dtype.itemsize == 2
    capped = given.tanh_off * min(given.softcap, largest) if is_half else 0.0
    ulp = torch.finfo(exact).eps * (2 * largest * grown + given.grown(given.longest)) + capped
    # fp64 is the oracle's own: its plain run is one in fp32, whose errors are 2^29 times as large,
    # though not the same ones
    finer = 2**-27 if dtype == torch.float64 else 1.0
    values = {name: x.detach() for name, x in values.items()}
    allowed = {
        name: 2 * finer * _largest(found[name].double() - x)
        + 2 * _ulp(x, given.dtype_of(name))
        + 2 * by_delta.get(name, 0.0)
        + ulp * sizes[name]
        for name, x in values.items()
        if name != "lse"
    }
    relative = 1e-12 if exact == torch.float64 else 2e-5
    allowed["lse"] = relative * max(1.0, largest) + capped + (given.lse_off if is_half else 0.0)
    return Standard(values, allowed, _zeros(given, result))


def _attend(given: Given, dtype: torch.dtype | None) -> tuple[Result, dict[str, Tensor]]:
    """The result, and the tensors that want gradients, in a dtype or each in its own."""
    tensors = {
        name: (x.to(dtype) if dtype and x.is_floating_point() else x).detach()
        for name, x in given.tensors.items()
    }
    leaves = {name: tensors[name].requires_grad_() for name in given.wanted}
    return attention(tensors, given.spans, given.terms), leaves


def _plain(given: Given, dtype: torch.dtype) -> dict[str, Tensor]:
    """out and the gradients of plain code in the precision of the call."""
    result, leaves = _attend(given, torch.float32 if dtype == torch.float64 else None)
    return {"out": result.out.detach()} | _grads(given, result, leaves)


def _grads(
    given: Given, result: Result, leaves: dict[str, Tensor], keep: bool = False
) -> dict[str, Tensor]:
    outputs = [result.out] if given.dlse is None else [result.out, result.lse]
    into = [given.dout, given.dlse][: len(outputs)]
    into = [x.to(y.dtype) for x, y in zip(into, outputs)]
    grads = _grad(outputs, list(leaves.values()), into, keep)
    return {f"d{name}": grad for name, grad in zip(leaves, grads)}


def _grad(outputs: list, inputs: list, into: list, keep: bool = False) -> list[Tensor]:
    if not any(x.requires_grad for x in outputs):  # no sequence has a row
        return [torch.zeros_like(x) for x in inputs]
    how = dict(retain_graph=keep, allow_unused=True, materialize_grads=True)
    pairs = [(x, y) for x, y in zip(outputs, into) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], inputs, [y for _, y in pairs], **how)


def _rounded_delta(
    given: Given, result: Result, leaves: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """The largest change of each gradient where delta is off as roundings of `out` may make it."""
    dout = given.dout.double()
    rounded = (dout * (result.out.to(dtype).double() - result.out)).sum(2).T.detach()
    products = (dout * result.out.detach()).nan_to_num(0.0)  # rows that are not used
    typical = torch.finfo(dtype).eps / 2 * products.norm(dim=2).T
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * products.abs().sum(2).T
    sums = sums * max(given.grown(dout.shape[2]), given.grown(given.longest))
    off = torch.maximum(rounded.nan_to_num(0.0).abs(), typical) + sums
    off = torch.where(rounded < 0, -off, off)
    grads = _grad([result.lse], list(leaves.values()), [off], keep=True)
    changes = {f"d{name}": _largest(grad) for name, grad in zip(leaves, grads)}
    # Sums over rows, few numbers each: the roundings of these rows may cancel, the library's not
    shared = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    generator = torch.Generator().manual_seed(0)
    for _ in range(8 if shared else 0):
        signs = torch.randint(2, off.shape, generator=generator).to(off) * 2 - 1
        grads = _grad([result.lse], list(shared.values()), [off.abs() * signs], keep=True)
        for name, grad in zip(shared, grads):
            changes[f"d{name}"] = max(changes[f"d{name}"], _largest(grad))
    return changes


def _sizes_of_terms(
    given: Given, result: Result, leaves: dict[str, Tensor]
) -> tuple[dict[str, float], float]:
    """For each tensor the largest sum of the sizes of its terms; and the largest score."""
    names = ["out", *(f"d{name}" for name in leaves)]
    sizes, largest = dict.fromkeys(names, 0.0), 0.0
    q, k, v = (given.tensors[name].double() for name in "qkv")
    heads = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    fold = torch.nn.functional.one_hot(heads, k.shape[1]).double()  # heads of q into those of k
    for step, (ds, dscores, dsinks) in zip(result.steps, _inner_gradients(given, result)):
        rows, columns = _rows(step)
        p, dout = step.weights.detach(), given.dout[rows].double().abs().transpose(0, 1)
        queries, keys = q[rows].abs().transpose(0, 1), k[columns].abs().transpose(0, 1)[heads]
        values = v[columns].abs().transpose(0, 1)[heads]
        scale = given.terms.scale
        if given.softcap or given.terms.score is not None:
            # A slope like 1 - tanh^2 is off by ulps of 1, however small it is
            ds = ds + 4 * dscores / (1 + _largest(step.products.detach()))
        found = {
            "out": p @ values,
            "dq": scale * ds @ keys,
            "dk": scale * torch.einsum("hij,hid,hg->gjd", ds, queries, fold),
            "dv": torch.einsum("hij,hid,hg->gjd", p, dout, fold),
            "dsinks": dsinks.sum(1),
        }
        if step.products.numel():
            seen = step.scores.detach().masked_fill(~step.seen, 0.0).abs().max().item()
            largest = max(largest, seen, step.products.detach().abs().max().item())
        if step.sinks is not None:
            largest = max(largest, _largest(step.sinks.detach()))
        for name in names:
            if name in found:
                sizes[name] = max(sizes[name], _largest(found[name]))
            elif name == "dbias":
                shape = given.tensors["bias"].shape
                shared = [d for d in range(3) if shape[d + 1] == 1]
                size = _largest(dscores.sum(shared, keepdim=True) if shared else dscores)
                sizes[name] = sizes[name] + size if shape[0] == 1 else max(sizes[name], size)
            else:  # captured tensors: as if an element were read by all pairs of a head
                weight = 1 + step.products.detach().abs()
                sizes[name] += _largest((dscores * weight).sum((1, 2)))
    return sizes, largest


def _inner_gradients(given: Given, result: Result) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each sequence the sizes of the gradients of q k, of the scores and of the sinks."""
    inner = []
    for step in result.steps:
        sinks = step.products.sum(2) * 0 if step.sinks is None else step.sinks
        inner += [step.products, step.scores, sinks]
    outputs = [result.out] if given.dlse is None else [result.out, result.lse]
    into = [x.double() for x in (given.dout, given.dlse) if x is not None]
    found = [x.abs() for x in _grad(outputs, inner, into, keep=True)] if inner else []
    return list(zip(found[::3], found[1::3], found[2::3]))


def _zeros(given: Given, result: Result) -> dict[str, Tensor]:
    """Where out and dq, and dk and dv, are 0 because a row sees no key, or no row sees a key:
    (rows, heads).
    """
    q, k = given.tensors["q"], given.tensors["k"]
    blind = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    unseen = torch.ones(k.shape[:2], dtype=torch.bool, device=q.device)
    for step in result.steps:
        rows, columns = _rows(step)
        blind[rows] = ~step.seen.any(2).T
        groups = step.seen.unflatten(0, (k.shape[1], -1))
        unseen[columns] = ~groups.any(1).any(1).T
    return {"out": blind, "dq": blind, "dk": unseen, "dv": unseen}


def _rows(step: Steps) -> tuple[slice, slice]:
    span = step.span
    return (
        slice(span.first_q, span.first_q + span.queries),
        slice(span.first_k, span.first_k + span.keys),
    )


def _ulp(x: Tensor, dtype: torch.dtype) -> float:
    """Of the largest element; and what is lost where fp32 ends and numbers become 0."""
    info = torch.finfo(dtype)
    return info.eps * _largest(x) + max(info.smallest_normal * info.eps, 2**-126)


def _largest(x: Tensor) -> float:
    return x.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if x.numel() else 0.0
