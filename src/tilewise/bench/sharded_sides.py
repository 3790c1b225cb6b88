"""Sides that compute one sequence over several processes: our methods, and what others do.

- tilewise:heads, tilewise:stream, tilewise:ring: `tilewise.distributed`.
- ring-flash-attn: that package's zigzag ring, its own files, over our kernel; causal alone.
- torch-cp: torch's context_parallel with cuDNN, keys and values repeated for all query heads.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilewise
import tilewise.distributed as td

from ..distributed.call_spec import CallSpec
from ..distributed.rows import gradients_of
from ..problem import Saved
from .peers import Absent
from .sharded import Sharded

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS = ("tilewise:heads", "tilewise:stream", "tilewise:ring")
PEERS = ("ring-flash-attn", "torch-cp")


class Side(NamedTuple):
    """A layout, and the call of a rank's rows."""

    layout: td.Layout
    call: Call


def side(name: str, of: Sharded, device: str, stack: contextlib.ExitStack) -> Side:
    """A side by name; Absent where it cannot compute this. What it must undo goes on the stack."""
    if name in OURS:
        return _ours(name.removeprefix("tilewise:"), of)
    if of.documents or of.window or not of.causal or of.tokens % 2:
        raise Absent("whole causal sequences of even shards alone")
    if name == "ring-flash-attn":
        return _ring_flash_attn(of)
    if name == "torch-cp":
        return _torch(of, device, stack)
    raise KeyError(f"{name!r} is none of {', '.join((*OURS, *PEERS))}")


def layout_of(of: Sharded, method: str) -> td.Layout:
    """The layout that suits a method."""
    starts = of.starts
    if method == "heads" or of.window or not of.causal:
        found = td.contiguous(of.seqlen)
        return found if starts is None else found.packed(starts)
    return td.zigzag(of.seqlen) if starts is None else td.documents(starts)


def _ours(method: str, of: Sharded) -> Side:
    layout = layout_of(of, method)
    more: Any = dict(bitwise=False) if method == "ring" else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return td.attention(q, k, v, layout=layout, method=method, **of.options, **more)

    if method == "heads" and of.nheads_k % of.ranks:
        raise Absent(f"{of.nheads_k} key heads cannot be dealt evenly over {of.ranks} ranks")
    return Side(layout, call)


def _ring_flash_attn(of: Sharded) -> Side:
    if of.direction != "fwd" and of.dtype == "float32":
        raise Absent("in fp32 its sums of gradients are in the memory of its buffers (0.1.8)")
    zigzag = ring_flash_attn_files()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zigzag.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=dist.group.WORLD)

    return Side(td.zigzag(of.seqlen), call)


def ring_flash_attn_files() -> Any:
    """The package's module of the zigzag ring, with our kernels in the place of flash-attn's. Its
    `__init__` is left out, which wants transformers.
    """
    name = "tilewise_ring_flash_attn"
    if f"{name}.zigzag_ring_flash_attn" in sys.modules:
        return sys.modules[f"{name}.zigzag_ring_flash_attn"]
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        raise Absent("ring-flash-attn is not installed")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    interface: Any = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = _forward, _backward
    given = {"flash_attn": types.ModuleType("flash_attn"), interface.__name__: interface}
    before = {key: sys.modules.get(key) for key in given}
    sys.modules.update({**given, name: package})
    try:
        return importlib.import_module(f"{name}.zigzag_ring_flash_attn")
    finally:
        for key, module in before.items():
            if module is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module


def _forward(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax):
    """flash-attn's, as ring-flash-attn calls it."""
    with torch.no_grad():
        options: Any = dict(causal=causal, scale=softmax_scale, return_lse=True)
        out, lse = tilewise.attention(q, k, v, **options)
    return out, lse, None, None


def _backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    alibi_slopes,
    deterministic,
):
    """flash-attn's, which writes to dq, dk and dv."""
    spec = CallSpec(td.contiguous(0, 1), causal=causal, scale=softmax_scale)
    saved = Saved(dout.contiguous(), None, q, k, v, out, softmax_lse.contiguous())
    found = gradients_of(spec, saved, "bottom_right", *spec.sides)
    for written, x in zip((dq, dk, dv), found):
        written.copy_(x)


def _torch(of: Sharded, device: str, stack: contextlib.ExitStack) -> Side:
    if not device.startswith("cuda"):
        raise Absent("cuDNN is on GPUs")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (of.ranks,))
    unused = torch.zeros(1, 2 * of.ranks, device=device)  # it wants something to deal
    dealt: Any = dict(buffers=[unused], buffer_seq_dims=[1], no_restore_buffers={unused})
    repeats = of.nheads // of.nheads_k

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return replaced(q, k, v, is_causal=True).transpose(1, 2)

    # While torch's function is replaced, ours refuses every call: what replaces it is kept, and
    # put back in time for torch to restore its own
    name, original = "scaled_dot_product_attention", F.scaled_dot_product_attention
    stack.enter_context(context_parallel(mesh, **dealt))
    replaced = F.scaled_dot_product_attention
    stack.callback(setattr, F, name, replaced)
    setattr(F, name, original)
    return Side(td.zigzag(of.seqlen), call)
