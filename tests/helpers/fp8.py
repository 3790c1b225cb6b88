"""FP8 calls as kernels take them, and what they should give: fp64, of the dequantised tensors."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tilewise import attention_reference
from tilewise.kernels.common.quantized import (
    COLUMNS,
    FP8,
    KEY_ORDER,
    LARGEST,
    Quantized,
    Scales,
    columns_of,
    packed_columns,
)
from tilewise.kernels.cpu.quantize import drift_of, rows_of
from tilewise.problem import Extras, Problem, Scalars, describe

Tensor = torch.Tensor


class Heads(NamedTuple):
    """Heads and head dims of a call."""

    nheads: int = 2
    nheads_k: int = 2
    headdim: int = 64
    headdim_v: int = 64


HEADS = Heads()


class Fp8Call(NamedTuple):
    """A call of 8-bit tensors, (batch, seqlen, nheads, headdim), packed ones a batch of 1."""

    quantized: Quantized
    v: Tensor  # in its natural order
    extras: Extras
    exact: tuple[Tensor, Tensor, Tensor]  # what q, k and v stand for, fp64


def e4m3(x: Tensor) -> Tensor:
    """Rounded and saturated."""
    return x.float().clamp(-LARGEST, LARGEST).to(FP8)


def transposed(v: Tensor, used: list[int], starts: list[int] | None = None) -> Tensor:
    """V^T, key by key; `used` says how many keys of each sequence are in use."""
    batch, total, nheads_k, headdim_v = v.shape
    bits = v.cpu().view(torch.uint8)
    count = columns_of(total) if starts is None else packed_columns(total, len(used))
    v_t = torch.zeros(batch, nheads_k, headdim_v, count, dtype=torch.uint8)
    of_16 = torch.tensor(KEY_ORDER)
    for sequence, length in enumerate(used):
        row, key, column = sequence, 0, 0
        if starts is not None:
            row, key = 0, starts[sequence]
            column = (key // COLUMNS + sequence) * COLUMNS
        for first in range(0, length, 16):
            order = of_16[of_16 < length - first]
            places = torch.arange(16)[of_16 < length - first]
            found = bits[row, key + first + order].permute(1, 2, 0)
            v_t[row, :, :, column + first + places] = found
    return v_t.view(FP8).to(v.device)


def normal_call(
    queries: list[int],
    keys: list[int],
    heads: Heads = HEADS,
    mean: float = 0.0,
    sink: float = 0.0,
    seed: int = 0,
    **how: Any,
) -> Fp8Call:
    """`call_of` normal q, k and v of these lengths. `mean` is that of V, and key 0 of each sequence
    is `sink` above the others.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for m, n in zip(queries, keys, strict=True):
        q = torch.randn(m, heads.nheads, heads.headdim, generator=generator)
        k = torch.randn(n, heads.nheads_k, heads.headdim, generator=generator)
        v = torch.randn(n, heads.nheads_k, heads.headdim_v, generator=generator) + mean
        if sink and n:  # a direction of its own, which all queries have
            q[..., 0], k[..., 0] = heads.headdim**0.5, 0.0
            k[0], k[0, :, 0], v[0] = 0.0, sink, 0.0  # sinks have small values
        parts.append((q, k, v))
    return call_of(parts, **how)


def call_of(
    parts: Iterable[tuple[Tensor, Tensor, Tensor]],
    packed: bool = False,
    spare: int = 0,
    v_mean: bool = False,
    v_drift: float | None = None,
    device: Any = "cpu",
    **tensors: Tensor | None,
) -> Fp8Call:
    """q, k and v of each sequence, (seqlen, heads, headdim), in 8 bits with their scales.

    Rows that are not in use, those past a sequence's length where there are longer ones, and
    `spare` ones behind each of packed sequences, are NaN. `v_mean` takes the mean of V off before
    rounding, and tells `v_drift`, or what is given for it. `tensors`: more fields of `Extras`.
    """
    codes: list[list[Tensor]] = [[], [], []]
    exact: list[list[Tensor]] = [[], [], []]
    scales, means, rows = [], [], dict[str, list[int]](q=[], k=[])
    drifts = [torch.tensor(0.0)]
    for q, k, v in parts:
        nheads_k = k.shape[1]
        off = v.mean(0) if v_mean and len(v) else torch.zeros(v.shape[1:])
        of = []
        for x, into, into_exact in zip((q, k, v - off), codes, exact):
            grouped = x.abs().unflatten(1, (nheads_k, -1)).flatten(2)
            scale = grouped.amax((0, 2)) / LARGEST if len(x) else torch.ones(nheads_k)
            each = scale.repeat_interleave(x.shape[1] // nheads_k)[:, None]
            into.append(e4m3(x / each))
            into_exact.append(into[-1].double() * each.double())
            of.append(scale)
        exact[2][-1] += off.double()
        drifts.append(drift_of((v - off)[None], rows_of(v[None], None, None), None))
        scales.append(torch.stack(of))
        means.append(off)
        rows["q"].append(len(q))
        rows["k"].append(len(k))
    every = torch.stack(scales, 1)  # (3, sequences, nheads_k)
    lengths: dict[str, Tensor | None] = {}
    starts = {name: [0] for name in rows}
    assert packed or len(set(rows["q"])) == 1
    for name, used in rows.items():
        if packed:
            for n in used:
                starts[name].append(starts[name][-1] + n + spare)
            lengths[f"cu_seqlens_{name}"] = torch.tensor(starts[name], dtype=torch.int32)
        is_ragged = (spare > 0 and (packed or name == "k")) or (not packed and len(set(used)) > 1)
        if is_ragged:
            lengths[f"seqused_{name}"] = torch.tensor(used, dtype=torch.int32)
    spares = spare if packed else 0, spare, spare  # without packing all queries are in use
    q, k, v = (_join(x, packed, n).to(device) for x, n in zip(codes, spares))
    whole = [_join(x, packed, n).to(device) for x, n in zip(exact, spares)]
    v_t = transposed(v, rows["k"], starts["k"] if packed else None)
    stacked = drift = None
    if v_mean:
        stacked = torch.stack(means).to(device)
        drift = torch.stack(drifts).amax() if v_drift is None else torch.tensor(v_drift)
        drift = drift.to(device)
    of_scales = Scales(*(x.contiguous().to(device) for x in every))
    quantized = Quantized(q, k, v_t, of_scales, None, stacked, drift)
    given = {name: x if x is None else x.to(device) for name, x in (lengths | tensors).items()}
    return Fp8Call(quantized, v, Extras(**given), tuple(whole))


def _join(parts: list[Tensor], packed: bool, spare: int) -> Tensor:
    """One tensor of all sequences, with NaN in the rows that are not in use."""
    longest = max(len(x) for x in parts) + spare
    found = []
    for x in parts:
        rows = (len(x) + spare if packed else longest) - len(x)
        wide = x.double()
        found.append(torch.cat([wide, wide.new_full((rows, *x.shape[1:]), float("nan"))]))
    whole = torch.cat(found)[None] if packed else torch.stack(found)
    return whole.to(parts[0].dtype)


def problem_of(call: Fp8Call, scalars: Scalars, align: str = "bottom_right") -> Problem:
    """Its Problem."""
    x = call.quantized
    return describe(x.q, x.k, call.v, call.extras, scalars, align, False)


def forward_of(
    backend: Any,
    call: Fp8Call,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    out_dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Any:
    """A backend's forward (quantized, extras) -> (out, lse)."""
    left, right = window or (-1, -1)
    right = 0 if causal and right < 0 else right
    right = min(right, 0) if causal else right
    scalars = Scalars(call.quantized.q.shape[3] ** -0.5, softcap, left, right)
    problem = problem_of(call, scalars, "top_left" if causal == "top_left" else "bottom_right")
    assert backend.supports_fp8(problem, call.quantized.q.device, out_dtype) is None
    return backend.prepare_fp8(problem, scalars, out_dtype, **how)


def run(backend: Any, call: Fp8Call, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a backend's FP8 kernels."""
    return forward_of(backend, call, **options)(call.quantized, call.extras)


def reference(
    call: Fp8Call,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """The same in fp64."""
    q, k, v = (x.nan_to_num(0.0) for x in call.exact)
    given = {name: x for name, x in zip(Extras._fields, call.extras) if isinstance(x, Tensor)}
    sides = None if window is None else tuple(None if side < 0 else side for side in window)
    options = dict(causal=causal, window=sides, softcap=softcap or None, return_lse=True)
    if call.extras.cu_seqlens_q is None:
        return attention_reference(q, k, v, **given, **options)
    out, lse = attention_reference(q[0], k[0], v[0], **given, **options)
    return out[None], lse[None]


def error_of(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def lse_error(found: Tensor, exact: Tensor) -> float:
    """The largest; infinite where one of the two is."""
    assert torch.equal(found == float("-inf"), exact == float("-inf"))
    rows = exact != float("-inf")
    return (found.double() - exact)[rows].abs().max().item() if rows.any() else 0.0
