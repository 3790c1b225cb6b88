"""ring-flash-attn (0.1.8) as a peer: its own files, over our kernels or FlashAttention-3's.

- A causal sequence: its zigzag ring.
- Documents: its llama3 method, which gathers keys and values, of all heads at once or by-head, of
  the next while one is computed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.distributed.methods.rows import gradients_of
from tilewise.distributed.methods.shard_call import ShardCall
from tilewise.explain.shapes import Shape
from tilewise.frontend.scalars import is_long
from tilewise.problem import OPEN, Extras, Saved, Scalars

from . import peers
from .peers import Absent
from .sharded import Sharded, Side

Tensor = torch.Tensor
NAMES = ("ring-flash-attn", "ring-flash-attn:by-head", "ring-flash-attn:fa3")
STARTS = ("cu_seqlens_q", "cu_seqlens_k")


class Kernels(NamedTuple):
    """What stands in flash-attn's place. The package reads the signatures of functions."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor, None, None]]
    backward: Callable[..., None]


def side(name: str, of: Sharded, device: str) -> Side:
    """A side by name; Absent where it cannot compute this."""
    if of.window:
        raise Absent("it is not asked for windows here")
    if name.endswith(":by-head") and not of.documents:
        raise Absent("documents alone: the zigzag ring sends all heads")
    if not of.documents and (not of.causal or of.tokens % 2):
        raise Absent("whole causal sequences of even shards, and documents, alone")
    if not of.documents and of.direction != "fwd" and of.dtype == "float32":
        raise Absent("in fp32 its sums of gradients are in the memory of its buffers (0.1.8)")
    kernels = OURS
    if name.endswith(":fa3"):
        check_fa3(of, device)
        kernels = FA3
    if of.documents:
        return _llama3(of, kernels, device, 1 if name.endswith(":by-head") else of.nheads_k)
    ring = files("zigzag_ring_flash_attn", kernels).zigzag_ring_flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring(q, k, v, causal=True, group=dist.group.WORLD)

    return Side(td.zigzag(of.seqlen), call)


def _llama3(of: Sharded, kernels: Kernels, device: str, heads_k_stride: int) -> Side:
    llama3 = files("llama3_flash_attn_varlen", kernels)
    layout = td.contiguous(of.seqlen).packed(of.starts or ())
    starts = torch.tensor(of.starts, dtype=torch.int32, device=device)
    prepare = llama3.llama3_flash_attn_prepare_cu_seqlens
    *packing, local_k_slice = prepare(starts, of.causal, layout.rank, of.ranks)
    where = *packing, heads_k_stride, local_k_slice
    attend = llama3.llama3_flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = attend(q[0], k[0], v[0], *where, causal=of.causal, group=dist.group.WORLD)
        return out[None]

    return Side(layout, call)


def files(module: str, kernels: Kernels) -> Any:
    """A module of the package, with these kernels in the place of flash-attn's. The package's
    `__init__` is left out, which wants transformers.
    """
    name = f"tilewise_ring_flash_attn_{kernels.name}"
    if f"{name}.{module}" in sys.modules:
        return sys.modules[f"{name}.{module}"]
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        raise Absent("ring-flash-attn is not installed")
    package = sys.modules.get(name, types.ModuleType(name))
    package.__path__ = list(spec.submodule_search_locations)
    interface: Any = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = interface._flash_attn_varlen_forward = kernels.forward
    interface._flash_attn_backward = interface._flash_attn_varlen_backward = kernels.backward
    given = {"flash_attn": types.ModuleType("flash_attn"), interface.__name__: interface}
    before = {key: sys.modules.get(key) for key in given}
    sys.modules.update({**given, name: package})
    try:
        return importlib.import_module(f"{name}.{module}")
    finally:
        for key, kept in before.items():
            if kept is None:
                del sys.modules[key]
            else:
                sys.modules[key] = kept


def _forward(q, k, v, softmax_scale, causal, **options):
    """flash-attn's, dense or packed, as ring-flash-attn calls it; `options` has what packs."""
    packing: Any = {x: options[x] for x in (*STARTS, *peers.HINTS) if x in options}
    with torch.no_grad():
        more: Any = dict(causal=causal, scale=softmax_scale, return_lse=True)
        out, lse = tilewise.attention(q, k, v, **more, **packing)
    return out, lse, None, None


def _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, **options):
    """flash-attn's, which writes to dq, dk and dv, in their precision."""
    scalars = Scalars(softmax_scale, right=0 if causal else OPEN)
    spec = ShardCall(td.contiguous(0, 1), scalars=scalars)
    given, written, more = [q, k, v, out, softmax_lse.contiguous()], [dq, dk, dv], {}
    if STARTS[0] in options:
        dout, *given = (x[None] for x in (dout, *given))
        written = [x[None] for x in written]
        more["extras"] = Extras(**_starts(options))
        more["is_long"] = is_long(options["max_seqlen_q"])
    saved = Saved(_in_rows(dout), None, *given)
    found = gradients_of(spec, saved, band=spec.band, rounds=True, **more)
    for x, gradient in zip(written, found[:3]):
        x.copy_(gradient)


OURS = Kernels("ours", _forward, _backward)


def _fa3_forward(q, k, v, softmax_scale, causal, **options):
    """As `_forward`, by FlashAttention-3's operator."""
    forward = _fa3(peers.forward_of, causal, softmax_scale, _longest(options))
    out, lse = forward(q, k, v, **_starts(options))
    return out, lse, None, None


def _fa3_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, **options):
    """As `_backward`, by FlashAttention-3's operator."""
    backward = _fa3(peers.backward_of, causal, softmax_scale, _longest(options))
    saved = _in_rows(dout), q, k, v, out, softmax_lse.contiguous()
    backward(*saved, dq=dq, dk=dk, dv=dv, **_starts(options))


FA3 = Kernels("fa3", _fa3_forward, _fa3_backward)


def check_fa3(of: Sharded, device: str) -> None:
    """Absent where FlashAttention-3 is not to be had, or lacks what this asks for."""
    sizes = 1, of.tokens, of.tokens, of.nheads, of.nheads_k, of.headdim, of.headdim
    shape = Shape(of.direction, *sizes, of.causal, of.dtype)
    if (reason := peers.unfit(shape, device, peers.FA3_MAJORS)) is not None:
        raise Absent(reason)
    for pass_of in (peers.forward_of, peers.backward_of)[: 1 if of.direction == "fwd" else 2]:
        _fa3(pass_of, of.causal, 1.0, (1, 1) if of.documents else ())


@functools.lru_cache(maxsize=64)
def _fa3(
    pass_of: Callable[..., Any], causal: bool, scale: float, longest: tuple[int, ...]
) -> Callable[..., Any]:
    """A pass of FlashAttention-3, whose schema is read once; of packed sequences where there are
    longest lengths.
    """
    packing = {**dict.fromkeys(STARTS), **dict(zip(peers.HINTS, longest))} if longest else {}
    return pass_of(peers.fa3_operators(), softmax_scale=scale, is_causal=causal, **packing)


def _starts(options: dict[str, Any]) -> dict[str, Any]:
    return {x: options[x] for x in STARTS if x in options}


def _longest(options: dict[str, Any]) -> tuple[int, ...]:
    return tuple(options[x] for x in peers.HINTS if x in options)


def _in_rows(x: Tensor) -> Tensor:
    """With a contiguous last dimension, as flash-attn sees to."""
    return x if x.stride(-1) == 1 else x.contiguous()
