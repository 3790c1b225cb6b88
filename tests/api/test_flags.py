"""A flag is False or True: what is no bool is refused by its name in every kind of call."""

import functools
import inspect

import pytest
import torch

import tilewise
from tilewise import ArgumentError

INT32 = torch.int32
Q = torch.randn(2, 6, 4, 16)
K = torch.randn(2, 8, 2, 16)
HEADS_FIRST = [x.transpose(1, 2) for x in (Q, K.repeat_interleave(2, 2), K.repeat_interleave(2, 2))]
STARTS = [torch.tensor([0, n, 2 * n], dtype=INT32) for n in (6, 8)]
TABLE = torch.tensor([[1], [0]], dtype=INT32)
USED = torch.tensor([8, 7], dtype=INT32)
EIGHT = [x.to(torch.float8_e4m3fn) for x in (Q, K, K)]
ROWS = [x.flatten(0, 1) for x in (Q, K, K)]
PAGES = dict(block_table=TABLE, seqused_k=USED)


def appended(**options):
    new = torch.randn(2, 1, 2, 16)
    lengths = dict(cache_seqlens=USED - 1, rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(9, 8))
    return tilewise.flash_attn_with_kvcache(
        Q[:, :1], K.clone(), K.clone(), new, new, **lengths, **options
    )


CALLS = {
    "attention": functools.partial(tilewise.attention, Q, K, K),
    "attention, packed": functools.partial(
        tilewise.attention, *ROWS, cu_seqlens_q=STARTS[0], cu_seqlens_k=STARTS[1]
    ),
    "attention, pages": functools.partial(
        tilewise.attention, Q, K, K, page_table=TABLE, seqused_k=USED
    ),
    "attention, pieces": functools.partial(tilewise.attention, Q, K, K, split_size=4),
    "attention, FP8": functools.partial(tilewise.attention, *EIGHT),
    "attention, Quantized": functools.partial(tilewise.attention, tilewise.quantize(Q, K, K)),
    "flash": functools.partial(tilewise.flash_attn_func, Q, K, K),
    "flash, chunks": functools.partial(tilewise.flash_attn_func, Q, K, K, attention_chunk=3),
    "flash, FP8": functools.partial(tilewise.flash_attn_func, *EIGHT),
    "varlen": functools.partial(tilewise.flash_attn_varlen_func, *ROWS, *STARTS),
    "varlen, FP8": functools.partial(
        tilewise.flash_attn_varlen_func, *(x.flatten(0, 1) for x in EIGHT), *STARTS
    ),
    "varlen, pages": functools.partial(
        tilewise.flash_attn_varlen_func, ROWS[0], K, K, STARTS[0], **PAGES
    ),
    "cache": functools.partial(tilewise.flash_attn_with_kvcache, Q, K, K),
    "cache, append": appended,
    "stacked": functools.partial(tilewise.flash_attn_kvpacked_func, Q, torch.stack((K, K), 2)),
    "sdpa": functools.partial(tilewise.scaled_dot_product_attention, *HEADS_FIRST),
    "flex": functools.partial(tilewise.flex_attention, *HEADS_FIRST),
    "reference": functools.partial(tilewise.attention_reference, Q, K, K),
    "quantize": functools.partial(tilewise.quantize, Q, K, K),
}
FUNCTIONS = {"cache, append": tilewise.flash_attn_with_kvcache}


def flags_of(name):
    """The arguments that are a bool by their default."""
    function = FUNCTIONS.get(name) or CALLS[name].func
    parameters = inspect.signature(function).parameters.values()
    return [x.name for x in parameters if type(x.default) is bool]


@pytest.mark.parametrize("name", CALLS)
def test_a_flag_is_a_bool(name):
    call, flags = CALLS[name], flags_of(name)
    assert flags
    for flag in flags:
        call(**{flag: False})
        for wrong in ("no", 2, None):
            with pytest.raises(ArgumentError, match=f"{flag}={wrong!r}"):
                call(**{flag: wrong})
