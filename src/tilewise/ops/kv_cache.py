"""The operators of calls with a KV cache, and how a call reaches them: plain eager calls outside of
functorch transforms go straight to the backend, as in `attention`.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad

from .. import dispatch
from ..kernels.common.alignment import ALIGNMENT, check_elements
from ..kernels.common.cached import OUT, Cached, lse_shape
from ..kernels.common.outputs import fill_padding, has_no_sequence
from ..kernels.common.shared_memory import check_apart, check_written
from ..mods.flatten import check_captured
from ..mods.serialize import MASK, deserialize, serialize
from ..problem import Call, Extras, Mods, Scalars
from . import attention as ops
from .attention import needs_dispatcher
from .context_parallel import refuse_shards
from .schema import LIBRARY, check_devices

Tensor = torch.Tensor
TENSOR_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor? seqused_k, Tensor? cu_seqlens_q, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor[]? captured"
)
TENSORS = [name.split()[1] for name in TENSOR_SCHEMA.split(", ")][:-1]  # but what is captured
SCALAR_SCHEMA = (
    "float scale, float softcap, SymInt left, SymInt right, int split_size, str mask_mod, "
    "str? backend"
)
COUNT = f"{TENSOR_SCHEMA}, {SCALAR_SCHEMA}".count(",") + 1
SCALES = "Tensor? k_descale=None, Tensor? v_descale=None"
READ = f"{TENSOR_SCHEMA}, {SCALAR_SCHEMA}, {SCALES}"
LIBRARY.define(f"flash_attn_cache({READ}) -> (Tensor, Tensor)")
LIBRARY.define(f"flash_attn_cache_out({READ}, *, Tensor(a!) out) -> Tensor")


def attention(cached: Cached, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call; `out` is written where it is given."""
    tensors = cached.q, cached.k, cached.v, cached.page_table, *cached.extras.tensors, out
    tensors = *tensors, cached.k_descale, cached.v_descale
    if forward_ad._current_level >= 0:
        _refuse_tangents(*tensors)
    # A backend below the operator sees no functorch transform: torch has no rules for its kernels
    if not needs_dispatcher(*tensors) and peek_interpreter_stack() is None:
        return _run(cached, out)
    if out is None:
        return torch.ops.tilewise.flash_attn_cache(*_arguments(cached))
    return out, torch.ops.tilewise.flash_attn_cache_out(*_arguments(cached), out=out)


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Refuses tensors that forward-mode AD may differentiate: an operator would drop tangents."""
    for x in tensors:
        if x is not None:
            if is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    "attention with a cache has no forward-mode derivative: use "
                    "tilewise.attention_reference"
                )


def train(cached: Cached, deterministic: bool) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call without pages, differentiable: a forward in pieces, and the
    backward of any other call, which takes nothing but its `out` and `lse`.
    """
    cached = cached.resolved()
    q, k, v = cached[:3]
    if cached.mask and (cached.extras.seqused_k is not None or q.shape[1] != k.shape[1]):
        raise NotImplementedError(
            "mask_mod with split_size and a gradient: positions count from the first key here and "
            "from the first query in the backward; pass as many queries as keys"
        )
    if needs_dispatcher(q, k, v, *cached.extras.tensors):
        raise NotImplementedError(
            "split_size with a gradient under a compiler, a dispatch mode or with a tensor "
            "subclass is not supported: call it eagerly, or leave out split_size"
        )
    q, k, v = (x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in (q, k, v))
    problem = cached.problem._replace(deterministic=deterministic)
    call = Call(problem, cached.scalars, cached.backend, needs_grad=True)
    plain = cached._replace(entry=None)  # a step has no gradient
    call.forward = lambda q, k, v, extras: _run(plain._replace(q=q, k=k, v=v), None)
    return ops.attention(call, q, k, v, cached.extras, False)


def _arguments(cached: Cached) -> tuple:
    extras, scalars = cached.extras, cached.scalars
    return (
        *(cached.q, cached.k, cached.v, cached.page_table, extras.seqused_k, extras.cu_seqlens_q),
        *(extras.alibi_slopes, extras.sinks, list(extras.captured) or None),
        *(scalars.scale, scalars.softcap, scalars.left, scalars.right),
        *(cached.split_size, serialize(cached.mask), cached.backend),
        *(cached.k_descale, cached.v_descale),
    )


def _cached(*args) -> Cached:
    """The inverse of `_arguments`."""
    k_descale, v_descale = (*args[COUNT:], None, None)[:2]  # defaults at the end are not passed
    q, k, v, page_table, seqused_k, cu_seqlens_q, slopes, sinks, captured, *numbers = args[:COUNT]
    *numbers, split_size, mask, backend = numbers
    captured = tuple(captured or ())
    extras = Extras(slopes, sinks, seqused_k, None, cu_seqlens_q, captured=captured)
    tensors = *args[: len(TENSORS)], k_descale, v_descale, *captured
    check_devices((*TENSORS, "k_descale", "v_descale"), tensors)
    name = deserialize(mask, MASK)
    if name:
        starts = torch.empty(_batch(q, cu_seqlens_q) + 1, device="meta")
        rank4 = q if q.dim() == 4 else q.unsqueeze(0)
        check_captured(Mods(name), rank4, k, extras._replace(cu_seqlens_q=starts))
    scalars = Scalars(*numbers)
    cached = Cached(q, k, v, page_table, extras, scalars, split_size, name, backend)
    return cached._replace(k_descale=k_descale, v_descale=v_descale)


def _batch(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def _run(cached: Cached, out: Tensor | None) -> tuple[Tensor, Tensor]:
    refuse_shards()
    fresh, lse = _empty(cached, out)
    if cached.q.is_meta:
        return fresh, lse
    cached = cached._replace(has_out=out is not None)
    if cached.entry is None:  # else it is none that is lazily negated
        cached = cached.resolved()
    tensors = *cached.tensors, *cached.extras.captured
    names = (*READ_NAMES, *["mask_mod's tensor"] * len(cached.extras.captured))
    if out is not None:
        check_written("out", out)
        check_apart(("out", *names), (out, *tensors), 1)
    check_elements(zip(("out", *names), (fresh, *tensors)))
    backend = dispatch.choose_cached(cached)
    if has_no_sequence(cached.extras):
        fill_padding(fresh if out is None else None, lse)
        return fresh, lse
    step = backend.forward(cached, fresh, lse)
    if cached.entry is not None:
        is_repeated = step is None and cached.q.is_cpu
        cached.entry.call = Repeated(cached, backend) if is_repeated else step
    return fresh, lse


class Repeated:
    """A checked call on a CPU, where backends keep no step: its numbers, and its backend."""

    def __init__(self, cached: Cached, backend: ModuleType) -> None:
        self.plain = cached.of_tensors((None,) * OUT)._replace(entry=None)
        self.of_tensors = self.plain.of_tensors
        self.backend = backend

    def __call__(self, cached: Cached, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a call that `of_tensors` has made."""
        fresh, lse = _empty(cached, out)
        if out is not None:
            check_written("out", out)
            check_apart(("out", *READ_NAMES), (out, *cached.tensors), 1)
        self.backend.forward(cached, fresh, lse)
        return fresh, lse


# Of `Cached.tensors`
READ_NAMES = (
    *("q", "k", "v", "page_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks"),
    *("k_descale", "v_descale"),
)


def _empty(cached: Cached, out: Tensor | None) -> tuple[Tensor, Tensor]:
    q = cached.q
    if out is None:
        out = q.new_empty(*q.shape[:-1], cached.v.shape[3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(lse_shape(q), dtype=dtype)


def _kernel(*args):
    return _run(_cached(*args), None)


def _out_kernel(*args, out):
    return _run(_cached(*args), out)[1]


def _fake(*args):
    return _empty(_cached(*args), None)


def _out_fake(*args, out):
    return _empty(_cached(*args), out)[1]


LIBRARY.impl("flash_attn_cache", _kernel, "CompositeExplicitAutograd")
LIBRARY.impl("flash_attn_cache_out", _out_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::flash_attn_cache", _fake, lib=LIBRARY)
torch.library.register_fake("tilewise::flash_attn_cache_out", _out_fake, lib=LIBRARY)


def no_gradient(ctx, *grads):
    """The derivative, refused."""
    raise NotImplementedError("attention with a cache has no gradient")


torch.library.register_autograd("tilewise::flash_attn_cache", no_gradient, lib=LIBRARY)
