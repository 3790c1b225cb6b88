"""Packed sequences in the matrix: one call for all of them, judged by what each is alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..features import FEATURES
from ..problem import Extras
from .cases import PackedCase
from .inputs import Inputs, guarded

Tensor = torch.Tensor
ROW_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # the dimension of sequences


def share(parts: list[Inputs]) -> list[Inputs]:
    """The inputs of sequences with one set of those tensors that have an entry a head alone."""
    first = zip(Extras._fields, parts[0].extras.optional)
    of_heads = {
        name: x
        for name, x in first
        if x is not None and FEATURES[name].shape_of(x.dim()) == ("nheads",)
    }
    return [x._replace(extras=x.extras._replace(**of_heads)) for x in parts]


def pack(case: PackedCase, parts: list[Inputs]) -> tuple[Inputs, dict[str, Tensor]]:
    """The tensors of one call, and the arguments that say where its sequences are."""
    joined = {}
    for name in ("q", "k", "v", "dout", "dlse"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is not None:
            dim = 2 if name == "dlse" else 1
            value = 0.0 if name == "dlse" else math.nan  # padding must not be read
            joined[name] = guarded(_cat(case, tensors, dim, value=value).squeeze(0))
    extras = parts[0].extras
    if extras.alibi_slopes is not None and extras.alibi_slopes.dim() == 2:
        slopes = [x for x in (part.extras.alibi_slopes for part in parts) if x is not None]
        extras = extras._replace(alibi_slopes=torch.cat(slopes))
    packed = parts[0]._replace(**joined, extras=extras)
    lengths = {}
    for tensor, rows in (("q", case.queries), ("k", case.keys)):
        used = torch.tensor(rows, dtype=torch.int32, device=packed.q.device)
        starts = F.pad((used + case.spare).cumsum(0, dtype=torch.int32), (1, 0))
        lengths[f"cu_seqlens_{tensor}"] = starts
        if case.spare:
            lengths[f"seqused_{tensor}"] = used
    return packed, lengths


def join(case: PackedCase, runs: tuple[dict[str, Tensor], ...]) -> dict[str, Tensor]:
    """The results of all sequences as those of one call."""
    joined = {}
    for name in runs[0]:
        tensors = [results[name] for results in runs]
        if name in ROW_DIM:
            value = -math.inf if name == "lse" else 0.0
            joined[name] = _cat(case, tensors, ROW_DIM[name], value=value).squeeze(0)
        else:  # the gradient of what all sequences share
            joined[name] = sum(tensors)
    return joined


def _cat(case: PackedCase, tensors: list[Tensor], dim: int, value: float) -> Tensor:
    """Concatenates the sequences, each followed by its padding rows, and all by the tail."""
    before = [0, 0] * (tensors[0].dim() - 1 - dim)
    padded = [F.pad(x, [*before, 0, case.spare], value=value) for x in tensors]
    return F.pad(torch.cat(padded, dim), [*before, 0, case.tail], value=value)
