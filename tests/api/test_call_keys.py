"""Keys of known calls: no two lists of arguments have one, so that what is wrong is refused after
any call that was right.
"""

import contextlib
import inspect
import random

import pytest
import torch

import tilewise
import tilewise.distributed as td
from tilewise.cache import Rotary
from tilewise.frontend import attention, flash_attn, fp8, kv_cache, quantize, sdpa
from tilewise.ops import calls
from tilewise.ops.calls import find

VALUES = (None, -1, 0, 1, True, False, 1.0, 0.0, "backend", "bounds", "cpu")
WINDOWS = (*VALUES, (), (None,), (1,), (1, 0), (None, None), (True, 0), (1.0, 0), (1, 0, 1))


def test_no_two_lists_of_arguments_have_one_key():
    """Words, then a window: of as many words, whatever they are."""
    q, rng = torch.randn(1, 8, 1, 16), random.Random(0)
    entries, count = {}, 4
    for _ in range(3000):
        words = tuple(rng.choice(VALUES) for _ in range(count))
        window = rng.choice(WINDOWS)
        entry, _ = find((q, q, q), plain=("a test", *words), window=window)
        key = tuple(map(repr, words)), repr(window)
        assert entries.setdefault(id(entry), (key, entry))[0] == key


def test_a_window_of_one_side_is_refused_after_none():
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16)
    functions = {
        "window": lambda x: tilewise.attention(q, k, k, window=x),
        "window with bounds": lambda x: tilewise.attention(q, k, k, window=x, max_seqlen_q=8),
        "window_size": lambda x: tilewise.flash_attn_func(q, k, k, window_size=x),
        "distributed": lambda x: td.attention(q, k, k, layout=td.zigzag(8, 1), window=x),
    }
    for function in functions.values():
        for _ in "12":
            function(None)
        with pytest.raises(ValueError, match="window"):
            function((None,))


def test_a_backend_is_no_window():
    q = torch.randn(1, 8, 1, 16)
    tilewise.attention(q, q, q, max_seqlen_q=4, max_seqlen_k=1)
    with pytest.raises(ValueError, match="backend='bounds' is unknown"):
        tilewise.attention(q, q, q, backend="bounds", window=(4, 1))
    tilewise.attention(q, q, q, backend="cpu", window=(4, 1))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed(**lengths):
    q = torch.randn(8, 4, 16)
    k = torch.randn(8, 2, 16)
    lengths = dict(cu_seqlens_q=ints(0, 3, 8), cu_seqlens_k=ints(0, 5, 8)) | lengths
    return tilewise.attention(q, k, k, causal=True, **lengths)


def varlen(**lengths):
    q = torch.randn(8, 4, 16)
    lengths = dict(cu_seqlens_q=ints(0, 3, 8), cu_seqlens_k=ints(0, 5, 8)) | lengths
    return tilewise.flash_attn_varlen_func(q, q, q, max_seqlen_q=5, max_seqlen_k=5, **lengths)


def eight_bits(**lengths):
    lengths = dict(cu_seqlens_q=ints(0, 3, 8), cu_seqlens_k=ints(0, 5, 8)) | lengths
    x = tilewise.quantize(
        *torch.randn(3, 8, 4, 16).unbind(0),
        cu_seqlens_q=ints(0, 3, 8),
        **dict(cu_seqlens_k=ints(0, 5, 8)),
    )
    return tilewise.attention(x, **lengths)


def padded(**lengths):
    q = torch.randn(2, 8, 4, 16)
    return tilewise.attention(q, q, q, layout="bhsd", **dict(seqused_k=ints(1, 4)) | lengths)


def paged(**lengths):
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 6, 8, 2, 16)
    lengths = dict(page_table=ints(5, 0, 1, 4).view(2, 2), seqused_k=ints(16, 3)) | lengths
    return tilewise.attention(q, k, v, window=(8, 0), **lengths)


def kvcache(**lengths):
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 6, 8, 2, 16)
    lengths = dict(block_table=ints(5, 0, 1, 4).view(2, 2), cache_seqlens=ints(16, 3)) | lengths
    return tilewise.flash_attn_with_kvcache(q, k, v, causal=True, **lengths)


WRONG_VALUES = {
    "starts of q": (packed, dict(cu_seqlens_q=ints(0, 3, 9))),
    "starts of k": (packed, dict(cu_seqlens_k=ints(1, 3, 8))),
    "starts in varlen_func": (varlen, dict(cu_seqlens_q=ints(0, 5, 4))),
    "starts of 8 bits": (eight_bits, dict(cu_seqlens_k=ints(0, 9, 8))),
    "keys in use": (padded, dict(seqused_k=ints(9, 1))),
    "a page": (paged, dict(page_table=ints(5, 0, 7, 4).view(2, 2))),
    "keys in pages": (paged, dict(seqused_k=ints(17, 3))),
    "a page of kvcache": (kvcache, dict(block_table=ints(5, 6, 1, 4).view(2, 2))),
    "keys of kvcache": (kvcache, dict(cache_seqlens=ints(16, -1))),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_values_are_checked_at_every_call(case):
    """Lengths on a CPU are in no key: what is wrong is refused, by the same words, in a call that
    is found as in a first one.
    """
    call, wrong = WRONG_VALUES[case]
    calls._entry.cache_clear()
    with pytest.raises(ValueError, match=next(iter(wrong))) as first:
        call(**wrong)
    for _ in range(3):
        call()
        with pytest.raises(ValueError) as later:
            call(**wrong)
        assert str(later.value) == str(first.value)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("has_out", [False, True])
def test_a_cache_on_a_cpu_is_read_again(layout, has_out):
    """A call that is found reads the tensors of its own."""
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        q, (k, v) = torch.randn(2, 3, 4, 16), torch.randn(2, 6, 8, 2, 16).to(torch.float8_e4m3fn)
        scales = torch.rand(6, 8, 2)
        table = torch.randperm(4)[:4].view(2, 2).int()
        used = torch.randint(3, 17, (2,)).int()
        if layout == "bhsd":
            q, k, v, scales = (x.transpose(1, 2).contiguous() for x in (q, k, v, scales))
        out = torch.full_like(q, torch.nan) if has_out else None
        options = dict(page_table=table, seqused_k=used, k_descale=scales, layout=layout, out=out)
        result, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, **options)
        assert out is None or result is out
        found.append((result.clone(), lse))
        if seed == 2:
            calls._entry.cache_clear()
    assert all(map(torch.equal, found[0], found[2]))
    assert not torch.equal(found[0][0], found[1][0])


X, Y = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16)
ROWS, STARTS, TABLE = X.flatten(0, 1), ints(0, 8, 16), ints(0, 1).view(2, 1)
E4M3 = X.to(torch.float8_e4m3fn)
SCALE = torch.tensor(2.0)
# A value of each argument that is not its default; the others are told by their default's type
OTHERS = {
    **dict.fromkeys(("q", "k", "v", "query", "key", "value", "k_cache", "v_cache"), Y),
    **dict.fromkeys(("scale", "softmax_scale", "softcap", "dropout_p"), 0.5),
    **dict.fromkeys(("alibi_slopes", "sinks", "learnable_sink"), torch.rand(4)),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"), ints(0, 4, 16)),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 4096),
    **dict.fromkeys(("seqused_q", "seqused_k", "rotary_seqlens", "cache_leftpad"), ints(1, 2)),
    **dict.fromkeys(("page_table", "block_table"), TABLE),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), SCALE),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(8, 8)),
    **dict.fromkeys(("window", "window_size"), (1, 0)),
    **dict(bias=torch.zeros(2, 4, 8, 8), dropout_rng=torch.tensor([1, 2]), split_size=4),
    **dict(score_mod=tilewise.scores.softcapped(2.0), mask_mod=tilewise.mods.causal()),
    **dict(block_mask=tilewise.sparse.create_block_mask(tilewise.mods.causal(), 1, 1, 8, 8)),
    **dict(attn_mask=torch.zeros(8, 8), out=torch.empty_like(X), out_dtype=torch.float16),
    **dict(backward="bf16", layout="bhsd", backend="cpu", cache_seqlens=ints(3, 4)),
    **dict(cache_batch_idx=ints(1, 0), num_splits=2, attention_chunk=4, qv=X, pack_gqa=True),
    **dict(
        smooth="v", scales=(SCALE, None, None), rotary=Rotary(torch.ones(8, 8), torch.ones(8, 8))
    ),
}
# On such calls, whose checks of them come before the look-up
WITHOUT_EFFECT = {
    "attention": {"dropout_rng"},
    "FP8": {"dropout_rng", "max_seqlen_k", "deterministic", "return_lse"},
    "flash_attn_with_kvcache": {
        *("num_splits", "max_seqlen_q", "rotary_interleaved", "scheduler_metadata", "sm_margin"),
        "pack_gqa",
    },
}
FUNCTIONS = {
    "attention": dict(q=X, k=X, v=X),
    "FP8": dict(q=E4M3, k=E4M3, v=E4M3),
    "flash_attn_func": dict(q=X, k=X, v=X),
    "flash_attn_varlen_func": dict(
        q=ROWS,
        k=ROWS,
        v=ROWS,
        cu_seqlens_q=STARTS,
        cu_seqlens_k=STARTS,
        max_seqlen_q=8,
        max_seqlen_k=8,
    ),
    "scaled_dot_product_attention": dict(query=X, key=X, value=X),
    "quantize": dict(q=X, k=X, v=X),
    "flash_attn_with_kvcache": dict(q=X, k_cache=X, v_cache=X, cache_seqlens=ints(1, 2)),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_every_argument_is_in_the_key(case, monkeypatch):
    """A call with another value of any argument has another key, or none: a forgotten one would
    be answered from the cache.
    """
    looked, base = [], FUNCTIONS[case]
    function = getattr(tilewise, "attention" if case == "FP8" else case)

    def noted(tensors, plain, window=None, checks_values=False):
        looked.append((list(map(id, tensors)), list(map(repr, plain)), repr(window)))
        return None, None

    for module in (attention, flash_attn, fp8, kv_cache, quantize, sdpa):
        monkeypatch.setattr(module, "find", noted)

    def key_of(**options):
        looked.clear()
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError, TypeError):
            function(**base | options)
        return list(looked)

    plain = key_of()
    assert plain and key_of() == plain
    parameters = inspect.signature(function).parameters
    assert parameters.keys() >= WITHOUT_EFFECT.get(case, set())
    for name in parameters.keys() - WITHOUT_EFFECT.get(case, set()):
        value = OTHERS.get(name, not parameters[name].default)
        if case == "FP8" and name in base:
            value = base[name].clone()
        assert key_of(**{name: value}) != plain, name
