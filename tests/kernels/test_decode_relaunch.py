"""A step of decoding that looks like the one before launches what that one did, on its own tensors.

No GPU: kernels are fakes that record their calls.
"""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

import tilewise
from tilewise import dispatch
from tilewise.errors import ArgumentError
from tilewise.kernels.common import decode_step, relaunch
from tilewise.kernels.portable import decode_launch
from tilewise.ops import calls, guards, kv_cache

BF16, INT32 = torch.bfloat16, torch.int32


class Kernel:
    """A kernel as Triton launches it, and as it is called when it is compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        def front(*args, num_warps, num_stages, enable_fp_fusion, **constants):
            self.log.append((self.name, "front", grid[0], (*args, *constants.values())))
            return self

        return front

    def run(self, x, y, z, stream, function, metadata, *rest):
        self.log.append((self.name, "again", x, rest[3:]))


def plain(args):
    """Arguments as the driver gets them."""
    as_tuples = [plain(x) if isinstance(x, tuple) else x for x in args]
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in as_tuples)


def compiled_for(args):
    """What Triton would compile for, but for some last numbers."""
    return [jit.native_specialize_impl(CUDABackend, x, False, True, True) for x in args[:-4]]


@pytest.fixture
def log(monkeypatch):
    backends = {name: kv_cache.BACKENDS[name] for name in ("portable", "cpu")}
    monkeypatch.setattr(kv_cache, "BACKENDS", backends)  # Hopper's kernel would come first
    """Calls of kernels. Memory that a call makes is the same for all calls."""
    log, made, new_empty = [], {}, torch.Tensor.new_empty

    def once(x, *sizes, **options):
        shape = sizes[0] if isinstance(sizes[0], tuple) else sizes
        key = tuple(shape), options.get("dtype", x.dtype)
        if key not in made:
            made[key] = new_empty(x, *sizes, **options)
        return made[key]

    def in_room(shape, stride, dtype):
        return once(torch.empty(0, dtype=dtype), shape, dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", once)
    monkeypatch.setattr(decode_step, "allocator_of", lambda device: in_room)
    for name in ("attn_split_kernel", "attn_fold_kernel"):
        monkeypatch.setattr(decode_launch, name, Kernel(name, log))
    monkeypatch.setattr(decode_launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(calls, "is_read", lambda x: False)
    monkeypatch.setattr(calls, "UNGUARDED", frozenset())
    calls._entry.cache_clear()
    monkeypatch.setattr(dispatch, "ask", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the CPU's
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return log


def moved(x, by):
    """The same numbers, `by` elements past an aligned address."""
    fit = torch.zeros(x.numel() + by, dtype=x.dtype)
    return fit[by:].view(x.shape).copy_(x)


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


def ways_of(log):
    """How calls launched."""
    return [how for name, how, *_ in log if "split" in name]


def ways(log):
    """How calls since the last time launched."""
    found = ways_of(log)
    log.clear()
    return found


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
        monkeypatch.setattr(relaunch, "has_launch_hooks", lambda: True)
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


# Calls that guards find, without a signature


@pytest.fixture
def looked_up(monkeypatch):
    """The signatures that were looked up."""
    found, entry_of = [], calls.entry_of
    noted = lambda *key: (found.append(key), entry_of(*key))[1]  # noqa: E731
    monkeypatch.setattr(calls, "entry_of", noted)
    return found


def test_a_call_like_the_last_is_found_by_its_guard(log, looked_up):
    for name in ("in pages", "packed", "all", "out", "e4m3, rows"):
        looked_up.clear()
        for _ in range(4):
            call(CALLS[name]())
        assert len(looked_up) == 1, name


@contextlib.contextmanager
def inside_of_vmap():
    with torch._functorch.vmap.vmap_increment_nesting(3, "error"):
        yield


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "vmap": inside_of_vmap,
    "forward AD": torch.autograd.forward_ad.dual_level,
    "a dispatch mode": Mode,
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_seen(log, mode):
    """Where a guard passes nothing looks further."""
    tensors = CALLS["in pages"]()
    in_order = [tensors[x] for x in ("q", "k", "v", "page_table", "seqused_k")]
    words = "attention", True
    assert calls.find(in_order, words)[0] is not None
    entry, addresses = calls.find(in_order, words)
    assert entry is not None and addresses == [x.data_ptr() for x in in_order]
    with MODES[mode]():
        assert calls.find(in_order, words)[1] is None


def changed(x, how):
    if how == "alignment":
        return moved(x, 1)
    if how == "a stride":
        return torch.stack([x, x], -2).select(-2, 0)
    if how == "a stride of one row":
        return x.as_strided(x.shape, (x.stride(0), 7, *x.stride()[2:]))
    if how == "a size":
        return x.repeat(2, *[1] * (x.dim() - 1))
    if how == "a dtype":
        return x.to(torch.float16)
    if how == "a gradient":
        return x.clone().requires_grad_()
    return x.clone().as_subclass(Subclass)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "how",
    ["alignment", "a stride", "a stride of one row", "a size", "a dtype", "a gradient", "a type"],
)
def test_what_a_tensor_looks_like_is_seen(log, how):
    q, k, v, _ = tensors().values()
    words = "attention", True
    for _ in range(2):
        entry, addresses = calls.find((q, k, v), words)
    assert addresses is not None
    other, again = calls.find((changed(q, how), k, v), words)
    assert again is None and other is not entry
    assert calls.find((None, k, v), words) == (None, None)
    assert calls.find((q, k, None), words)[1] is None
    assert calls.find((q, k, v), ("attention", 1))[1] is None
    assert calls.find((q, k, v), ("attention", [1])) == (None, None)


def test_guards_are_bounded_and_keep_nothing(log, monkeypatch):
    monkeypatch.setattr(guards, "MAX_GUARDS", 2)
    guards.known_guards.clear()
    for fit in (1024, 1040, 1056):
        given = tensors(fit) | dict(split_size=512)
        call(given)
        assert 1 <= len(guards.known_guards) <= 2
    calls._entry.cache_clear()
    (guard, *_) = guards.known_guards.values()
    gc.collect()
    assert guard.entry() is None
    call(given)
    assert ways(log) == ["front"] * 4


def test_without_guards_of_torch(log, monkeypatch):
    monkeypatch.setattr(guards, "TensorGuards", None)
    guards.known_guards.clear()
    for _ in range(3):
        call(CALLS["in pages"]())
    assert ways(log) == ["front", "again", "again"]


def test_a_caller_without_lse_has_none_made(log):
    given = CALLS["in pages"]()
    rows = []
    for asked in (True, True, False):
        found = tilewise.attention(return_lse=asked, backend="portable", **given)
        rows.append(log[-1][3])
    assert isinstance(found, torch.Tensor)
    tilewise.attention(return_lse=False, backend="portable", **given)
    _, partials, _, lse, *_ = log[-1][3]
    floats = partials[2] + 4 * partials[3] * partials[4] - partials[0]
    assert lse == partials[0] + floats and lse % 16 == 0
    assert partials[1] - partials[0] == 4 * partials[3] * partials[4] * 64
