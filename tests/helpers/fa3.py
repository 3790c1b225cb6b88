"""The schemas of FA3's operators, and functions that stand in for them."""

import torch

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
