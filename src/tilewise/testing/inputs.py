"""Inputs of a test: equal values on every device, in memory as users lay it out.

Values come from a seed, on the CPU. Each tensor lies between margins of NaN, so that reads past its
end, or between its strides, are detected.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..features import FEATURES
from ..problem import NO_EXTRAS, Extras
from .cases import Features, Sizes

Tensor = torch.Tensor
MARGIN = 512


class Inputs(NamedTuple):
    """Tensors of a call, those of a backward included. q, k, v and dout are in `layout` order."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    extras: Extras = NO_EXTRAS
    learned: Tensor | None = None  # (nheads, 33), fp32


def make_inputs(
    sizes: Sizes,
    features: Features,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Inputs:
    """Inputs of one call. Equal arguments give equal values, on any device and in any layout."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v = sizes
    q = normal((batch, seqlen_q, nheads, headdim))
    k = normal((batch, seqlen_k, nheads_k, headdim))
    v = normal((batch, seqlen_k, nheads_k, headdim_v or headdim))
    dout = normal((batch, seqlen_q, nheads, headdim_v or headdim))
    dlse = normal((batch, nheads, seqlen_q)) if features.lse_grad else None
    if features.logits:
        q, k = _force_logits(q, k, features=features)
    slopes = None
    if features.alibi:
        slopes = torch.rand((batch, nheads), generator=generator)
        if features.alibi == "heads":
            slopes = slopes[0] if batch else torch.ones(nheads)
    extents = dict(batch=batch, nheads=nheads)
    flagged: dict[str, Any] = {  # tensors that a feature asks for by name
        name: normal([extents[size] for size in feature.shapes[0]]).to(device, dtype)
        for name, feature in FEATURES.items()
        if feature.shapes and getattr(features, name, None) is True
    }
    used = features.seqused_k
    used = None if used is None else torch.tensor(used, dtype=torch.int32, device=device)
    place = MEMORY[features.memory]
    q, k, v = place(q.to(device, dtype), k.to(device, dtype), v.to(device, dtype))
    if used is not None:  # no kernel may read past seqused_k
        for x in (k, v):
            x[torch.arange(seqlen_k, device=device) >= used.long().unsqueeze(1)] = math.nan
    dout = guarded(dout.to(device, dtype))
    if features.layout == "bhsd":
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    dlse = None if dlse is None else dlse.to(device)
    slopes = None if slopes is None else slopes.to(device)
    bias = None
    if features.bias:
        full = zip("bhqk", (batch, nheads, seqlen_q, seqlen_k))
        bias = normal([n if name in features.bias else 1 for name, n in full])
        bias = guarded(bias.to(device, dtype))
    learned = guarded(normal((nheads, 33)).to(device)) if features.learned else None
    extras = Extras(alibi_slopes=slopes, seqused_k=used, bias=bias, **flagged)
    return Inputs(q, k, v, dout, dlse, extras, learned)


def _force_logits(q: Tensor, k: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """q and k with scores near + or - logits: all of one row's have one sign, so LSE is extreme."""
    headdim = q.shape[3]
    size = math.sqrt(features.logits / (features.scale or headdim**-0.5) / headdim)
    sign = torch.where(torch.arange(q.shape[1]) % 3 == 0, -1.0, 1.0).view(-1, 1, 1)
    noise = 0.1 / math.sqrt(features.logits)
    return sign * size * (1 + noise * q), size * (1 + noise * k)


def guarded(x: Tensor) -> Tensor:
    """A copy of x with its strides, between margins of NaN."""
    memory = x.new_full((x.numel() + 2 * MARGIN,), math.nan)
    strides = torch.empty_like(x).stride()  # dense, in x's order
    return memory.as_strided(x.shape, strides, MARGIN).copy_(x)


def swapped(dim: int, other: int) -> Callable[..., tuple[Tensor, ...]]:
    """Makes views of memory with two dimensions of (batch, seqlen, nheads, headdim) swapped."""

    def place(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        tensors = (x.transpose(dim, other).contiguous() for x in (q, k, v))
        return tuple(guarded(x).transpose(dim, other) for x in tensors)

    return place


def sliced(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Slices in every dimension of larger tensors, at odd offsets."""

    def cut(x: Tensor) -> Tensor:
        batch, seqlen, nheads, headdim = x.shape
        larger = x.new_full((batch + 1, seqlen + 3, nheads + 1, headdim + 5), math.nan)
        return larger[1:, 2 : 2 + seqlen, 1:, 3 : 3 + headdim].copy_(x)

    return cut(q), cut(k), cut(v)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Heads of q, k and v side by side in one tensor, as a fused projection gives them."""
    if q.shape[1] != k.shape[1] or q.shape[3] != v.shape[3]:
        raise ValueError("packed q, k and v have one seqlen and one headdim")
    joined = guarded(torch.cat([q, k, v], dim=2))
    return joined.split([q.shape[2], k.shape[2], v.shape[2]], dim=2)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """One row of keys for the whole batch, with stride 0."""
    return guarded(q), *(guarded(x[:1]).expand_as(x) for x in (k, v))


MEMORY = {
    "dense": swapped(0, 0),
    "transposed": swapped(1, 2),
    "sequence_first": swapped(0, 1),
    "sliced": sliced,
    "packed": packed,
    "expanded": expanded,
}


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within this block `torch.empty` and its variants give memory full of NaN.

    >>> with poisoned():
    ...     torch.empty(2)
    tensor([nan, nan])

    An element that a backend allocates and forgets to write is then seen.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic  # stubs lack what is set on the module itself
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        switches.fill_uninitialized_memory = fill
