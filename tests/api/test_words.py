"""Every public function's errors name its own arguments."""

import re

import pytest
import torch

import tilewise
from tilewise import ArgumentError


def bshd(batch=2, seqlen=8, nheads=4, headdim=16, **kwargs):
    return torch.randn(batch, seqlen, nheads, headdim, **kwargs)


def bhsd(**kwargs):
    return bshd(**kwargs).transpose(1, 2)


META = {"device": "meta"}
# Wrong arguments of torch's function with good tensors, and what the error says
OF_TORCH = {
    "query a list": (dict(query=[1.0]), "query is a list"),
    "query of rank 1": (
        dict(query=torch.randn(16)),
        "query has shape (16,)",
        "at least 2 dimensions, (..., seqlen, headdim)",
    ),
    "key of rank 2, shared": (
        dict(key=torch.randn(8, 16), enable_gqa=True),
        "key has shape (8, 16)",
        "3 dimensions with enable_gqa=True, (..., nheads, seqlen, headdim)",
    ),
    "heads of key of rank 3": (
        dict(key=torch.randn(3, 8, 16), value=torch.randn(3, 8, 16)),
        "query has 4 heads and key has 3",
        "key (3, 8, 16)",
        "enable_gqa",
    ),
    "dtype of key": (dict(key=bhsd().half()), "key.dtype is torch.float16 and query.dtype"),
    "device of value": (dict(value=bhsd(**META)), "value is on meta and query is on cpu"),
    "batch of key": (
        dict(key=bhsd(batch=3)),
        "query (2, 4, 8, 16), key (3, 4, 8, 16), value (2, 4, 8, 16) before the last two",
        "do not broadcast",
    ),
    "seqlens": (
        dict(value=bhsd(seqlen=9)),
        "key has seqlen 8 and value has seqlen 9",
        "(query (2, 4, 8, 16), key (2, 4, 8, 16), value (2, 4, 9, 16))",
    ),
    "heads": (dict(key=bhsd(nheads=2)), "query has 4 heads and key has 2", "enable_gqa"),
    "heads of value": (dict(value=bhsd(nheads=2)), "value (2, 2, 8, 16)", "do not broadcast"),
    "heads that do not share": (
        dict(key=bhsd(nheads=3), value=bhsd(nheads=3), enable_gqa=True),
        "query has 4 heads and key has 3",
        "the heads of query must be a multiple of those of key",
    ),
    "headdims": (dict(key=bhsd(headdim=8)), "query has headdim 16 and key has headdim 8"),
    "integers": (
        dict(query=bhsd().int(), key=bhsd().int(), value=bhsd().int()),
        "query.dtype is torch.int32",
        "cast query, key and value",
    ),
    "mask a list": (dict(attn_mask=[1]), "attn_mask is a list", "torch.Tensor"),
    "mask of another shape": (dict(attn_mask=torch.ones(7, 8)), "attn_mask has shape (7, 8)"),
    "mask of fp64": (
        dict(attn_mask=torch.ones(8, 8).double()),
        "attn_mask.dtype is torch.float64: it must be bool or float32",
    ),
    "mask of ints": (
        dict(attn_mask=torch.ones(8, 8).int()),
        "attn_mask.dtype is torch.int32: it must be bool or float32",
    ),
    "mask of fp16": (dict(attn_mask=torch.ones(8, 8).half()), "attn_mask.dtype is torch.float16"),
    "device of a mask": (
        dict(attn_mask=torch.ones(8, 8, **META)),
        "attn_mask is on meta",
    ),
    "device of a bool mask": (
        dict(attn_mask=torch.ones(8, 8, dtype=torch.bool, **META)),
        "attn_mask is on meta",
    ),
    "mask and causal": (
        dict(attn_mask=torch.ones(8, 8), is_causal=True),
        "attn_mask with is_causal",
    ),
    "is_causal a word": (dict(is_causal="no"), "is_causal='no': it must be False or True"),
    "is_causal none": (dict(is_causal=None), "is_causal=None"),
    "enable_gqa a word": (
        dict(key=bhsd(nheads=2), value=bhsd(nheads=2), enable_gqa="no"),
        "enable_gqa='no'",
    ),
    "scale": (dict(scale=float("nan")), "scale=nan", "negate query"),
    "learned scale": (
        dict(scale=torch.tensor(1.0, requires_grad=True)),
        "scale is a tensor",
        "multiply query",
    ),
    "small scale": (dict(scale=1e-46), "scale=1e-46", "multiply query"),
    "dropout_p": (dict(dropout_p=1.5), "dropout_p=1.5"),
    "dropout_p none": (dict(dropout_p=None), "dropout_p=None"),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_torchs_function_speaks_of_its_own_arguments(name):
    wrong, *pieces = OF_TORCH[name]
    tensors = {x: bhsd() for x in ("query", "key", "value")}
    for _ in range(2):
        with pytest.raises(ArgumentError) as refusal:
            tilewise.scaled_dot_product_attention(**(tensors | wrong))
        tilewise.scaled_dot_product_attention(**tensors)
    said = str(refusal.value)
    assert all(piece in said for piece in pieces), said
    assert not re.search(r"\b(q|k|v|bias|layout|seqlens)\b", said), said


def test_the_wording_follows_the_dtype_of_query():
    q = bhsd().half()
    mask = torch.ones(8, 8, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"bool or float16 or float32$"):
        tilewise.scaled_dot_product_attention(q, q, q, mask)


OF_FLASH = {
    "softmax_scale": (dict(softmax_scale=-1.0), "softmax_scale=-1.0", "negate q"),
    "softmax_scale a word": (dict(softmax_scale="x"), "softmax_scale='x'"),
    "softmax_scale lost": (dict(softmax_scale=1e-46), "softmax_scale=1e-46"),
    "learned softmax_scale": (
        dict(softmax_scale=torch.tensor(1.0, requires_grad=True)),
        "softmax_scale is a tensor",
    ),
    "quotient": (dict(softmax_scale=1e20, softcap=1e-20), "softmax_scale / softcap"),
    "window_size": (dict(window_size=4), "window_size=4"),
    "sink": (dict(learnable_sink=torch.ones(3)), "learnable_sink has shape (3,)"),
    "a sink that is a list": (dict(learnable_sink=[1.0]), "learnable_sink is a list"),
    "causal": (dict(causal="top_left"), "causal='top_left': it must be False or True", "here"),
    "causal an array": (dict(causal=torch.tensor([1, 2])), "causal=tensor"),
    "deterministic": (dict(deterministic="yes"), "deterministic='yes'"),
    "return_lse": (dict(return_lse="yes"), "return_lse='yes'"),
    "return_attn_probs": (dict(return_attn_probs=[]), "return_attn_probs=[]"),
    "dropout_p": (dict(dropout_p=None), "dropout_p=None"),
}
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", OF_FLASH)
def test_flash_attns_functions_speak_of_their_own_arguments(name, is_packed):
    wrong, *pieces = OF_FLASH[name]
    with pytest.raises(ArgumentError) as refusal:
        if is_packed:
            packed = torch.randn(8, 4, 16)
            tilewise.flash_attn_varlen_func(packed, packed, packed, STARTS, STARTS, **wrong)
        else:
            tilewise.flash_attn_func(bshd(), bshd(), bshd(), **wrong)
    said = str(refusal.value)
    assert all(piece in said for piece in pieces), said
    assert not re.search(r"\b(sinks|window|layout)\b|(?<!softmax_)scale=", said), said


def test_shapes_of_flash_attn_have_one_order():
    with pytest.raises(ArgumentError, match=r"dimensions, \(batch, seqlen, nheads, headdim\)$"):
        tilewise.flash_attn_func(torch.ones(2, 3), bshd(), bshd())


STATES = {
    "none": (0, None, "out1 is a NoneType"),
    "a number": (1, 3.0, "lse1 is a float"),
    "integers": (2, torch.ones(2, 8, 4, 16).int(), "out2.dtype is torch.int32"),
    "sparse": (0, torch.ones(2).to_sparse(), "out1.layout is torch.sparse_coo"),
    "another device": (3, torch.ones(2, 4, 8, device="meta"), "lse2 is on meta and out1 is on cpu"),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_are_none_are_refused_by_name(name):
    at, wrong, said = STATES[name]
    states = [bshd(), torch.randn(2, 4, 8), bshd(), torch.randn(2, 4, 8)]
    states[at] = wrong
    with pytest.raises(ArgumentError, match=re.escape(said) + ".*(must|move|pass)"):
        tilewise.merge_states(*states)
