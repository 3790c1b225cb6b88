"""The Hopper forward is launched again with what Triton's front end would be passed.

No GPU: kernels are fakes that record their calls.
"""

import sys

import pytest
import torch
from helpers.fake_kernels import compiled_for, fake_kernels, plain, sources_of
from helpers.hopper_relaunch import fake_launches
from helpers.looks import CALLS, call_of, counts, packed, starts
from triton import knobs

from tilewise.kernels.hopper import copy_rows
from tilewise.kernels.hopper.fwd import launch
from tilewise.problem import Extras, Scalars, describe
from tilewise.tile.types import Optionals

BF16 = torch.bfloat16


@pytest.fixture
def log(monkeypatch, memory):
    """Calls of the kernel."""
    fake_launches(monkeypatch)
    return fake_kernels(monkeypatch, launch, "hopper_fwd_kernel")


def forward_of(call):
    return launch.prepare(*call[:2], *call[2][:2])


def check_again(log, memory, first, second):
    """Later launches are those of the front end, of the tensors of that call."""
    one = forward_of(first)
    for run, (_, _, tensors, extras) in (
        *((one, x) for x in (first, second, second)),
        (forward_of(second), second),
    ):
        memory.begin()
        run(*tensors, extras)
    assert [how for _, how, *_ in log] == ["front", "again", "again", "front"]
    assert plain(log[1][3]) == plain(log[2][3]) == plain(log[3][3])
    assert log[1][2] == log[3][2]
    assert compiled_for(log[0][3]) == compiled_for(log[3][3])


@pytest.mark.parametrize("name", CALLS)
def test_forward(log, memory, name):
    check_again(log, memory, call_of(name), call_of(name))


def with_copies(name):
    """Calls of which a tensor is copied: slopes and q that are not contiguous, rows of headdim 100,
    keys whose batches are no whole heads apart.
    """
    q = torch.randn(2, 64, 4, 100 if name == "rows" else 64).to(BF16)
    k, extras = torch.randn_like(q), Extras()
    if name == "slopes":
        extras = Extras(alibi_slopes=torch.rand(4, 2)[:, 0])
    if name == "steps":
        memory, extras = torch.randn(2 * 64 * 2 * 64 + 64).to(BF16), Extras(seqused_k=counts(2))
        k = memory.as_strided((2, 64, 2, 64), (64 * 2 * 64 + 8, 128, 64, 1))
    problem = describe(q, k, k, extras, Scalars(1.0), "bottom_right", False)
    return problem, Scalars(1.0), (q, k, k), extras


@pytest.mark.parametrize("name", ["slopes", "rows", "steps"])
def test_copies_are_made_at_each_call(log, memory, monkeypatch, name):
    copies = fake_kernels(monkeypatch, copy_rows, "copy_rows_kernel")
    first, second = with_copies(name), with_copies(name)
    if name != "slopes":
        check_again(log, memory, first, second)
        q, k, v = (x.data_ptr() for x in second[2])
        of_call = [k, v] if name == "steps" else [q, k]  # v is read as it lies
        assert [sources_of(x) for x in copies[1:]] == [of_call] * 3
        return
    one = forward_of(first)
    for call in (first, second):
        one(*call[2], call[3])
    assert [how for _, how, *_ in log] == ["front", "again"]
    slopes = second[3].alibi_slopes
    assert optionals_of(log[1][3]).alibi_slopes not in (0, slopes.data_ptr())


def optionals_of(args):
    count = len(Optionals._fields)
    (optionals,) = (x for x in args if isinstance(x, tuple) and len(x) == count)
    return Optionals(*optionals)


def test_tensors_that_were_one_are_two_later(log):
    shared, other = starts(5), starts(5)
    of_q, of_k, _ = packed()
    q, k = torch.randn(of_q).to(BF16), torch.randn(of_k).to(BF16)
    extras = Extras(cu_seqlens_q=shared, cu_seqlens_k=shared)
    problem = describe(q, k, k, extras, Scalars(1.0), "bottom_right", False)
    one = launch.prepare(problem, Scalars(1.0), q, k)
    one(q, k, k, extras)
    one(q, k, k.clone(), extras._replace(cu_seqlens_k=other))
    assert log[1][1] == "again"
    assert optionals_of(log[1][3])[5:7] == (shared.data_ptr(), other.data_ptr())


def test_without_keys_nothing_is_launched(log):
    q, k = torch.randn(2, 64, 4, 64).to(BF16), torch.randn(2, 0, 4, 64).to(BF16)
    extras = Extras(sinks=torch.rand(4))
    problem = describe(q, k, k, extras, Scalars(1.0), "bottom_right", False)
    one = launch.prepare(problem, Scalars(1.0), q, k)
    for _ in range(2):
        out, lse = one(q, k, k, extras)
        assert not out.any() and lse.equal(extras.sinks[None, :, None].expand_as(lse))
    assert not log


def test_a_profiler_sees_every_launch(log, monkeypatch):
    call = call_of("sinks")
    one = forward_of(call)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    for _ in range(2):
        one(*call[2], call[3])
    assert {how for _, how, *_ in log} == {"front"}


def test_another_device_is_current(log, monkeypatch):
    call = call_of("sinks")
    one = forward_of(call)
    one(*call[2], call[3])
    log.clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    one(*call[2], call[3])
    assert {how for _, how, *_ in log} == {"front"}


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_warm_call_enters_few_functions(log, memory, name):
    """Those of the library, and the expressions that it has compiled: as many with extras."""
    call = call_of(name)
    one, entered = forward_of(call), []
    memory.begin()
    one(*call[2], call[3])

    def noted(frame, event, _):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and ("/tilewise/" in file or file == "<string>"):
            entered.append(function)

    memory.begin()
    sys.setprofile(noted)
    try:
        one(*call[2], call[3])
    finally:
        sys.setprofile(None)
    assert log[-1][1] == "again" and len(entered) - entered.count("<listcomp>") <= 9, entered
