"""What a provider's results are judged by: the oracle, and the plain runs whose errors are allowed.

One key head with its query heads is computed a block of queries at a time, so that memory stays
bounded at any length: in fp64, as plain torch in the precision of the inputs and, where gradients
are asked for, as the run that stores out and LSE (`testing.run.recomputed`). A gradient computed
from those has errors of its own, and in fp32 they are most of what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from tilewise import attention_reference
from tilewise.explain.shapes import Shape
from tilewise.problem import Extras
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.inputs import Inputs as CaseInputs
from tilewise.testing.run import recomputed

Tensor = torch.Tensor
Results = dict[str, Tensor]
BLOCK_ELEMENTS = {
    "cuda": 1 << 27,
    "cpu": 1 << 24,
}  # of one block of scores: 1 GiB and 128 MiB in fp64


class Inputs(NamedTuple):
    """(batch, seqlen, nheads, headdim), in a provider's memory order; packed (tokens, nheads,
    headdim). A bias is (1, nheads, seqlen, seqlen).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What attention is called with by position."""
        return self[:3] if self.bias is None else (*self[:3], self.bias)

    def leaves(self, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
        """The arguments of a call that is to be differentiated, and those that want a gradient."""
        arguments = [x.detach() for x in self.arguments]
        wanted = arguments[: 4 if shape.modifier == "learned-bias" else 3]
        return arguments, [x.requires_grad_() for x in wanted]


class Standards(NamedTuple):
    """Results by name: out, and dq, dk, dv and dbias where the shape's direction asks for them."""

    exact: Results
    plain: Results
    recomputed: Results  # gradients alone: an LSE that is stored changes no out

    def plains(self, name: str) -> tuple[Tensor, ...]:
        """The plain runs whose errors a result may have."""
        return tuple(run[name] for run in self[1:] if name in run)


def standards(
    shape: Shape, part: Inputs, options: dict[str, Any], first: tuple[int, int] = (0, 0)
) -> Standards:
    """The standards of one key head, `part`; `first` are its first batch and query head. `options`
    are those of `attention`.
    """
    options = dict(options)
    if (block_mask := options.pop("block_mask", None)) is not None:
        options["mask_mod"] = block_mask.mask  # it is the whole mask, and here are parts
    wide = part._replace(**{name: x.double() for name, x in _given(part).items()})
    exact = _blockwise(shape, wide, options, first, _by_autograd(shape, upcast=True))
    plain = _blockwise(shape, part, options, first, _by_autograd(shape, upcast=False))
    if shape.direction == "fwd":
        return Standards(exact, plain, {})
    recomputed = _blockwise(shape, part, options, first, _recomputed)
    del recomputed["out"]
    return Standards(exact, plain, recomputed)


def joined(parts: list[Standards]) -> Standards:
    """Standards of parts, concatenated."""
    return Standards(
        *({name: torch.cat([run[name][0] for run in of]) for name in of[0]} for of in zip(*parts))
    )


def _given(part: Inputs) -> dict[str, Tensor]:
    return {name: x for name, x in part._asdict().items() if x is not None}


def _by_autograd(shape: Shape, upcast: bool) -> Callable[[Inputs, dict[str, Any]], Results]:
    """The reference, and its gradients as autograd finds them."""

    def attend(block: Inputs, options: dict[str, Any]) -> Results:
        options = {**options, "bias": block.bias, "upcast": upcast}
        if shape.direction == "fwd":
            with torch.no_grad():
                return {"out": cast(Tensor, attention_reference(*block[:3], **options))}
        leaves = {"q": block.q, "k": block.k, "v": block.v}
        if (
            block.bias is not None and shape.modifier == "learned-bias"
        ):  # wide, as its gradient is yet to be summed
            leaves["bias"] = block.bias.to(torch.promote_types(block.bias.dtype, torch.float32))
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        out = cast(Tensor, attention_reference(**{**options, **leaves}))
        grads = torch.autograd.grad(out, list(leaves.values()), block.dout)
        return {"out": out.detach(), **{f"d{name}": x for name, x in zip(leaves, grads)}}

    return attend


def _recomputed(block: Inputs, options: dict[str, Any]) -> Results:
    """The run of FlashAttention-2."""
    asked = {name: options[name] for name in ("causal", "window", "softcap")}
    tensors = {name: options[name] for name in ("alibi_slopes", "sinks")}
    others = {name: x for name, x in options.items() if name not in asked | tensors}
    case = Case("bench", Sizes(), Features(**asked))
    inputs = CaseInputs(*block[:4], None, Extras(**tensors, bias=block.bias))
    return recomputed(case, inputs, **others)


def _blockwise(
    shape: Shape,
    part: Inputs,
    options: dict[str, Any],
    first: tuple[int, int],
    attend: Callable[[Inputs, dict[str, Any]], Results],
) -> Results:
    """A block of queries at a time; dk and dv are summed in fp32 or better."""
    q, k, v, dout, bias = part
    rows = max(BLOCK_ELEMENTS[q.device.type] // (shape.seqlen_k * q.shape[2]), 1)
    if shape.alibi and not shape.causal:
        rows = shape.seqlen_q  # distances are from the last key, which no block but one ends at
    by_rows: dict[str, list[Tensor]] = {}
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = {"dk": torch.zeros_like(k, dtype=wide), "dv": torch.zeros_like(v, dtype=wide)}
    for start in range(0, shape.seqlen_q, rows):
        stop = min(start + rows, shape.seqlen_q)
        # Bottom-right causal of these rows alone: cut the keys where the last of them stops seeing.
        last = shape.seqlen_k - shape.seqlen_q + stop if shape.causal else shape.seqlen_k
        at = slice(start, stop)
        bias_rows = None if bias is None else bias[:, :, at]
        block = Inputs(q[:, at], k[:, :last], v[:, :last], dout[:, at], bias_rows)
        found = attend(block, {**options, "first": (*first, start)})
        for name in ("out", "dq", "dbias"):
            if name in found:
                by_rows.setdefault(name, []).append(found[name])
        for name, total in sums.items():
            if name in found:
                total[:, :last] += found[name]
    results = {
        name: torch.cat(blocks, 2 if name == "dbias" else 1) for name, blocks in by_rows.items()
    }
    if shape.direction == "fwd":
        return results
    dtype = results["dq"].dtype
    return results | {name: total.to(dtype) for name, total in sums.items()}
