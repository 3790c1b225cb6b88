"""Steps of decoding by kernels that are fakes and record their calls: no GPU."""

import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

import tilewise
from tilewise import dispatch
from tilewise.frontend import values
from tilewise.kernels.common import decode_step, program, workspace
from tilewise.kernels.portable import append_launch, decode_launch
from tilewise.ops import append, calls

from .fake_kernels import Kernel, fake_kernels
from .looks import moved

BF16, INT32 = torch.bfloat16, torch.int32


def compiled_for(args):
    """What Triton would compile for, but for some last numbers."""
    return [jit.native_specialize_impl(CUDABackend, x, False, True, True) for x in args[:-4]]


def record(monkeypatch):
    """Calls of kernels. Memory that a call makes is the same for all calls."""
    backends = {name: dispatch.BACKENDS[name] for name in ("portable", "cpu")}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)  # Hopper's kernel would come first
    made, new_empty = {}, torch.Tensor.new_empty
    log = fake_kernels(monkeypatch, decode_launch, "attn_split_kernel", "attn_fold_kernel")

    def once(x, *sizes, **options):
        shape = sizes[0] if isinstance(sizes[0], tuple) else sizes
        key = tuple(shape), options.get("dtype", x.dtype)
        if key not in made:
            made[key] = new_empty(x, *sizes, **options)
        return made[key]

    def in_room(shape, stride, dtype):
        return once(torch.empty(0, dtype=dtype), shape, dtype=dtype)

    def slices_of(slices, device):
        starts = workspace.starts_of(slices)
        buffer = in_room((starts[-1],), (1,), torch.uint8)
        return {x.name: workspace.tensor_at(buffer, at, x) for at, x in zip(starts, slices)}

    monkeypatch.setattr(torch.Tensor, "new_empty", once)
    for module in (decode_step, append_launch):
        monkeypatch.setattr(module, "allocator_of", lambda device: in_room)
    kernel = Kernel("cache_append_kernel", log)
    monkeypatch.setattr(append_launch, "cache_append_kernel", kernel)
    monkeypatch.setattr(append, "interpreter_is_on", lambda: True)
    monkeypatch.setattr(program, "tensors_of", slices_of)
    monkeypatch.setattr(calls, "is_read", lambda x: False)
    monkeypatch.setattr(values, "knows_values", lambda x: False)  # as on a GPU
    monkeypatch.setattr(calls, "UNGUARDED", frozenset())
    calls._entry.cache_clear()
    monkeypatch.setattr(dispatch, "ask", lambda *_, **named: None)
    return log


def tensors(fit=2048, queries=1):
    """New tensors of a call."""
    k, v = torch.randn(2, 2, fit, 2, 64).to(BF16).unbind(0)
    return dict(q=torch.randn(2, queries, 8, 64).to(BF16), k=k, v=v, causal=True)


def in_pages(**given):
    found = tensors() | given
    for name in "kv":
        found[name] = found[name].view(256, 16, 2, 64)
    table = torch.arange(256, dtype=INT32).view(2, 128)
    return found | dict(page_table=table, seqused_k=torch.tensor([7, 2048], dtype=INT32))


def packed(**given):
    found = in_pages(**given)
    found["q"] = found["q"].flatten(0, 1)
    return found | dict(cu_seqlens_q=torch.tensor([0, 1, 2], dtype=INT32))


def by_heads():
    found = tensors()
    return found | {x: found[x].transpose(1, 2) for x in "qkv"} | dict(layout="bhsd")


def in_bytes(dtype=torch.float8_e4m3fn, by_row=True):
    found = in_pages()
    for name in "kv":
        found[name] = found[name].to(dtype)
        found[f"{name}_descale"] = torch.rand(256, 16, 2) if by_row else torch.rand(2)
    return found


CALLS = {
    "e4m3, rows": in_bytes,
    "int8, heads": lambda: in_bytes(torch.int8, False),
    "in pieces": lambda: tensors() | dict(split_size=512),
    "in one piece": lambda: tensors() | dict(split_size=4096),
    "by heads": lambda: by_heads() | dict(split_size=512),
    "out": lambda: tensors() | dict(out=torch.zeros(2, 1, 8, 64, dtype=BF16)),
    "one tensor": lambda: tensors() | dict(v=None, split_size=512),
    "several queries": lambda: tensors(queries=8) | dict(split_size=512),
    "in pages": in_pages,
    "packed": packed,
    "moved lengths": lambda: in_pages() | dict(seqused_k=moved(torch.zeros(2, dtype=INT32), 1)),
    "all": lambda: in_pages(
        **dict(alibi_slopes=torch.rand(2, 8), sinks=torch.randn(8), window=(300, 0)),
        **dict(softcap=20.0, scale=0.3, out=torch.zeros(2, 1, 8, 64, dtype=BF16)),
    ),
}


def call(given):
    given = dict(given)
    given["v"] = given["k"] if given["v"] is None else given["v"]
    return tilewise.attention(return_lse=True, backend="portable", **given)


def ways_of(log):
    """How calls launched."""
    return [how for name, how, *_ in log if "split" in name]


def ways(log):
    """How calls since the last time launched."""
    found = ways_of(log)
    log.clear()
    return found
