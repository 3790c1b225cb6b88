"""Computes one case and says what is wrong with it."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

import tilewise
from tilewise.sparse import create_block_mask
from tilewise.testing.inputs import poisoned

from . import functions
from .budget import Given, Standard, standard
from .cases import Case
from .inputs import Inputs, by_rows, lse_by_rows, make_inputs
from .refusals import may_refuse

Tensor = torch.Tensor
Attend = Callable[..., tuple[Tensor, Tensor]]


class Outcome(NamedTuple):
    """What became of a case: `faults` is empty where it is right; `refused` is the reason."""

    case: Case
    faults: tuple[str, ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        return "\n    ".join((str(self.case), *self.faults))


def run(case: Case, attend: Attend = tilewise.attention) -> Outcome:
    """The outcome of a case; `attend` is what stands in for `tilewise.attention`."""
    inputs = make_inputs(case)
    before = [_bits(x).clone() for x in inputs.memory]
    try:
        # With half of the seeds new memory is full of NaN, which shows what is never written
        fresh = poisoned() if case.seed % 2 else contextlib.nullcontext()
        with case.lane.on_cpu(case.seed), warnings.catch_warnings(), fresh:
            warnings.simplefilter("ignore", tilewise.PerformanceWarning)
            asked = arguments(case, inputs)
            results = _compute(attend, inputs, asked)
            faults = _again(case, attend, inputs, asked, results)
    except NotImplementedError as refusal:
        allowed = may_refuse(case, *(inputs.leaves[name] for name in "qkv"))
        return Outcome(case, () if allowed else (f"refused: {refusal}",), str(refusal))
    except Exception as error:
        return Outcome(case, (f"raised {type(error).__name__}: {error}",))
    if any(not torch.equal(x, _bits(y)) for x, y in zip(before, inputs.memory)):
        faults.append("an input, or what lies around it, was written")
    right = standard(question(case, inputs))
    return Outcome(case, tuple(faults + compare(case, results, right)))


def arguments(case: Case, inputs: Inputs) -> dict:
    """What `attention` is called with."""
    look, leaves = case.look, dict(inputs.leaves)
    read = inputs.captured | {
        name.partition(".")[2]: leaves.pop(name) for name in list(leaves) if "." in name
    }
    asked = leaves | inputs.lengths
    asked |= {name: getattr(case, name) for name in ("scale", "softcap", "dropout_p")}
    asked |= {"causal": look.causal, "layout": look.layout, "deterministic": look.deterministic}
    asked |= {"alibi_slopes": inputs.slopes, "dropout_rng": inputs.rng}
    asked |= {"backend": case.lane.backend, "return_lse": True}
    if look.has("window"):
        asked["window"] = case.left, case.right
    if look.score:
        asked["score_mod"] = functions.SCORES[look.score](read)
    if look.mask:
        asked["mask_mod"] = functions.MASKS[look.mask](read)
    if look.block:
        seqlen_k = case.keys[0] + case.spare_k[0]
        sizes = len(case.queries), case.look.nheads, case.queries[0], seqlen_k
        how = dict(device=case.lane.device, block=look.block)
        asked["block_mask"] = create_block_mask(asked.pop("mask_mod"), *sizes, **how)
    return asked


def question(case: Case, inputs: Inputs) -> Given:
    """The same call, to the oracle."""
    tensors = {name: x.detach() for name, x in inputs.leaves.items()}
    tensors |= {f"captured.{name}": x for name, x in inputs.captured.items()}
    tensors |= {name: by_rows(case, tensors[name]) for name in "qkv"}
    if inputs.slopes is not None:
        tensors["slopes"] = inputs.slopes
    dlse = None if inputs.dlse is None else lse_by_rows(case, inputs.dlse)
    cap = max(case.softcap or 0.0, 5.0 if case.look.score == "softcapped" else 0.0)
    is_equal = case.values == "equal" or case.logits > 0
    given = tensors, tuple(inputs.leaves), inputs.spans, inputs.terms
    return Given(
        *given,
        by_rows(case, inputs.dout),
        dlse,
        cap,
        case.lane.tanh_off,
        case.lane.lse_off,
        is_equal,
    )


def compare(case: Case, results: dict[str, Tensor], right: Standard) -> list[str]:
    """A line for each tensor that is over its budget."""
    faults = []
    for name, expected in right.values.items():
        found = results[name]
        if name == "lse":
            found = lse_by_rows(case, found)
        elif name in ("out", "dq", "dk", "dv"):
            found = by_rows(case, found)
            if found.shape == expected.shape and found[right.zeros[name]].any():
                faults.append(f"{name} is not 0 where nothing is seen")
        if found.shape != expected.shape:
            faults.append(f"{name} is {tuple(found.shape)}, not {tuple(expected.shape)}")
            continue
        error = (found.double() - expected).abs()
        error = torch.where(found.double() == expected, 0.0, error)  # -inf
        if not error.numel():
            continue
        worst, allowed = error.max().item(), right.allowed[name]
        if not worst <= allowed:  # NaN too
            at = tuple(i.item() for i in torch.unravel_index(error.argmax(), error.shape))
            if math.isnan(worst):
                at = tuple(error.isnan().nonzero()[0].tolist())
            faults.append(
                f"{name}: {worst:.2e} off, {allowed:.2e} allowed, at {at}: "
                f"{found[at].item():.7g} for {expected[at].item():.7g}"
            )
    return faults


def _compute(attend: Attend, inputs: Inputs, asked: dict) -> dict[str, Tensor]:
    out, lse = attend(**asked)
    return {"out": out.detach(), "lse": lse.detach()} | _grads(inputs, out, lse)


def _grads(inputs: Inputs, out: Tensor, lse: Tensor, keep: bool = False) -> dict[str, Tensor]:
    leaves = inputs.leaves
    outputs = (out,) if inputs.dlse is None else (out, lse)
    into = (inputs.dout, inputs.dlse)[: len(outputs)]
    found = torch.autograd.grad(outputs, list(leaves.values()), into, retain_graph=keep)
    return {f"d{name}": grad for name, grad in zip(leaves, found)}


def _again(
    case: Case, attend: Attend, inputs: Inputs, asked: dict, results: dict[str, Tensor]
) -> list[str]:
    """What a second call gives other bits of: out and lse, and gradients if deterministic."""
    if case.seed % case.lane.again:
        return []
    if case.look.deterministic:
        second = _compute(attend, inputs, asked)
    else:
        second = dict(zip(("out", "lse"), (x.detach() for x in attend(**asked))))
    return [
        f"{name} has other bits in a second call"
        for name, x in second.items()
        if not torch.equal(_bits(x), _bits(results[name]))
    ]


def _bits(x: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(whole[x.itemsize])
