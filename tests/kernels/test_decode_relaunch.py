"""A step of decoding that looks like the one before launches what that one did, on its own tensors.

No GPU: kernels are fakes that record their calls.
"""

import functools
import gc
import weakref

import pytest
import torch
from helpers.decode_steps import (
    CALLS,
    call,
    compiled_for,
    in_bytes,
    in_pages,
    packed,
    record,
    tensors,
    ways,
    ways_of,
)
from helpers.fake_kernels import plain
from helpers.looks import moved
from triton import knobs

import tilewise
from tilewise.errors import ArgumentError
from tilewise.kernels.common.workspace import LINE
from tilewise.kernels.portable import decode_launch
from tilewise.ops import calls

BF16, INT32 = torch.bfloat16, torch.int32


@pytest.fixture
def log(monkeypatch):
    return record(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_arguments(log, name):
    first, second = CALLS[name](), CALLS[name]()
    for given in (first, second, second):
        found = call(given)
    count = len(log) // 3
    calls._entry.cache_clear()
    expected = call(second)
    groups = [log[i : i + count] for i in range(0, len(log), count)]
    assert [{how for _, how, *_ in x} for x in groups] == [
        {"front"},
        {"again"},
        {"again"},
        {"front"},
    ]
    assert count == (1 if name == "in one piece" else 2)
    for one, new, more, front in zip(*groups):
        assert new[0] == front[0] and new[2] == front[2]
        assert plain(new[3]) == plain(more[3]) == plain(front[3])
        assert compiled_for(one[3]) == compiled_for(front[3])
    for x, y in zip(found, expected):
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
    if "out" in second:
        assert found[0] is second["out"]


def test_arguments_of_e4m3_by_its_bits(log, monkeypatch):
    monkeypatch.setattr(decode_launch, "converts_e4m3", lambda device: False)
    test_arguments(log, "e4m3, rows")
    assert log[0][3][1].k.ptr.dtype == torch.uint8


def test_other_scales_are_read(log):
    """Where they lie is passed on, and what they look like is another signature."""
    first, second = in_bytes(), in_bytes()
    call(first)
    call(first | {x: second[x] for x in ("k_descale", "v_descale")})
    assert ways_of(log) == ["front", "again"]
    (_, _, _, (_, cache, *_)) = next(x for x in log if x[1] == "again" and "split" in x[0])
    assert cache[7] == second["k_descale"].data_ptr()
    assert cache[11] == second["v_descale"].data_ptr()
    log.clear()
    others = torch.rand(2), torch.rand(2, 2), torch.rand(()), None, torch.rand(256, 2, 16).mT
    for other in others:
        call(first | dict(k_descale=other))
        call(first | dict(v_descale=other))
    assert ways(log) == ["front"] * 10


def test_flash_attn_with_kvcache_takes_scales_again(log):
    for given in (in_bytes(), in_bytes()):
        tilewise.flash_attn_with_kvcache(
            *(given[x] for x in "qkv"),
            **dict(block_table=given["page_table"], cache_seqlens=given["seqused_k"]),
            **{x: given[x] for x in ("k_descale", "v_descale")},
        )
    assert ways_of(log) == ["front", "again"]
    (*_, (_, cache, *_)) = next(x for x in log if x[1] == "again" and "split" in x[0])
    assert cache[7] == given["k_descale"].data_ptr()


def test_a_drop_in_function_takes_the_same_way(log):
    """`flash_attn_with_kvcache` after itself, and `flash_attn_varlen_func` over pages."""
    for given in (in_pages(), in_pages(), in_pages(causal=False)):
        q, k, v, used = (given[x] for x in ("q", "k", "v", "seqused_k"))
        at = dict(block_table=given["page_table"], causal=given["causal"])
        tilewise.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **at)
    assert ways(log) == ["front", "again", "front"]
    for given in (packed(), packed()):
        q, k, v, used, starts = (given[x] for x in ("q", "k", "v", "seqused_k", "cu_seqlens_q"))
        starts_k = torch.cat([starts[:1], used.cumsum(0)]).to(INT32)
        tilewise.flash_attn_varlen_func(
            *(q, k, v, starts, starts_k, 1, 2048),
            **dict(block_table=given["page_table"], causal=True),
        )
    assert ways(log) == ["front", "again"]


def test_another_look_is_another_step(log):
    given = CALLS["all"]()
    call(given)
    others = dict(
        q=moved(given["q"], 1),
        k=given["k"].repeat(1, 1, 2, 1)[:, :, ::2],
        page_table=given["page_table"][:, :64],
        seqused_k=None,
        window=(301, 0),
        scale=0.25,
        softcap=None,
        split_size=256,
        out=torch.zeros(2, 1, 9, 64, dtype=BF16)[:, :, :8],
        alibi_slopes=given["alibi_slopes"][0],
        causal=False,
    )
    for name, other in others.items():
        call(given | {name: other})
    assert ways(log) == ["front"] * (len(others) + 1)
    call(given | dict(k=given["k"].clone()))
    assert ways(log) == ["again"]


def test_wrong_arguments_that_equal_known_ones_are_refused(log):
    given = tensors() | dict(split_size=512, scale=1.0, window=(1, 0))
    call(given)
    for other in (dict(scale=True), dict(window=(True, 0)), dict(causal=1), dict(split_size=0)):
        with pytest.raises(ArgumentError):
            call(given | other)
    sinks = torch.zeros(8, requires_grad=True)
    with_out = CALLS["out"]() | dict(sinks=sinks)
    with torch.no_grad():
        call(with_out)
    with pytest.raises(NotImplementedError, match="requires_grad"):
        call(with_out)


@pytest.mark.parametrize("what", ["another device", "a profiler", "checks", "a mask", "a copy"])
def test_what_is_not_launched_again(log, monkeypatch, what):
    given = CALLS["in pages"]()
    if what == "a mask":
        given |= dict(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    if what == "a copy":
        given["page_table"] = given["page_table"].T.contiguous().T
    call(given)
    if what == "another device":
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    if what == "a profiler":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    if what == "checks":
        monkeypatch.setenv("TILEWISE_CHECK", "1")
    call(given)
    assert ways(log) == ["front", "front"]


def test_steps_are_bounded_and_keep_no_tensor(log, monkeypatch):
    kept = functools.lru_cache(maxsize=2)(calls._entry.__wrapped__)
    monkeypatch.setattr(calls, "_entry", kept)
    for fit in (1024, 1040, 1056, 1072):
        given = tensors(fit) | dict(split_size=512)
        call(given)
        assert kept.cache_info().currsize <= 2
    call(given)
    assert ways(log)[-1] == "again"
    alive = weakref.ref(given["k"])
    del given
    gc.collect()
    assert alive() is None


def test_a_caller_without_lse_has_none_made(log):
    given = CALLS["in pages"]()
    rows = []
    for asked in (True, True, False):
        found = tilewise.attention(return_lse=asked, backend="portable", **given)
        rows.append(log[-1][3])
    assert isinstance(found, torch.Tensor)
    tilewise.attention(return_lse=False, backend="portable", **given)
    _, partials, _, lse, *_ = log[-1][3]
    states = partials[3] * 2048 // 512  # of rows, by pieces
    ends = [first + -(-4 * states * n // LINE) * LINE for first, n in zip(partials, (64, 1, 1))]
    assert [*partials[1:3], lse] == ends
