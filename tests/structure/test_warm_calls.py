"""The host half of a warm call, in functions of the library: a count that only falls, and no time.

A function counts that is entered outside of the backend. Those that look at values, which a GPU
call does not do, count neither.
"""

import pytest
import torch
from helpers.work import entered

import tilewise
from tilewise import attention

BACKEND = "kernels/"
LOOKS_AT_VALUES = "check_values", "check_cached_values", "knows_values", "last_read"
LOOKS_AT_VALUES += "check_reach", "check_places"
INT32 = torch.int32


def dense():
    q, k, v = torch.zeros(3, 1, 64, 4, 64).unbind(0)
    return lambda: attention(q, k, v, causal=True)


def packed():
    q, k, v = torch.zeros(3, 64, 4, 64).unbind(0)
    starts = torch.tensor([0, 30, 64], dtype=INT32)
    return lambda: attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)


def fp8():
    quantized = tilewise.quantize(*torch.ones(3, 1, 64, 4, 64, dtype=torch.bfloat16).unbind(0))
    return lambda: attention(quantized, causal=True)


def cache():
    q, k, v = torch.zeros(3, 1, 1, 4, 64).unbind(0)
    k_pages, v_pages = torch.zeros(2, 4, 16, 4, 64).unbind(0)
    pages = torch.arange(4, dtype=INT32)[None]
    return q, k, v, k_pages, v_pages, pages, torch.tensor([10], dtype=INT32)


def paged_decode():
    q, _, _, k_pages, v_pages, pages, used = cache()
    return lambda: attention(q, k_pages, v_pages, page_table=pages, seqused_k=used)


def decode_with_append():
    q, k, v, k_pages, v_pages, pages, used = cache()
    return lambda: tilewise.flash_attn_with_kvcache(
        q, k_pages, v_pages, k, v, cache_seqlens=used, block_table=pages, causal=True
    )


MOST = {dense: 9, packed: 10, fp8: 19, paged_decode: 9, decode_with_append: 60}


@pytest.mark.parametrize("prepare", MOST, ids=lambda x: x.__name__)
def test_a_warm_call_enters_no_more_functions(prepare):
    call = prepare()
    for _ in range(3):
        call()
    functions = entered(call, (BACKEND, *LOOKS_AT_VALUES))
    assert len(functions) <= MOST[prepare], functions
