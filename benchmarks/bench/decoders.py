"""The decoders of `bench decode`: a call on queries and a cache, or the reason why there is none.

FA3 is found as `peers` says. torch's SDPA and FlexAttention read a cache without pages whose
sequences have one length; theirs is (batch, nheads_k, seqlen_k, headdim) in memory.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from tilewise.explain.shapes import Shape
from tilewise.explain.steps import Decode

from . import peers
from .caches import Cache, New, starts_of
from .peers import Absent
from .providers import forced_backend, provider

Tensor = torch.Tensor
Attend = Callable[[Tensor, Cache], Tensor]


class Decoder(NamedTuple):
    """`prepare` gives the call for a step on a device, or raises Absent with the reason."""

    name: str
    prepare: Callable[[Decode, str], Attend]
    by_head: bool = False  # the memory order of its cache
    has_pages: bool = True
    has_eight_bits: bool = False  # whether it takes 8-bit keys and values with 16-bit queries

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("tilewise")


def decoder(name: str) -> Decoder:
    """By name; `tilewise:portable` forces that backend."""
    if name == "tilewise" or name.startswith("tilewise:"):
        backend = forced_backend(name) if ":" in name else None
        return Decoder(name, lambda *asked: _ours(backend, *asked), has_eight_bits=True)
    if name not in PEERS:
        raise KeyError(f"provider {name!r} is unknown: use one of tilewise, {', '.join(PEERS)}")
    return PEERS[name]


def _ours(backend: str | None, of: Decode, device: str) -> Attend:
    from tilewise import attention, flash_attn_with_kvcache

    if of.appends:
        if backend is not None:
            raise Absent("flash_attn_with_kvcache chooses its backend")
        function: Any = flash_attn_with_kvcache
        return lambda q, cache: function(
            q,
            cache.k,
            v_cache=cache.v,
            **new_keys(cache),
            cache_seqlens=cast(New, cache.new).seqused_k,
            page_table=cache.page_table,
            causal=True,
            rotary_interleaved=False,
        )
    starts = starts_of(of, device)

    def attend(q: Tensor, cache: Cache) -> Tensor:
        found = attention(
            *(q, cache.k, cache.v),
            causal=True,
            # Without it a cache without pages goes to the kernels of training
            out=q.new_empty(*q.shape[:-1], of.headdim_v),
            seqused_k=cache.seqused_k,
            page_table=cache.page_table,
            cu_seqlens_q=starts,
            max_seqlen_q=None if starts is None else max(of.queries),
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            split_size=of.split_size or None,
            backend=backend,
        )
        return cast(Tensor, found)

    return attend


def _sdpa(backend: SDPBackend | None) -> Callable[[Decode, str], Attend]:
    """torch's choice, or one of its backends. A last query sees all keys: it needs no mask."""

    def prepare(of: Decode, device: str) -> Attend:
        _refuse_lengths(of)
        if backend is not None and not device.startswith("cuda"):
            raise Absent("torch has it for CUDA tensors only")
        has_mask = of.seqlen_q > 1
        mask = causal_lower_right(of.seqlen_q, of.seqlen_k) if has_mask else None
        has_gqa = of.nheads != of.nheads_k

        def attend(q: Tensor, cache: Cache) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, cache.k, cache.v))
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=has_gqa)
            return out.transpose(1, 2)

        if backend is None:
            return attend
        if has_mask:
            raise Absent("its causal mask is top-left, which differs where the lengths differ")

        asked = backend

        def pinned(q: Tensor, cache: Cache) -> Tensor:
            with sdpa_kernel(asked):
                return attend(q, cache)

        return pinned

    return prepare


def _refuse_lengths(of: Decode) -> None:
    if of.appends:
        raise Absent("it appends and rotates nothing")
    if of.lengths or of.chunk >= 0:
        raise Absent("it takes no lengths: it would read a mask beside every key")


def _flex(of: Decode, device: str) -> Attend:
    _refuse_lengths(of)
    sizes = of.batch, of.seqlen_q, of.seqlen_k, of.nheads, of.nheads_k, of.headdim, of.headdim_v
    shape = Shape("fwd", *sizes, of.seqlen_q > 1, of.dtype)
    one = provider("flex")
    if (reason := one.refuse(shape, device)) is not None:
        raise Absent(reason)
    attend = one.prepare(shape, device)
    return lambda q, cache: attend(q, cache.k, cache.v)


def _fa3(of: Decode, device: str) -> Attend:
    sizes = of.batch, of.seqlen_q, of.seqlen_k, of.nheads, of.nheads_k, of.headdim, of.headdim_v
    unfit = peers.unfit(Shape("fwd", *sizes, True, of.dtype), device, peers.FA3_MAJORS)
    if unfit is not None:
        raise Absent(unfit)
    if path := os.environ.get(peers.FA3_LIBRARY):
        return fa3_operator(peers.load(path), of, device)
    function = _fa3_function()
    try:
        return fa3_operator(torch.ops.flash_attn_3, of, device)
    except (Absent, AttributeError):
        return fa3_function(function, of, device)


def _packed(of: Decode, device: str) -> dict[str, object]:
    """FA3's words for packed queries."""
    starts = starts_of(of, device)
    return {} if starts is None else dict(cu_seqlens_q=starts, max_seqlen_q=max(of.queries))


def new_keys(cache: Cache, k: str = "k", v: str = "v") -> dict[str, Any]:
    """What is appended and the tables that rotate it, by a function's names."""
    if cache.new is None:
        return {}
    cos, sin, _ = cache.new.rotary
    return {k: cache.new.k, v: cache.new.v, "rotary_cos": cos, "rotary_sin": sin}


def fa3_operator(operators, of: Decode, device: str = "cuda") -> Attend:
    """FA3's forward with a KV cache; it chooses the number of splits."""
    fwd = operators.fwd.default
    options = peers.operator_keywords(
        fwd,
        softmax_scale=of.headdim**-0.5,
        is_causal=of.causal,
        num_splits=0,
        **_packed(of, device),
        **({"is_rotary_interleaved": False} if of.appends else {}),
    )
    names = {argument.name for argument in fwd._schema.arguments}
    if missing := {"page_table", "seqused_k"} - names:
        raise Absent(f"its forward takes no {', '.join(sorted(missing))}")

    def attend(q: Tensor, cache: Cache) -> Tensor:
        lengths = cache.seqused_k if cache.new is None else cache.new.seqused_k
        own = {**options, "seqused_k": lengths, "page_table": cache.page_table}
        return fwd(q, cache.k, cache.v, **own, **new_keys(cache, "k_new", "v_new"))[0]

    return attend


def fa3_function(function: Callable, of: Decode, device: str = "cuda") -> Attend:
    """The package's `flash_attn_with_kvcache`."""
    known = inspect.signature(function).parameters
    options = peers.keywords(
        known,
        softmax_scale=of.headdim**-0.5,
        causal=of.causal,
        num_splits=0,
        **_packed(of, device),
        **({"rotary_interleaved": False} if of.appends else {}),
    )

    def attend(q: Tensor, cache: Cache) -> Tensor:
        lengths = cache.seqused_k if cache.new is None else cache.new.seqused_k
        where = dict(cache_seqlens=lengths, page_table=cache.page_table)
        return function(q, cache.k, cache.v, **new_keys(cache), **where, **options)

    return attend


def _fa3_function() -> Callable:
    reason: Exception | None = None
    for name in peers.FA3_MODULES:
        try:
            return importlib.import_module(name).flash_attn_with_kvcache
        except (ImportError, OSError, AttributeError) as error:
            reason = error
    raise Absent(f"{reason}, and {peers.FA3_LIBRARY} names no library")


PEERS = {
    "sdpa": Decoder("sdpa", _sdpa(None), by_head=True, has_pages=False),
    "cudnn": Decoder("cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), by_head=True, has_pages=False),
    "fa3": Decoder("fa3", _fa3),
    "flex": Decoder("flex", _flex, by_head=True, has_pages=False),
}
