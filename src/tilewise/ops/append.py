"""The operator of appends to a KV cache, and how a call reaches its kernel."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._C._functorch import (
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad

from ..emulation import interpreter_is_on
from ..kernels.common.alignment import check_elements
from ..kernels.common.appended import TENSORS, Append, AppendedCall
from ..kernels.common.shared_memory import check_memory
from ..tile.quantize import by_row
from ..tile.rotary import Rotary
from .attention import needs_dispatcher
from .calls import Entry, has_lazy
from .context_parallel import refuse_shards
from .schema import check_devices, operator, record_of

Tensor = torch.Tensor
CPU, PORTABLE = "tilewise.kernels.cpu.append", "tilewise.kernels.portable.append_launch"
SCALES = {"k_descale": "k_row_scales", "v_descale": "v_row_scales"}  # those that are written
NAMES = *Append._fields[:8], *Rotary._fields, *SCALES, *SCALES.values()
SCHEMA = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor? page_table, Tensor? seqused_k, Tensor? cu_seqlens_q, Tensor? slots, Tensor? cos, "
    "Tensor? sin, bool interleaved, Tensor? k_descale=None, Tensor? v_descale=None, "
    "Tensor(c!)? k_row_scales=None, Tensor(d!)? v_row_scales=None) -> ()"
)


def append(new: Append, entry: Entry | None = None) -> None:
    """New keys and values, checked, into a cache; `entry` is the cache entry of such calls."""
    tensors = new.tensors
    if peek_interpreter_stack() is not None:
        is_compiling = torch.compiler.is_compiling()  # which knows of vmap alone
        is_wrapped = is_batchedtensor if is_compiling else is_functorch_wrapped_tensor
        if any(is_wrapped(x) for x in tensors if x is not None):
            raise NotImplementedError(
                "cache.append inside torch.vmap or another transform: it writes one cache in "
                "place; fold a mapped dimension into the batch, and make lengths outside"
            )
    if needs_dispatcher(tensors):
        torch.ops.tilewise.flash_attn_cache_append(**_arguments(new))
    else:
        _run_append(new, entry)


def _run_append(new: Append, entry: Entry | None = None) -> None:
    refuse_shards()
    if new.k.is_meta:
        return
    _check_memory(new)
    new = new.resolved()
    if new.k.is_cpu and not interpreter_is_on():
        importlib.import_module(CPU).append(new)
        return
    step = importlib.import_module(PORTABLE).append(new, entry is not None)
    if entry is not None:
        entry.call = step


def prepare(call: AppendedCall, is_kept: bool) -> tuple[Any, Any]:
    """The append of a call, and what attention reads with it, a `Prologue`, in one launch, of what
    `may_prepare` passed and whose memory was checked; and the `AppendStep` of a call that is to be
    launched again.
    """
    refuse_shards()
    check_elements(zip(call._fields[:TENSORS], call[:TENSORS]))
    return importlib.import_module(PORTABLE).prepare(call, is_kept)


def may_prepare(call: AppendedCall) -> bool:
    """Whether one launch may compute what torch's operators and an append would, where kernels run.
    They broadcast.
    """
    q, before, starts, tensors = call.q, call.before, call.cu_seqlens_q, call[:TENSORS]
    if q.is_meta or needs_dispatcher(tensors):
        return False
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None or has_lazy(tensors):
        return False
    if not all(x.numel() for x in (q, before, *call[1:3], call.k, call.v)):
        return False
    if q.itemsize > 4 or q.device != call.k.device or q.shape[-1] != call.k.shape[-1]:
        return False
    counts = [x for x in (before, call.rotary_seqlens, call.cache_leftpad) if x is not None]
    kinds = {(x.dtype, x.device) for x in (*counts, starts) if x is not None}
    if kinds != {(torch.int32, q.device)} or any(x.shape != before.shape for x in counts):
        return False
    batch = q.shape[0] if starts is None else starts.numel() - 1
    return q.dim() == (4 if starts is None else 3) and batch == before.shape[0]


def _check_memory(new: Append) -> None:
    """Refuses a call that would write memory which it writes or reads elsewhere."""
    named: dict[str, Any] = dict(zip(Append._fields, new))
    del named["rotary"]
    if new.rotary is not None:
        named |= {"rotary.cos": new.rotary.cos, "rotary.sin": new.rotary.sin}
    check_memory(named)
    check_elements(named.items())


def _arguments(new: Append) -> dict[str, Any]:
    values: dict[str, Any] = new._asdict()
    rotary = values.pop("rotary")
    values |= dict(cos=None, sin=None, interleaved=True) if rotary is None else rotary._asdict()
    for scale, row_scales in SCALES.items():
        if by_row(values[scale]):
            values[row_scales] = values.pop(scale)
    return values


def _kernel(args: tuple) -> None:
    """The inverse of `_arguments`, and the append."""
    _fake(args)
    values: dict[str, Any] = dict(zip(NAMES, args))
    values["rotary"] = None if values["cos"] is None else record_of(Rotary, values)
    for scale, row_scales in SCALES.items():
        if values.get(row_scales) is not None:
            values[scale] = values[row_scales]
    _run_append(record_of(Append, values))


def _fake(args: tuple) -> None:
    tensors = {name: x for name, x in zip(NAMES, args) if name != "interleaved"}
    check_devices(list(tensors), list(tensors.values()))


operator("flash_attn_cache_append", SCHEMA, kernel=_kernel, fake=_fake)
