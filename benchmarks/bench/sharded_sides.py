"""Sides that compute one sequence over several processes: our methods, and what others do.

- tilewise:heads, tilewise:stream, tilewise:ring: `tilewise.distributed`.
- tilewise:nodes: its stream, each GPU as a node of its own, which shares no memory with others.
- tilewise:pairs: the same with two GPUs in each node.
- ring-flash-attn: that package's own files, as `ring_flash_attn` says.
- torch-cp: torch's context_parallel with cuDNN, keys and values repeated for all query heads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import tilewise.distributed as td

from . import ring_flash_attn
from .peers import Absent
from .sharded import Sharded, Side

Tensor = torch.Tensor
NODES = {"tilewise:nodes": 1, "tilewise:pairs": 2}  # ranks in a node
OURS = ("tilewise:heads", "tilewise:stream", "tilewise:ring", *NODES)
PEERS = (*ring_flash_attn.NAMES, "torch-cp")


def side(name: str, of: Sharded, device: str, stack: contextlib.ExitStack) -> Side:
    """A side by name; Absent where it cannot compute this. What it must undo goes on the stack."""
    if each := NODES.get(name):
        if of.ranks % each or of.ranks == each:
            raise Absent(f"{of.ranks} ranks are not several nodes of {each}")
        mesh = init_device_mesh(
            device.partition(":")[0], (of.ranks // each, each), mesh_dim_names=("node", "rank")
        )
        return _ours("stream", of, mesh)
    if name in OURS:
        return _ours(name.removeprefix("tilewise:"), of)
    if name in ring_flash_attn.NAMES:
        return ring_flash_attn.side(name, of, device)
    if name == "torch-cp":
        return _torch(of, device, stack)
    raise KeyError(f"{name!r} is none of {', '.join((*OURS, *PEERS))}")


def layout_of(of: Sharded, method: str, group: Any = None) -> td.Layout:
    """The layout that suits a method."""
    starts = of.starts
    if method == "heads" or of.window or not of.causal:
        found = td.contiguous(of.seqlen, group)
        return found if starts is None else found.packed(starts)
    return td.zigzag(of.seqlen, group) if starts is None else td.documents(starts, group)


def _ours(method: str, of: Sharded, group: Any = None) -> Side:
    layout = layout_of(of, method, group)
    more: Any = dict(bitwise=False) if method == "ring" else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return td.attention(q, k, v, layout=layout, method=method, **of.options, **more)

    if method == "heads" and of.nheads_k % of.ranks:
        raise Absent(f"{of.nheads_k} key heads cannot be dealt evenly over {of.ranks} ranks")
    return Side(layout, call)


def _torch(of: Sharded, device: str, stack: contextlib.ExitStack) -> Side:
    if of.documents or of.window or not of.causal or of.tokens % 2:
        raise Absent("whole causal sequences of even shards alone")
    if not device.startswith("cuda"):
        raise Absent("cuDNN is on GPUs")
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
