"""The schemas of FA3's operators, and what stands in for them and for packages of attention."""

import sys
import types

import torch

from benchmarks.bench import peers

FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor? q_v=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,"
    " float? softmax_scale=None, bool is_causal=False, float softcap=0.0,"
    " bool deterministic=False) -> (Tensor, Tensor)"
)
PACKING = (
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
)
FWD_PACKED = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v=None,"
    f"{PACKING} float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
BWD_PACKED = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,"
    f"{PACKING} float? softmax_scale=None, bool is_causal=False, float softcap=0.0,"
    " bool deterministic=False) -> (Tensor, Tensor)"
)


def as_keywords(schema, function, positional):
    """The dispatcher hands over arguments by position: they get their names back."""
    names = [argument.name for argument in torch._C.parse_schema("x::" + schema).arguments]

    def call(*arguments, **rest):
        named = dict(zip(names, arguments)) | rest
        first = [named.pop(name) for name in names[:positional]]
        return function(*first, **named)

    return call


def install(monkeypatch, module, **functions):
    """A package with these functions, and nothing else of its kind."""
    monkeypatch.delenv(peers.FA3_LIBRARY, raising=False)
    monkeypatch.setattr(peers, "unfit", lambda shape, device, majors: None)
    fake = types.ModuleType(module)
    vars(fake).update(functions)
    parts = module.split(".")
    for end in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module, fake)
