"""A step of decoding that looks like the one before is found by one guard, not its signature."""

import contextlib
import gc
import inspect

import pytest
import torch
from helpers.decode_steps import CALLS, call, record, tensors, ways
from helpers.looks import moved

from tilewise.ops import attention as ops
from tilewise.ops import calls, guards


@pytest.fixture
def log(monkeypatch):
    return record(monkeypatch)


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
    assert calls.find(in_order, plain=words)[0] is not None
    entry, addresses = calls.find(in_order, plain=words)
    assert entry is not None and addresses == [x.data_ptr() for x in in_order]
    with MODES[mode]():
        assert calls.find(in_order, plain=words)[1] is None


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
        entry, addresses = calls.find((q, k, v), plain=words)
    assert addresses is not None
    other, again = calls.find((changed(q, how), k, v), plain=words)
    assert again is None and other is not entry
    assert calls.find((None, k, v), plain=words) == (None, None)
    assert calls.find((q, k, None), plain=words)[1] is None
    assert calls.find((q, k, v), plain=("attention", 1))[1] is None
    assert calls.find((q, k, v), plain=("attention", [1])) == (None, None)


def test_a_tensor_that_comes_twice_is_found_by_its_guard():
    guards.known_guards.clear()
    q, k, v = torch.zeros(3, 1, 4, 2, 8).unbind(0)
    starts, other = torch.zeros(2, 4, dtype=torch.int32).unbind(0)
    entry, twice = calls.Entry(), (q, k, v, None, starts, starts)
    guards.remember(("key",), twice, entry)
    recall = guards.known_guards.pop(("key",))
    assert recall(twice) == (entry, [x.data_ptr() for x in twice if x is not None])
    assert recall((q, k, v, None, other, other))[0] is entry
    assert recall((q, k, v, None, starts, other)) is None
    assert recall((q, q, v, None, starts, starts)) is None


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_a_nested_tensor_is_not_compared():
    """Torch's guards ask one for its strides, and their error ends the process."""
    q, k, v = torch.zeros(3, 2, 4, 2, 8).unbind(0)
    recall = guards.guard_of((q, k, v), calls.Entry())
    nested = torch.nested.nested_tensor([*q])
    for changed in ((nested, k, v), (q, nested, v), (q, k, nested)):
        assert recall(changed) is None


def test_an_operator_is_found_by_its_guard(monkeypatch):
    """A compiled graph's, whose forwards and backwards have the same options."""
    monkeypatch.setattr(ops, "UNGUARDED", frozenset())
    guards.known_guards.clear()
    q, k, v, sinks = (*torch.zeros(3, 1, 4, 2, 8).unbind(0), torch.zeros(2))
    options = (0.125, 0.0, "top_left")
    made = [ops.known(x, options, object) for x in ((q, k, v, None), (q, k, v, sinks), (q, k))]
    assert len(set(made)) == 3
    monkeypatch.setattr(ops, "entry_of", None)
    found = [ops.known(x, options, object) for x in ((q, k, v, None), (q, k, v, sinks), (q, k))]
    assert found == made
    monkeypatch.setattr(ops, "entry_of", calls.entry_of)
    assert ops.known((q.transpose(1, 2), k, v, None), options, object) not in made
    with torch.no_grad():
        assert ops.known((q, k, v, None), options, object) not in made


def test_guards_are_bounded_and_keep_nothing(log, monkeypatch):
    monkeypatch.setattr(guards, "MAX_GUARDS", 2)
    guards.known_guards.clear()
    for fit in (1024, 1040, 1056):
        given = tensors(fit) | dict(split_size=512)
        call(given)
        assert 1 <= len(guards.known_guards) <= 2
    calls._entry.cache_clear()
    (recall, *_) = guards.known_guards.values()
    gc.collect()
    assert inspect.getclosurevars(recall).nonlocals["reference"]() is None
    call(given)
    assert ways(log) == ["front"] * 4


def test_without_guards_of_torch(log, monkeypatch):
    monkeypatch.setattr(guards, "TensorGuards", None)
    guards.known_guards.clear()
    for _ in range(3):
        call(CALLS["in pages"]())
    assert ways(log) == ["front", "again", "again"]
