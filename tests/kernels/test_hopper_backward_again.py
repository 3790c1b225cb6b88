"""The Hopper backward is launched again with what Triton's front end would be passed.

No GPU: kernels are fakes that record their calls.
"""

import pytest
import torch
from helpers.fake_kernels import (
    compiled_for,
    fake_kernels,
    has_rest,
    plain,
    saved_of,
    sources_of,
)
from helpers.hopper_relaunch import fake_launches
from helpers.looks import CALLS, call_of, counts
from helpers.work import entered
from triton import knobs

from tilewise.kernels.hopper import copy_rows
from tilewise.kernels.hopper.bwd import kernels
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.ops import attention as ops
from tilewise.ops import calls
from tilewise.problem import Between, Call, Extras, Grads, Saved, Scalars, describe

BF16 = torch.bfloat16
KERNELS = "bwd_delta_kernel", "hopper_bwd_kernel", "hopper_bwd_dq_kernel"
KERNELS += "hopper_bwd_query_kernel", "attn_bwd_dbias_kernel", "attn_bwd_rest_kernel"


@pytest.fixture
def log(monkeypatch, memory):
    """Calls of kernels. Memory that a call makes is the same for all calls that begin it."""
    fake_launches(monkeypatch)
    return fake_kernels(monkeypatch, kernels, *KERNELS)


@pytest.mark.parametrize("name", CALLS)
def test_backward(log, memory, name):
    given = []
    for _ in range(2):
        call = call_of(name)
        q = call[2][0]
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1]) if name == "sinks" else None
        given.append(saved_of(call, torch.randn(q.shape).to(BF16), dlse))
    back, front = (bwd_launch.prepare_backward(*call[:2]) for _ in range(2))
    for run, call_tensors in ((back, given[0]), *[(back, given[1])] * 2, (front, given[1])):
        memory.begin()
        run(*call_tensors)
    count = len(log) // 4
    # The gradient of a bias in pairs is written by the kernel of the others
    by_itself = ("bias", "moved bias", "shared bias", "bias by columns", "all")
    assert count == 3 + (name in by_itself) + has_rest(call[0])
    groups = [log[i : i + count] for i in range(0, len(log), count)]
    assert [{how for _, how, *_ in x} for x in groups] == [
        {"front"},
        {"again"},
        {"again"},
        {"front"},
    ]
    for first, again, more, last in zip(*groups):
        assert again[0] == last[0] and again[2] == last[2]
        assert plain(again[3]) == plain(more[3]) == plain(last[3]), last[0]
        assert compiled_for(first[3]) == compiled_for(last[3])


def test_a_warm_backward_enters_few_functions(log, memory):
    """Autograd's thread enters them, which slept before."""
    call = call_of("plain")
    given = saved_of(call, torch.randn(call[2][0].shape).to(BF16))
    back = bwd_launch.prepare_backward(*call[:2])
    for _ in range(3):
        memory.begin()
        functions = [x.rpartition(":")[2] for x in entered(lambda: back(*given))]
    assert functions == ["gradients", "__call__", "may_relaunch", *["launch"] * 3], functions


def test_what_is_launched_between_the_kernels_of_a_backward(log):
    """At the first call and at later ones alike; dK and dV are those that are returned."""
    call = call_of("plain")
    given = saved_of(call, torch.randn(call[2][0].shape).to(BF16))
    found = []
    between = Between(
        lambda: log.append(("keys",)), lambda x: log.append(("sums", found.append(x)))
    )
    back = bwd_launch.prepare_backward(*call[:2])
    order = ["bwd_delta_kernel", "keys", "hopper_bwd_kernel", "sums", "hopper_bwd_dq_kernel"]
    for how in ("front", "again"):
        log.clear()
        grads = back(*given, between)
        assert [x[0] for x in log] == order and {x[1] for x in log[::2]} == {how}
        seen = found.pop()
        assert type(seen) is Grads and all(a is b for a, b in zip(seen, grads))


def test_backwards_of_one_call_that_look_different(log, monkeypatch):
    """A gradient of other strides, or with one of lse, is another launch's."""
    monkeypatch.setattr(ops.dispatch, "choose_for", lambda *_, **named: bwd_launch)
    monkeypatch.setattr(ops, "cpu_modes", lambda: ops.layout_key(seen))
    call = call_of("plain")
    q = call[2][0]
    known = Call(*call[:2])
    dense = torch.randn(q.shape).to(BF16)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1])
    spread, other = (torch.randn(*q.shape[:3], 128).to(BF16)[..., :64] for _ in range(2))
    expanded = torch.ones(()).to(BF16).expand(q.shape)
    for n, (dout, of_lse) in enumerate(
        ((dense, None), (spread, None), (dense, dlse), (expanded, None))
    ):
        saved, extras = saved_of(call, dout, of_lse)
        seen = *saved, *extras.tensors
        ops.run_backward(known, saved, extras)
        assert len(log) == 3 * (n + 1) and {how for _, how, *_ in log} == {"front"}
    log.clear()
    for dout in (other, expanded.clone().expand(q.shape)):
        saved, extras = saved_of(call, dout)
        seen = *saved, *extras.tensors
        ops.run_backward(known, saved, extras)
    assert len(log) == 6 and {how for _, how, *_ in log} == {"again"}
    assert len(known.backwards) == 4


def test_backwards_of_one_call_are_bounded(log, monkeypatch):
    monkeypatch.setattr(ops.dispatch, "choose_for", lambda *_, **named: bwd_launch)
    call = call_of("plain")
    known = Call(*call[:2])
    for look in range(20):
        monkeypatch.setattr(ops, "cpu_modes", lambda look=look: look)
        ops.run_backward(known, *saved_of(call, torch.randn(call[2][0].shape).to(BF16)))
        assert len(known.backwards) <= ops.LOOKS
    assert [*known.backwards] == [*range(20 - ops.LOOKS, 20)]


def with_copies(name):
    """Calls of which a tensor is copied: slopes that are not contiguous, rows of headdim 100, keys
    whose batches are no whole heads apart, a gradient that is expanded.
    """
    q = torch.randn(2, 64, 4, 100 if name == "rows" else 64).to(BF16)
    k, dout, extras = torch.randn_like(q), torch.randn_like(q), Extras()
    if name == "slopes":
        extras = Extras(alibi_slopes=torch.rand(4, 2)[:, 0])
    if name == "steps":
        memory, extras = torch.randn(2 * 64 * 2 * 64 + 64).to(BF16), Extras(seqused_k=counts(2))
        k = memory.as_strided((2, 64, 2, 64), (64 * 2 * 64 + 8, 128, 64, 1))
    if name == "expanded":
        dout = torch.randn(()).to(BF16).expand(q.shape)
    problem = describe(q, k, k, extras, Scalars(1.0), "bottom_right", False)
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 64)
    return problem, Saved(dout, None, q, k, k.clone() if name == "rows" else k, out, lse), extras


@pytest.mark.parametrize("name", ["slopes", "rows", "steps", "expanded"])
def test_copies_are_made_at_each_call(log, monkeypatch, name):
    """And then launches are done again: of copies that this call has made."""
    copies = fake_kernels(monkeypatch, copy_rows, "copy_rows_kernel")
    (problem, *first), (_, *second) = with_copies(name), with_copies(name)
    back = bwd_launch.prepare_backward(problem, Scalars(1.0))
    back(*first)
    counts_before = len(copies)
    back(*second)
    saved = second[0]
    assert [how for _, how, *_ in log] == ["front"] * 3 + ["again"] * 3
    now = [sources_of(x) for x in copies[counts_before:]]
    assert len(now) == counts_before
    if name == "rows":
        assert now[0] == [saved.dout.data_ptr()]
        assert now[1] == [x.data_ptr() for x in (saved.q, saved.k, saved.v)]
        assert len(now) == 3  # dK and dV last
    if name == "steps":
        assert now == [[saved.k.data_ptr(), saved.v.data_ptr()]]


def test_without_keys_gradients_are_zeros(log):
    q, k = torch.randn(2, 64, 4, 64).to(BF16), torch.randn(2, 0, 4, 64).to(BF16)
    problem = describe(q, k, k, Extras(), Scalars(1.0), "bottom_right", False)
    back = bwd_launch.prepare_backward(problem, Scalars(1.0))
    saved = Saved(torch.randn_like(q), None, q, k, k, q, torch.zeros(2, 4, 64))
    for _ in range(2):
        grads = back(saved, Extras())
        assert not grads.dq.any() and grads.dk.numel() == 0
    assert [x[0] for x in log] == ["bwd_delta_kernel"] * 2


def test_a_profiler_sees_every_launch(log, monkeypatch):
    call = call_of("sinks")
    back = bwd_launch.prepare_backward(*call[:2])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    for _ in range(2):
        back(*saved_of(call, call[2][0]))
    assert {how for _, how, *_ in log} == {"front"}


def test_another_device_is_current(log, monkeypatch):
    call = call_of("sinks")
    back = bwd_launch.prepare_backward(*call[:2])
    back(*saved_of(call, call[2][0]))
    log.clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    back(*saved_of(call, call[2][0]))
    assert {how for _, how, *_ in log} == {"front"}


def test_looks():
    x = torch.zeros(65)
    seen = (x[:64], x[1:], x[:64].view(8, 8), x[:64].view(8, 8).T)
    assert len({calls.layout_key((a,)) for a in seen}) == 4
    assert calls.layout_key((x[:5], None)) == calls.layout_key((x[:6], None))
