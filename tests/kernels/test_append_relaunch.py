"""An append that looks like the one before, alone or before a decode step, launches what that one
did, on its own tensors.

No GPU: kernels are fakes that record their calls.
"""

import pytest
import torch
from helpers.appends import drawn
from helpers.decode_steps import compiled_for, record
from helpers.fake_kernels import plain
from helpers.tiers import sample
from helpers.work import entered
from triton import knobs

import tilewise
from tilewise import ArgumentError, cache
from tilewise.frontend import checks
from tilewise.ops import calls

BF16, INT32 = torch.bfloat16, torch.int32


@pytest.fixture
def log(monkeypatch):
    yield record(monkeypatch)
    calls._entry.cache_clear()


def clones(given):
    """Other tensors of the same signature."""
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def check(log, call, first, second):
    """Whether a second call launches, and with the arguments of one whose signature is new."""
    log.clear()
    for given in (first, second, second):
        call(**given)
    count = len(log) // 3
    calls._entry.cache_clear()
    call(**second)
    groups = [log[i : i + count] for i in range(0, len(log), count)]
    ways = [{how for _, how, *_ in x} for x in groups]
    assert ways == [{"front"}, {"again"}, {"again"}, {"front"}]
    for one, new, more, front in zip(*groups):
        assert new[0] == front[0] and new[2] == front[2]
        assert plain(new[3]) == plain(more[3]) == plain(front[3])
        assert compiled_for(one[3]) == compiled_for(front[3])
    return [x[0] for x in groups[0]]


@pytest.mark.parametrize("seed", sample(range(60), *range(10)))
def test_arguments(log, seed):
    given = drawn(seed) | dict(attention_chunk=0)
    names = check(log, tilewise.flash_attn_with_kvcache, given, clones(given))
    assert names in (
        ["cache_append_kernel", "attn_split_kernel"],
        ["cache_append_kernel", "attn_split_kernel", "attn_fold_kernel"],
    )


def step(**given):
    """Arguments of a decode step that appends a token to 16 pages of 16 keys."""
    k_cache, v_cache = torch.randn(2, 32, 16, 2, 64).to(BF16).unbind(0)
    q, k, v = (torch.randn(2, 1, heads, 64).to(BF16) for heads in (8, 2, 2))
    cos, sin = torch.rand(2, 256, 32).unbind(0)
    found = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin)
    found |= dict(cache_seqlens=torch.tensor([7, 200], dtype=INT32), causal=True)
    return found | dict(block_table=torch.arange(32, dtype=INT32).view(2, 16)) | given


def alone(**given):
    """Arguments of `cache.append`."""
    found = step()
    rotary = cache.Rotary(found["rotary_cos"], found["rotary_sin"], False)
    found = {x: found[x] for x in ("k_cache", "v_cache", "k", "v")} | dict(rotary=rotary)
    used, table = torch.tensor([8, 201], dtype=INT32), step()["block_table"]
    return found | dict(seqused_k=used, page_table=table) | given


def rows_of(table_shape):
    return [torch.rand(table_shape) for _ in "kv"]


APPENDS = {
    "pages": alone,
    "slots": lambda: alone(rotary=None, seqused_k=None, slots=torch.tensor([[3], [-1]])),
    "e4m3, rows": lambda: in_e4m3(rows_of((32, 16, 2))),
    "e4m3, heads": lambda: in_e4m3(rows_of((2,))),
}


def in_e4m3(scales):
    given = alone()
    kept = {x: given[x].to(torch.float8_e4m3fn) for x in ("k_cache", "v_cache")}
    return given | kept | dict(k_descale=scales[0], v_descale=scales[1])


@pytest.mark.parametrize("name", APPENDS)
def test_an_append_alone(log, name):
    check(log, cache.append, APPENDS[name](), APPENDS[name]())


@pytest.mark.parametrize(
    "call, made", [(tilewise.flash_attn_with_kvcache, step), (cache.append, alone)]
)
def test_memory_that_may_be_shared_is_compared(log, call, made):
    """K and V side by side in one pool, whose spans overlap; then nearer to each other."""

    def pool(gap):
        memory = torch.zeros(33 * 16, 2, gap).to(BF16)[: 32 * 16]
        sides = [memory.view(32, 16, 2, gap)[..., start : start + 64] for start in (0, gap - 64)]
        return dict(zip(("k_cache", "v_cache"), sides))

    for given, way in (
        (made(**pool(128)), "front"),
        (made(**pool(128)), "again"),
        (made(), "front"),
        (made(), "again"),
    ):
        log.clear()
        call(**given)
        assert {how for _, how, *_ in log} == {way}
    log.clear()
    given = made(**pool(128))
    given["v_cache"] = given["k_cache"].as_strided(
        given["k_cache"].shape, given["k_cache"].stride(), given["k_cache"].storage_offset() + 32
    )
    with pytest.raises(ArgumentError, match="k_cache is written and shares memory with v_cache"):
        call(**given)
    given = made()
    call(**given)
    with pytest.raises(ArgumentError, match="k_cache is written and shares memory with k"):
        call(
            **given | dict(k=given["k_cache"][:2, :1].as_strided((2, 1, 2, 64), (128, 128, 64, 1)))
        )


def test_a_known_call_reads_nothing_from_the_cache(log):
    given = step()
    for _ in range(2):
        tilewise.flash_attn_with_kvcache(**given)
    other = given | dict(q=given["k_cache"].flatten()[:1024].view(2, 1, 8, 64))
    log.clear()
    with pytest.raises(ArgumentError, match="k_cache is written and shares memory with q"):
        tilewise.flash_attn_with_kvcache(**other)
    assert not log


@pytest.mark.parametrize("what", ["another device", "a profiler", "checks", "a chunk", "a copy"])
def test_what_is_not_launched_again(log, monkeypatch, what):
    given = step()
    if what == "a chunk":
        given |= dict(attention_chunk=16)
    if what == "a copy":
        given["k"] = torch.stack([given["k"]] * 2, -1)[..., 0]
        monkeypatch.setattr(checks, "warn_slow", lambda reason: None)
    tilewise.flash_attn_with_kvcache(**given)
    if what == "another device":
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    if what == "a profiler":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    if what == "checks":
        monkeypatch.setenv("TILEWISE_CHECK", "1")
    log.clear()
    tilewise.flash_attn_with_kvcache(**given)
    assert log[0][:2] == ("cache_append_kernel", "front")


def test_a_known_call_enters_few_functions(log):
    for call, given, most in (
        (tilewise.flash_attn_with_kvcache, step(), 20),
        (cache.append, alone(), 14),
    ):
        for _ in range(3):
            call(**given)
        found = entered(lambda call=call, given=given: call(**given))
        assert len(found) <= most, found
