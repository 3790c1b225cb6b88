"""What `flash_attn_with_kvcache` refuses it refuses before it writes: caches, their scales and
`out` keep every bit.
"""

import contextlib
from typing import Any

import pytest
import torch
from helpers.appends import bits

import tilewise
from tilewise import testing

BATCH, ROOM, HEADS, HEADS_K, HEADDIM = 2, 8, 4, 2, 16
WRITTEN = "k_cache", "v_cache", "k_descale", "v_descale", "out"
REFUSALS = tilewise.ArgumentError, NotImplementedError


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def learned(*shape):
    return torch.ones(shape, requires_grad=True)


def rotary(positions) -> dict[str, Any]:
    return dict(rotary_cos=torch.ones(positions, 8), rotary_sin=torch.zeros(positions, 8))


def packed(counts) -> dict[str, Any]:
    starts = ints(0, *counts).cumsum(0, dtype=torch.int32)
    return dict(q=torch.ones(int(starts[-1]), HEADS, HEADDIM), cu_seqlens_q=starts)


def rows() -> dict[str, Any]:
    q = torch.randn(BATCH, 1, HEADS, HEADDIM)
    k, v = torch.randn(2, BATCH, 1, HEADS_K, HEADDIM).unbind(0)
    caches = torch.randn(2, BATCH, ROOM, HEADS_K, HEADDIM).unbind(0)
    given = dict(q=q, k_cache=caches[0], v_cache=caches[1], k=k, v=v, cache_seqlens=ints(3, 3))
    return given | dict(out=torch.full_like(q, 7.0))


def pages() -> dict[str, Any]:
    given = rows()
    caches = {name: given[name].view(4, 4, HEADS_K, HEADDIM) for name in ("k_cache", "v_cache")}
    return given | caches | dict(block_table=ints(3, 1, 0, 2).view(2, 2))


def eight_bits() -> dict[str, Any]:
    given = rows()
    given |= {name: given[name].to(torch.int8) for name in ("k_cache", "v_cache")}
    scales = {name: torch.rand(BATCH, ROOM, HEADS_K) for name in ("k_descale", "v_descale")}
    return given | scales


def padded() -> dict[str, Any]:
    return rows() | dict(cache_leftpad=ints(1, 0))


def rotated() -> dict[str, Any]:
    return rows() | rotary(ROOM) | dict(causal=True)


CALLS = rows, pages, eight_bits, padded, rotated

# An argument that is wrong in any call, and the name or word that the message has
WRONG: dict[str, Any] = {
    "a negative softcap": (dict(softcap=-1.0), "softcap"),
    "a scale of 0": (dict(softmax_scale=0), "softmax_scale"),
    "a negative scale": (dict(softmax_scale=-1.0), "softmax_scale"),
    "a scale that is a word": (dict(softmax_scale="x"), "softmax_scale"),
    "slopes of another shape": (dict(alibi_slopes=torch.ones(3)), "alibi_slopes"),
    "slopes of another dtype": (dict(alibi_slopes=torch.ones(HEADS).half()), "alibi_slopes"),
    "slopes that learn": (dict(alibi_slopes=learned(HEADS)), "alibi_slopes"),
    "sinks of another shape": (dict(learnable_sink=torch.ones(3)), "learnable_sink"),
    "sinks of another dtype": (dict(learnable_sink=ints(1, 1, 1, 1)), "learnable_sink"),
    "sinks that learn": (dict(learnable_sink=learned(HEADS)), "learnable_sink"),
    "sinks that are a list": (dict(learnable_sink=[1.0] * HEADS), "learnable_sink"),
    "out of another shape": (dict(out=torch.ones(1, 1, HEADS, HEADDIM)), "out"),
    "out of another dtype": (dict(out=torch.ones(BATCH, 1, HEADS, HEADDIM).half()), "out"),
    "out that is a list": (dict(out=[1.0]), "out"),
    "out that learns": (dict(out=learned(BATCH, 1, HEADS, HEADDIM)), "out"),
    "out that overlaps": (
        dict(out=torch.ones(1, 1, 1, HEADDIM).expand(BATCH, 1, HEADS, HEADDIM)),
        "share memory",
    ),
    "a flag of 3": (dict(return_softmax_lse=3), "return_softmax_lse"),
    "a window of one side": (dict(window_size=(3,)), "window_size"),
    "starts with queries of 4 dimensions": (dict(cu_seqlens_q=ints(0, 1, 2)), "q has shape"),
    "starts that decrease": (packed((1, 1)) | dict(cu_seqlens_q=ints(0, 2, 1)), "cu_seqlens_q"),
    "q of other heads": (dict(q=torch.ones(BATCH, 1, 3, HEADDIM)), "heads"),
    "q of another headdim": (dict(q=torch.ones(BATCH, 1, HEADS, 8)), "headdim"),
    "q of another dtype": (dict(q=torch.ones(BATCH, 1, HEADS, HEADDIM).int()), "dtype"),
    "q on another device": (dict(q=torch.ones(BATCH, 1, HEADS, HEADDIM, device="meta")), "device"),
    "q of 3 dimensions": (dict(q=torch.ones(BATCH, HEADS, HEADDIM)), "q has shape"),
    "q of no dimensions": (dict(q=torch.ones(())), "q has shape"),
    "q that learns": (dict(q=learned(BATCH, 1, HEADS, HEADDIM)), "q.requires_grad"),
    "q of another batch": (dict(q=torch.ones(3, 1, HEADS, HEADDIM)), "3"),
    "k of another batch": (dict(k=torch.ones(3, 1, HEADS_K, HEADDIM)), "k has|v has"),
    "k of 3 dimensions": (dict(k=torch.ones(BATCH, HEADS_K, HEADDIM)), "k has shape"),
    "v of another headdim": (dict(v=torch.ones(BATCH, 1, HEADS_K, 8)), "v has"),
    "k without v": (dict(v=None), "k without v"),
    "v without k": (dict(k=None), "v without k|without k"),
    "one table of angles": (dict(rotary_cos=None, rotary_sin=torch.ones(8, 8)), "rotary_sin"),
    "positions without tables": (
        dict(rotary_cos=None, rotary_sin=None, rotary_seqlens=ints(1, 1)),
        "rotary_seqlens without rotary_cos",
    ),
    "tables that are too short": (rotary(3), r"cache_seqlens=\[3, 3\].* 3 positions"),
    "negative positions": (rotary(8) | dict(rotary_seqlens=ints(-4, 1)), r"rotary_seqlens=\[-4, 1"),
    "positions past the tables": (
        rotary(8) | dict(rotary_seqlens=ints(1, 31)),
        r"rotary_seqlens=\[1, 31\]",
    ),
    "tables that learn": (
        dict(rotary_cos=learned(8, 8), rotary_sin=torch.ones(8, 8)),
        "rotary_cos.requires_grad",
    ),
    "float positions": (rotary(8) | dict(rotary_seqlens=torch.ones(2)), "rotary_seqlens"),
    "long positions": (
        rotary(8) | dict(rotary_seqlens=ints(1, 1, dtype=torch.int64)),
        "rotary_seqlens",
    ),
    "positions of 3 sequences": (rotary(8) | dict(rotary_seqlens=ints(1, 1, 1)), "rotary_seqlens"),
    "one position": (rotary(8) | dict(rotary_seqlens=3), "rotary_seqlens is an int"),
    "lengths of 3 sequences": (dict(cache_seqlens=ints(3, 3, 3)), "cache_seqlens"),
    "long lengths": (dict(cache_seqlens=ints(3, 3, dtype=torch.int64)), "cache_seqlens"),
    "starts of keys without keys": (
        dict(k=None, v=None, cu_seqlens_k_new=ints(0, 1, 2)),
        "cu_seqlens_k_new without k|without k",
    ),
    "starts of keys with 4 dimensions": (dict(cu_seqlens_k_new=ints(0, 1, 2)), "k has shape"),
    "starts of keys of one sequence": (dict(cu_seqlens_k_new=ints(0, 1)), "cu_seqlens_k_new"),
    "a bound that is a word": (dict(max_seqlen_q="x"), "max_seqlen_q='x'"),
    "a negative bound": (dict(max_seqlen_q=-1), "max_seqlen_q=-1"),
    "an argument of flash-attn 3": (dict(qv=torch.ones(1)), "qv"),
}
MOVED: dict[str, Any] = {  # not with a page table
    "padding of one sequence": (dict(cache_leftpad=ints(1)), r"cache_leftpad has shape \(1,\)"),
    "long padding": (dict(cache_leftpad=ints(1, 1, dtype=torch.int64)), "cache_leftpad"),
    "padding past the keys": (dict(cache_leftpad=ints(1, 5)), r"cache_leftpad=\[1, 5\]"),
    "negative padding": (dict(cache_leftpad=ints(-1, 0)), r"cache_leftpad=\[-1, 0\]"),
    "a column of rows": (
        dict(cache_batch_idx=ints(1, 0).unsqueeze(1)),
        r"cache_batch_idx has shape \(2, 1\)",
    ),
    "a row that is not there": (dict(cache_batch_idx=ints(0, 2)), "cache_batch_idx"),
}

TABLES: dict[str, Any] = {  # not a page table, and what is said of it
    "one dimension": (ints(0, 1), r"has shape \(2,\): with 2 sequences it must be \(2, pages\)"),
    "no dimension": (ints(0)[0], r"has shape \(\)"),
    "three dimensions": (ints(0, 1).view(2, 1, 1), r"has shape \(2, 1, 1\)"),
    "another batch": (
        ints(0, 1, 2).view(3, 1),
        r"has shape \(3, 1\): with 2 sequences it must be \(2, pages\)",
    ),
    "numbers": (torch.zeros(2, 2), "dtype is torch.float32"),
    "a list": ([[0, 1], [2, 3]], "is a list"),
}


def call(given: dict[str, Any]):
    return tilewise.flash_attn_with_kvcache(**given)


def assert_refuses(given: dict[str, Any], match):
    before = {name: x.clone() for name in WRITTEN if isinstance(x := given.get(name), torch.Tensor)}
    with pytest.raises(REFUSALS, match=match):
        call(given)
    for name, x in before.items():
        assert torch.equal(bits(given[name].detach()), bits(x.detach())), name


@pytest.mark.parametrize("is_interpreted", [False, True], ids=["torch", "interpreter"])
@pytest.mark.parametrize("made", CALLS, ids=lambda made: made.__name__)
def test_a_refused_call_writes_nothing(made, is_interpreted):
    wrong = WRONG if made is pages else WRONG | MOVED
    with testing.use_interpreter() if is_interpreted else contextlib.nullcontext():
        if not is_interpreted:
            for _ in range(2):  # so that the right call is known
                call(made())
        for name, (arguments, match) in wrong.items():
            try:
                assert_refuses(made() | arguments, match)
            except BaseException as error:
                raise AssertionError(name) from error


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_a_known_call_whose_out_shares_memory_writes_nothing(name):
    given = rows()
    for _ in range(2):
        call(given)
    given["out"] = given[name].flatten()[: given["out"].numel()].view_as(given["out"])
    assert_refuses(given, "shares memory")


def test_a_call_without_new_keys_leaves_out_as_it_was():
    for name, (arguments, match) in (WRONG | MOVED).items():
        if not {"k", "v", "rotary_cos", "cu_seqlens_k_new"} & arguments.keys():
            try:
                assert_refuses(rows() | dict(k=None, v=None) | arguments, match)
            except BaseException as error:
                raise AssertionError(name) from error


def test_queries_count_for_the_tables():
    """Two queries with one new key: the last is at a position more."""
    given = rows() | rotary(4) | dict(q=torch.ones(BATCH, 2, HEADS, HEADDIM), out=None)
    call(given)  # all at the first position
    assert_refuses(given | dict(causal=True), "rotary_cos has 4 positions")
    call(given | rotary(5) | dict(causal=True))


@pytest.mark.parametrize("lengths", [None, 3, ints(3, 3)], ids=["full", "a number", "lengths"])
@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_a_wrong_table_is_named_as_the_caller_does(name, has_new, lengths):
    given = pages() | dict(block_table=None, cache_seqlens=lengths)
    given |= {} if has_new else dict(k=None, v=None)
    for table, match in TABLES.values():
        assert_refuses(given | {name: table}, f"^{name}[ .]{match}")


def sharing(given, written, read):
    """The call with two of its tensors at the same address; what is read keeps its values."""
    x, y = given[written], given[read]
    memory = torch.zeros(max(z.numel() * z.itemsize for z in (x, y)), dtype=torch.uint8)
    at_once = {
        name: memory[: z.numel() * z.itemsize].view(z.dtype).view(z.shape).copy_(z)
        for name, z in ((written, x), (read, y))
    }
    return given | at_once


LEARNED = dict(alibi_slopes=torch.ones(HEADS), learnable_sink=torch.ones(HEADS))
ALONE = {
    "rows": lambda: rows() | LEARNED,
    "pages": lambda: pages() | LEARNED,
    "eight bits": lambda: eight_bits() | LEARNED,
    "moved": lambda: padded() | dict(cache_batch_idx=ints(1, 0)),
    "rotated": lambda: rotated() | dict(rotary_seqlens=ints(3, 3)),
    "packed": lambda: (
        rows()
        | packed((1, 1))
        | dict(k=torch.ones(2, HEADS_K, HEADDIM), v=torch.ones(2, HEADS_K, HEADDIM))
        | dict(cu_seqlens_k_new=ints(0, 1, 2), out=torch.ones(2, HEADS, HEADDIM))
    ),
    "nothing new": lambda: padded() | dict(cache_batch_idx=ints(1, 0), k=None, v=None),
    "nothing new or moved": lambda: rows() | LEARNED | dict(k=None, v=None),
}


@pytest.mark.parametrize("is_interpreted", [False, True], ids=["torch", "interpreter"])
@pytest.mark.parametrize("kind", ALONE)
def test_what_is_written_is_no_other_argument(kind, is_interpreted):
    """Every tensor in the memory of every one that the call writes, also where the call is known:
    it is refused by the caller's names.
    """
    made = ALONE[kind]
    names = [name for name, x in made().items() if isinstance(x, torch.Tensor)]
    written = [name for name in WRITTEN if name in names]
    if made()["k"] is None:
        written = ["out"]
    with testing.use_interpreter() if is_interpreted else contextlib.nullcontext():
        call(made())
        for name in written:
            for other in names:
                if other != name:
                    pair = {name, other}
                    says = "|".join(f"{x} is written and .* {y}:" for x in pair for y in pair - {x})
                    try:
                        assert_refuses(sharing(made(), name, other), f"^({says})")
                    except BaseException as error:
                        raise AssertionError(f"{other} in {name}") from error
        call(made())


WORDED: dict[str, Any] = {
    "k of another batch": (
        dict(k=torch.ones(3, 1, HEADS_K, HEADDIM), v=torch.ones(3, 1, HEADS_K, HEADDIM)),
        r"k has shape \(3, .* with 2 sequences",
    ),
    "k of another dtype": (
        dict(
            k=torch.ones(BATCH, 1, HEADS_K, HEADDIM).half(),
            v=torch.ones(BATCH, 1, HEADS_K, HEADDIM).half(),
        ),
        "k_cache.dtype is torch.float32 and k.dtype is torch.float16: cast",
    ),
    "v of another dtype": (dict(v=torch.ones(BATCH, 1, HEADS_K, HEADDIM).half()), "v.dtype .* k.d"),
    "a cache of another batch": (
        {name: torch.ones(3, ROOM, HEADS_K, HEADDIM) for name in ("k_cache", "v_cache")},
        r"k_cache has .*3",
    ),
    "tables that are too wide": (
        dict(rotary_cos=torch.ones(8, 9), rotary_sin=torch.ones(8, 9)),
        r"rotary_cos has shape \(8, 9\)",
    ),
}


@pytest.mark.parametrize("name", WORDED)
@pytest.mark.parametrize("has_new", [False, True])
def test_a_refusal_has_the_names_of_the_caller(name, has_new):
    arguments, match = WORDED[name]
    if has_new:
        assert_refuses(rows() | arguments, f"^{match}")
    elif not arguments.keys() & {"k", "v", "rotary_cos"}:
        assert_refuses(rows() | dict(k=None, v=None) | arguments, f"^{match}")


def test_starts_of_new_keys_are_named_as_the_caller_does():
    given = ALONE["packed"]() | dict(cu_seqlens_k_new=ints(0, 2, 1))
    assert_refuses(given, r"^cu_seqlens_k_new=\[0, 2, 1\]")
