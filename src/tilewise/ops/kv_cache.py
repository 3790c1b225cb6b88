"""The operators of calls with a KV cache, and how a call reaches them: plain eager calls outside of
functorch transforms go straight to the backend, as in `attention`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad

from .. import dispatch
from ..errors import OURS, Words
from ..features import OPERATORS, schema_of
from ..kernels.common.alignment import ALIGNMENT, check_elements
from ..kernels.common.cached import OUT, READ_NAMES, Cached
from ..kernels.common.outputs import empty_lse, empty_out, fill_padding, has_no_sequence
from ..kernels.common.shared_memory import check_apart, check_written
from ..mods.flat import check_captured
from ..mods.serialize import MASK, deserialize, serialize
from ..problem import Call, Extras, Mods, Scalars
from . import attention as ops
from .attention import needs_dispatcher
from .context_parallel import refuse_shards
from .schema import check_devices, operator, record_of, refusing

Tensor = torch.Tensor
NAMES = OPERATORS["flash_attn_cache"]
READ = f"{schema_of(NAMES[:-2])}, Tensor? k_descale=None, Tensor? v_descale=None"


def attention(cached: Cached, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call; `out` is written where it is given."""
    tensors = cached.q, cached.k, cached.v, cached.page_table, *cached.extras.tensors, out
    tensors = *tensors, cached.k_descale, cached.v_descale
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    # A backend below the operator sees no functorch transform: torch has no rules for its kernels
    if not needs_dispatcher(tensors) and peek_interpreter_stack() is None:
        return _run(cached, out)
    if out is None:
        return torch.ops.tilewise.flash_attn_cache(**_arguments(cached))
    return out, torch.ops.tilewise.flash_attn_cache_out(**_arguments(cached), out=out)


def _refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
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
    if needs_dispatcher((q, k, v, *cached.extras.tensors)) or peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "split_size with a gradient under a compiler, torch.func, a dispatch mode or with a "
            "tensor subclass is not supported: call it eagerly, or leave out split_size"
        )
    q, k, v = (x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in (q, k, v))
    problem = cached.problem._replace(deterministic=deterministic)
    call = Call(problem, cached.scalars, cached.backend, needs_grad=True)
    plain = cached._replace(entry=None)  # a step has no gradient
    call.forward = lambda q, k, v, extras: _run(plain._replace(q=q, k=k, v=v), None)
    return ops.attention(call, q, k, v, cached.extras, False)


def _arguments(cached: Cached) -> dict[str, Any]:
    values = {**cached._asdict(), **cached.extras._asdict(), **cached.scalars._asdict()}
    values |= dict(captured=list(cached.extras.captured) or None, mask_mod=serialize(cached.mask))
    return {name: values[name] for name in NAMES}


def _cached(args: tuple) -> Cached:
    """The inverse of `_arguments`."""
    values: Any = dict(zip(NAMES, (*args, None, None)))  # defaults at the end are not passed
    captured = values["captured"] = tuple(values["captured"] or ())
    check_devices(READ_NAMES, (*[values[name] for name in READ_NAMES], *captured))
    extras, scalars = record_of(Extras, values), record_of(Scalars, values)
    q, starts, name = values["q"], extras.cu_seqlens_q, deserialize(values["mask_mod"], MASK)
    if name:
        sequences = q.shape[0] if starts is None else starts.shape[0] - 1
        counted = extras._replace(cu_seqlens_q=torch.empty(sequences + 1, device="meta"))
        rank4 = q if q.dim() == 4 else q.unsqueeze(0)
        check_captured(Mods(name), rank4, k=values["k"], extras=counted)
    return record_of(Cached, values | dict(extras=extras, scalars=scalars, mask=name))


def _run(cached: Cached, out: Tensor | None) -> tuple[Tensor, Tensor]:
    refuse_shards()
    fresh, lse = empty_outputs(cached, out)
    if cached.q.is_meta:
        return fresh, lse
    cached = cached._replace(has_out=out is not None)
    if cached.entry is None:  # else it is none that is lazily negated
        cached = cached.resolved()
    backend = _backend_of(cached, out)
    if has_no_sequence(cached.extras):
        fill_padding(fresh if out is None else None, lse)
        return fresh, lse
    step = backend.forward(cached, fresh, lse)
    if cached.entry is not None:
        is_repeated = step is None and cached.q.is_cpu
        cached.entry.call = Repeated(cached, backend) if is_repeated else step
    return fresh, lse


def check_run(cached: Cached, out: Tensor | None) -> None:
    """Refuses what `attention` would of a checked call, but what an operator alone can tell."""
    tensors = *cached.tensors, *cached.extras.captured, out
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if not needs_dispatcher(tensors) and peek_interpreter_stack() is None and not cached.q.is_meta:
        _backend_of(cached._replace(has_out=out is not None), out)


def _backend_of(cached: Cached, out: Tensor | None) -> ModuleType:
    """The backend that serves a call, whose memory is checked."""
    if out is not None:
        check_result(out, cached)
    names = (*READ_NAMES, *["mask_mod's tensor"] * len(cached.extras.captured), "out")
    check_elements(zip(names, (*cached.tensors, *cached.extras.captured, out)))
    return dispatch.choose_cached(cached)


def check_result(out: Tensor, cached: Cached, words: Words = OURS) -> None:
    """Refuses an `out` that shares memory, with itself or with what is read."""
    captured = cached.extras.captured
    inputs = [getattr(words, name, name) for name in READ_NAMES]
    names = ("out", *inputs, *["mask_mod's tensor"] * len(captured))
    check_written("out", out)
    check_apart(names, (out, *cached.tensors, *captured), written=1)


class Repeated:
    """A checked call on a CPU, where backends keep no step: its numbers, and its backend."""

    def __init__(self, cached: Cached, backend: ModuleType) -> None:
        self.plain = cached.of_tensors((None,) * OUT)._replace(entry=None)
        self.of_tensors = self.plain.of_tensors
        self.backend = backend

    def __call__(self, cached: Cached, out: Tensor | None, words: Words) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a call that `of_tensors` has made."""
        fresh, lse = empty_outputs(cached, out)
        if out is not None:
            check_result(out, cached, words)
        self.backend.forward(cached, fresh, lse)
        return fresh, lse


def empty_outputs(cached: Cached, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`out`, unless it is given, and `lse`, unwritten."""
    if out is None:
        return empty_out(cached.q, cached.v.shape[3])
    return out, empty_lse(cached.q)


operator(
    "flash_attn_cache",
    f"({READ}) -> (Tensor, Tensor)",
    kernel=lambda args: _run(_cached(args), None),
    fake=lambda args: empty_outputs(_cached(args)),
    backward=refusing("attention with a cache has no gradient"),
    is_looped=True,
)
operator(
    "flash_attn_cache_out",
    f"({READ}, *, Tensor(a!) out) -> Tensor",
    kernel=lambda args, out: _run(_cached(args), out)[1],
    fake=lambda args, out: empty_outputs(_cached(args), out)[1],
)
