"""The tensors of a case: values from its seed, in memory as users have it, with NaN around every
view and in every row that is not used.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .cases import Case
from .formulas import MASKS, SCORES
from .functions import captured
from .reference import Span, Terms

Tensor = torch.Tensor
MARGIN = 512


class Inputs(NamedTuple):
    """What a call takes, in its layout, and the same for the oracle, by rows."""

    leaves: dict[str, Tensor]  # tensors that require a gradient, by name
    captured: dict[str, Tensor]  # what masks and score functions read, without a gradient
    slopes: Tensor | None
    lengths: dict[str, Tensor]
    rng: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    memory: list[Tensor]  # every buffer, margins included, none of which a call may change
    spans: list[Span]
    terms: Terms


def make_inputs(case: Case) -> Inputs:
    """The inputs of a case, on its device."""
    look, device = case.look, torch.device(case.lane.device)
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, look.dtype)
    spans = _spans(case)
    q, k, v, dout = _values(case, generator)
    memory = []

    def placed(x: Tensor, kind: str = "dense", dtype: torch.dtype | None = None) -> Tensor:
        memory_of_x, view = PLACES[kind](x.to(device, dtype or x.dtype))
        memory.append(memory_of_x)
        return view

    small = f"shifted by {case.shift}" if case.shift else "dense"
    rows = _unused(case, "q"), _unused(case, "k"), _unused(case, "k"), _unused(case, "q")
    for x, unused in zip((q, k, v, dout), rows):
        x[unused] = math.nan
    kind = _kind(case)
    if kind == "fused":
        joined = placed(torch.cat([q, k, v], -2), "dense", dtype)
        q, k, v = joined.split([look.nheads, look.nheads_k, look.nheads_k], -2)
    else:
        q = placed(q, "dense" if kind == "expanded" else kind, dtype)
        k, v = (placed(x, kind, dtype) for x in (k, v))
    kinds = ("dense", "transposed", "padded", "dense" if look.has("used") else "expanded")
    kinds = (*kinds, "by 1", "by 2", "by 4")
    dout = placed(dout, kinds[case.seed % len(kinds)], dtype)
    if look.layout == "bhsd":
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    leaves = {"q": q, "k": k, "v": v}
    if look.has("sinks"):
        sinks = torch.randn(look.nheads, generator=generator) * (1 + 8 * (case.seed % 4 == 0))
        leaves["sinks"] = placed(sinks, small, dtype)
    if look.bias:
        full = len(spans), look.nheads, case.queries[0], case.keys[0] + case.spare_k[0]
        shape = [n if name in look.bias else 1 for name, n in zip("bhqk", full)]
        bias = torch.randn(shape, generator=generator)
        bias_dtype = torch.float32 if look.bias_dtype else dtype
        kinds = ("dense", "transposed", "padded", "by 1", "by 2", "by 4")
        leaves["bias"] = placed(bias, kinds[case.seed % len(kinds)], bias_dtype)
    longest = max((*case.queries, *(a + b for a, b in zip(case.keys, case.spare_k))))
    read = captured((look.score, look.mask), len(spans), look.nheads, longest, generator)
    read = {name: x.to(device) for name, x in read.items()}
    if look.learned:
        name = next(name for name, x in read.items() if x.is_floating_point())
        leaves[f"captured.{name}"] = placed(read.pop(name))
    slopes = torch.rand((len(spans), look.nheads), generator=generator)
    slopes = slopes if look.slopes == "batch" else slopes[0]
    dlse = torch.randn(_lse_shape(case), generator=generator).unsqueeze(-1)
    kinds = ("dense", "transposed", "padded")
    dlse = placed(dlse, kinds[case.seed % 3], torch.promote_types(dtype, torch.float32)).squeeze(-1)
    rng = torch.tensor(case.rng, device=device)
    slopes = placed(slopes, small)
    given = leaves | dict(dout=dout, dlse=dlse)
    lazy = {name: _negated(x) for name, x in given.items() if name in case.lazy}
    leaves |= {name: x for name, x in lazy.items() if name in leaves}
    dout, dlse = lazy.get("dout", dout), lazy.get("dlse", dlse)
    return Inputs(
        leaves={name: x.detach().requires_grad_() for name, x in leaves.items()},
        captured=read,
        slopes=slopes if look.slopes else None,
        lengths={name: placed(x, small) for name, x in _lengths(case).items()},
        rng=rng if case.dropout_p else None,
        dout=dout,
        dlse=dlse if look.lse_grad else None,
        memory=memory,
        spans=spans,
        terms=Terms(
            scale=case.scale or look.headdim**-0.5,
            top_left=look.causal == "top_left",
            left=case.left,
            right=0 if look.causal else case.right,
            softcap=case.softcap,
            score=SCORES.get(look.score),
            mask=MASKS.get(look.mask),
            dropout_p=case.dropout_p,
            rng=rng,
        ),
    )


def by_rows(case: Case, x: Tensor) -> Tensor:
    """(rows, heads, headdim) of q, k, v, out or a gradient of them."""
    if case.look.packed:
        return x
    return (x.transpose(1, 2) if case.look.layout == "bhsd" else x).flatten(0, 1)


def lse_by_rows(case: Case, lse: Tensor) -> Tensor:
    """(nheads, rows)."""
    return lse if case.look.packed else lse.transpose(0, 1).flatten(1)


def _spans(case: Case) -> list[Span]:
    spans, first_q, first_k = [], 0, 0
    lengths = zip(case.queries, case.spare_q, case.keys, case.spare_k)
    for number, (queries, spare_q, keys, spare_k) in enumerate(lengths):
        spans.append(Span(number, first_q, queries, first_k, keys))
        first_q, first_k = first_q + queries + spare_q, first_k + keys + spare_k
    return spans


def _values(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v and dout in (batch, seqlen, nheads, headdim) or (rows, nheads, headdim) order."""
    look = case.look

    def normal(used: tuple, spare: tuple, tail: int, heads: int, headdim: int) -> Tensor:
        total = sum(used) + sum(spare) + tail
        shape = (total,) if look.packed else (len(used), total // len(used))
        return torch.randn((*shape, heads, headdim), generator=generator)

    rows_q = case.queries, case.spare_q, case.tail_q
    rows_k = case.keys, case.spare_k, case.tail_k
    q = normal(*rows_q, look.nheads, look.headdim)
    k, v = (normal(*rows_k, look.nheads_k, n) for n in (look.headdim, look.headdim_v))
    dout = normal(*rows_q, look.nheads, look.headdim_v)
    if case.logits:  # scores near + or - logits, of one sign in a row
        size = math.sqrt(case.logits / (case.scale or look.headdim**-0.5) / look.headdim)
        sign = torch.where(torch.arange(q.shape[-3]) % 3 == 0, -1.0, 1.0).view(-1, 1, 1)
        noise = 0.1 / math.sqrt(case.logits)
        q, k = sign * size * (1 + noise * q), size * (1 + noise * k)
    elif case.values == "spread":
        q = 6 * q
    if case.values == "equal":
        k, v, dout = k * 0 + 0.25, v * 0 + 1.7, dout * 0 + 0.3
    return q, k, v, dout


def _unused(case: Case, side: str) -> Tensor:
    """bool, (rows,) or (batch, seqlen): rows that must not be read."""
    used, spare = (case.queries, case.spare_q) if side == "q" else (case.keys, case.spare_k)
    flags = [torch.arange(a + b) >= a for a, b in zip(used, spare)]
    if not case.look.packed:
        return torch.stack(flags)
    tail = case.tail_q if side == "q" else case.tail_k
    return torch.cat([*flags, torch.ones(tail, dtype=torch.bool)])


def _lengths(case: Case) -> dict[str, Tensor]:
    """cu_seqlens and seqused, int32."""
    found = {}
    for side, used, spare in (("q", case.queries, case.spare_q), ("k", case.keys, case.spare_k)):
        if case.look.packed:
            rows = torch.tensor([0, *(a + b for a, b in zip(used, spare))])
            found[f"cu_seqlens_{side}"] = rows.cumsum(0).int()
        if case.look.has("used") and (case.look.packed or side == "k"):
            found[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32)
    return found


def _lse_shape(case: Case) -> tuple[int, ...]:
    rows, nheads = sum(case.queries) + sum(case.spare_q) + case.tail_q, case.look.nheads
    if case.look.packed:
        return nheads, rows
    return len(case.queries), nheads, rows // len(case.queries)


def _kind(case: Case) -> str:
    """How q, k and v lie, where what was drawn fits."""
    look, kind = case.look, case.look.memory
    if kind == "fused" and (case.queries, look.headdim) != (case.keys, look.headdim_v):
        return "dense"
    if kind == "fused" and (
        look.has("used") or case.values == "equal" or case.tail_q or case.tail_k
    ):
        return "dense"
    return "sliced" if kind == "expanded" and look.has("used") else kind


def _dense(x: Tensor) -> tuple[Tensor, Tensor]:
    return _shifted(x, 0)


def _negated(x: Tensor) -> Tensor:
    """The same values, where no two elements share memory, by their opposites in memory."""
    return x if 0 in x.stride() else torch._neg_view(x.neg_())


def _shifted(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """At an element that is not at a multiple of 16 bytes."""
    memory = x.new_full((x.numel() + 2 * MARGIN,), math.nan if x.is_floating_point() else -1)
    at = MARGIN + by
    return memory, memory[at : at + x.numel()].view(x.shape).copy_(x)


def _transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads before rows."""
    memory, view = _dense(x.transpose(-2, -3).contiguous())
    return memory, view.transpose(-2, -3)


def _sequence_first(x: Tensor) -> tuple[Tensor, Tensor]:
    memory, view = _dense(x.transpose(0, 1).contiguous())
    return memory, view.transpose(0, 1)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Part of a larger tensor, at multiples of 8 elements if headdim is one."""
    return _part(x, 8)


def _sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    """Part of a larger tensor, at odd places."""
    return _part(x, 3)


def _part(x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    *batch, seqlen, nheads, headdim = x.shape
    memory = x.new_full((*batch, seqlen + 5, nheads + 1, headdim + 2 * at), math.nan)
    return memory, memory[..., 2 : 2 + seqlen, 1:, at : at + headdim].copy_(x)


def _expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of the batch for all."""
    memory, view = _dense(x[:1])
    return memory, view.expand_as(x)


PLACES = {
    "dense": _dense,
    "transposed": _transposed,
    "sequence first": _sequence_first,
    "padded": _padded,
    "sliced": _sliced,
    **{f"by {n}": functools.partial(_part, at=n) for n in (1, 2, 4)},
    **{f"shifted by {n}": functools.partial(_shifted, by=n) for n in (1, 2)},
    "expanded": _expanded,
}
