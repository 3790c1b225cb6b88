"""The providers of `bench serving`: the two calls of an attention layer on a paged cache.

Each appends the keys and values of a step to the slots that the scheduler gives, and attends to
the pages. FlashAttention-3 is found as `peers` says; its library appends to no slots, and so has
our append. vLLM's Triton backend is the two functions that its own layer calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.integrations.engines import Layer
from tilewise.integrations.engines import Step as Call

from . import peers
from .peers import Absent
from .serving_steps import Serving

Tensor = torch.Tensor
VLLM = "vllm.v1.attention.ops"
SEGMENTS = 16  # of vLLM's split softmax
FEW_PROGRAMS = 128  # below which vLLM splits the keys of a decode


class Pages(NamedTuple):
    """A layer's cache, (pages, page_size, nheads_k, headdim) each."""

    k: Tensor
    v: Tensor


class Server(NamedTuple):
    """A layer's two calls."""

    append: Callable[[Pages, Tensor, Tensor, Tensor], None]  # the cache, k, v and slots
    attend: Callable[[Tensor, Pages, Call, Tensor], object]  # q, the cache, the step and out


class ServerKind(NamedTuple):
    """`prepare` gives the calls for a load on a device, or raises Absent with the reason."""

    name: str
    prepare: Callable[[Serving, str], Server]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("tilewise")


def server(name: str) -> ServerKind:
    """By name."""
    if name not in SERVERS:
        raise KeyError(f"provider {name!r} is unknown: use one of {', '.join(SERVERS)}")
    return ServerKind(name, SERVERS[name])


def _ours(of: Serving, device: str) -> Server:
    """What the plug-ins for engines call."""
    layer = Layer(of.headdim**-0.5)

    def append(cache: Pages, k: Tensor, v: Tensor, slots: Tensor) -> None:
        layer.append(k, v, k_cache=cache.k, v_cache=cache.v, slots=slots)

    def attend(q: Tensor, cache: Pages, call: Call, out: Tensor) -> object:
        return layer.attend(q, call, k_cache=cache.k, v_cache=cache.v, out=out)

    return Server(append, attend)


def _fa3(of: Serving, device: str) -> Server:
    if not device.startswith("cuda"):
        raise Absent("it is for CUDA GPUs")
    if torch.cuda.get_device_capability(device)[0] not in peers.FA3_MAJORS:
        raise Absent("it is for compute capability 9.x")
    forward = peers.forward_of(
        peers.fa3_operators(), softmax_scale=of.headdim**-0.5, is_causal=True, num_splits=0
    )

    def attend(q: Tensor, cache: Pages, call: Call, out: Tensor) -> object:
        where = dict(seqused_k=call.seqused_k, page_table=call.page_table)
        rows = dict(cu_seqlens_q=call.cu_seqlens_q, max_seqlen_q=call.max_seqlen_q)
        return forward(q, cache.k, cache.v, out=out, **where, **rows)

    return Server(_ours(of, device).append, attend)


def _vllm_triton(of: Serving, device: str) -> Server:
    """The functions and the options of vLLM's `TritonAttentionImpl`."""
    if not device.startswith("cuda"):
        raise Absent("its kernels are for GPUs")
    try:
        appends = importlib.import_module(f"{VLLM}.triton_reshape_and_cache_flash")
        attends = importlib.import_module(f"{VLLM}.triton_unified_attention")
    except ImportError as error:
        raise Absent(f"vllm does not import: {error}") from error
    split_rows = FEW_PROGRAMS // of.nheads_k  # up to so many requests, keys are split
    shape = split_rows, of.nheads, SEGMENTS
    scratch = dict(
        softmax_segm_output=torch.empty(*shape, of.headdim, device=device),
        softmax_segm_max=torch.empty(shape, device=device),
        softmax_segm_expsum=torch.empty(shape, device=device),
    )
    one = torch.ones((), device=device)

    def append(cache: Pages, k: Tensor, v: Tensor, slots: Tensor) -> None:
        appends.triton_reshape_and_cache_flash(k, v, cache.k, cache.v, slots, "auto", one, one)

    def attend(q: Tensor, cache: Pages, call: Call, out: Tensor) -> object:
        rows, width = call.page_table.shape
        scale = one.expand(rows, of.nheads_k)
        return attends.unified_attention(
            q=q,
            k=cache.k,
            v=cache.v,
            out=out,
            cu_seqlens_q=call.cu_seqlens_q,
            max_seqlen_q=call.max_seqlen_q,
            seqused_k=call.seqused_k,
            max_seqlen_k=width * of.page_size,
            softmax_scale=of.headdim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=call.page_table,
            softcap=0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=split_rows,
            num_par_softmax_segments=SEGMENTS,
            **scratch,
        )

    return Server(append, attend)


SERVERS: dict[str, Callable[[Serving, str], Server]] = {
    "tilewise": _ours,
    "fa3": _fa3,
    "vllm-triton": _vllm_triton,
}
