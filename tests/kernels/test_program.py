"""A program launches the same again for other tensors: what Triton's front end would be passed for
them, past it.

No GPU: kernels are fakes that record their calls.
"""

import gc
import weakref

import pytest
import torch
from helpers.fake_kernels import (
    Kernel,
    compiled_for,
    fake_kernels,
    has_rest,
    plain,
    saved_of,
)
from helpers.looks import CALLS, call_of, packed, starts
from triton import knobs

from tilewise.kernels.common import workspace
from tilewise.kernels.common.direct import filler
from tilewise.kernels.common.operand import Gap, Operand, filled, operand_of, operands_of
from tilewise.kernels.common.program import Launch, Planned, Program, checked
from tilewise.kernels.common.workspace import Workspace
from tilewise.kernels.portable import launch as portable
from tilewise.kernels.portable import plan
from tilewise.problem import Extras, Scalars, describe
from tilewise.tile.types import Optionals

BF16, CPU = torch.bfloat16, torch.device("cpu")
BACKWARD = "attn_bwd_dkdv_kernel", "attn_bwd_dq_kernel", "attn_bwd_dbias_kernel"
BACKWARD += "bwd_delta_kernel", "attn_bwd_rest_kernel"


@pytest.fixture
def log(monkeypatch, memory):
    """Calls of the portable kernels, on a device that is current."""
    monkeypatch.setattr(plan, "architecture", lambda device: "sm90")
    return fake_kernels(monkeypatch, portable, "attn_fwd_kernel", *BACKWARD)


def forward_of(call):
    return portable.prepare(*call[:2], *call[2][:2])


def backward_of(call):
    return portable.prepare_backward(*call[:2])


def check_again(log, groups):
    """All but the first and the last call were launched past Triton, with the arguments of the
    last.
    """
    count = len(log) // groups
    assert count * groups == len(log)
    first, *again, front = (log[n * count : (n + 1) * count] for n in range(groups))
    ways = [{how for _, how, *_ in calls} for calls in (first, *again, front)]
    assert ways == [{"front"}, *[{"again"}] * len(again), {"front"}]
    for calls in again:
        for before, one, other in zip(first, calls, front):
            assert one[0] == other[0] and one[2] == other[2]
            assert plain(one[3]) == plain(other[3]), one[0]
            assert compiled_for(before[3]) == compiled_for(other[3])
    return count


@pytest.mark.parametrize("name", CALLS)
def test_forward(log, memory, name):
    first, second = call_of(name), call_of(name)
    one = forward_of(first)
    for run, (_, _, tensors, extras) in (
        *((one, x) for x in (first, second, second)),
        (forward_of(second), second),
    ):
        memory.begin()
        run(*tensors, extras)
    assert check_again(log, 4) == 1


@pytest.mark.parametrize("name", CALLS)
def test_backward(log, memory, name):
    given = []
    for _ in range(2):
        call = call_of(name)
        q = call[2][0]
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1]) if name == "sinks" else None
        given.append(saved_of(call, torch.randn(q.shape).to(BF16), dlse))
    back = backward_of(call)
    for run, one in ((back, 0), (back, 1), (back, 1), (backward_of(call), 1)):
        memory.begin()
        run(*given[one])
    assert check_again(log, 4) == 3 + call[0].has_bias_grad + has_rest(call[0])


def test_tensors_that_were_one_are_two_later(log):
    shared, other = starts(5), starts(5)
    of_q, of_k, _ = packed()
    q, k = torch.randn(of_q).to(BF16), torch.randn(of_k).to(BF16)
    extras = Extras(cu_seqlens_q=shared, cu_seqlens_k=shared)
    problem = describe(q, k, k, extras, Scalars(1.0), "bottom_right", False)
    one = portable.prepare(problem, Scalars(1.0), q, k)
    one(q, k, k, extras)
    one(q, k, k.clone(), extras._replace(cu_seqlens_k=other))
    assert log[1][1] == "again"
    assert optionals_in(log[1][3])[5:7] == (shared.data_ptr(), other.data_ptr())


def test_a_copied_tensor_is_copied_each_time(log):
    """And the kernels are launched past Triton all the same."""
    slopes = torch.rand(4, 2)[:, 0]
    q = torch.randn(2, 64, 4, 64).to(BF16)
    extras = Extras(alibi_slopes=slopes)
    problem = describe(q, q, q, extras, Scalars(1.0), "bottom_right", False)
    one = portable.prepare(problem, Scalars(1.0), q, q)
    for _ in range(3):
        one(q, q, q, extras)
    assert [how for _, how, *_ in log] == ["front", "again", "again"]
    assert slopes.data_ptr() not in {optionals_in(args)[0] for *_, args in log[1:]}


def optionals_in(args):
    """Of a launch."""
    count = len(Optionals._fields)
    (found,) = (x for x in args if isinstance(x, tuple) and len(x) == count)
    return found


def test_a_profiler_sees_every_launch(log, monkeypatch):
    call = call_of("sinks")
    one, back = forward_of(call), backward_of(call)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    for _ in range(2):
        one(*call[2], call[3])
        back(*saved_of(call, call[2][0]))
    assert {how for _, how, *_ in log} == {"front"}


def test_another_device_is_current(log, monkeypatch):
    call = call_of("sinks")
    one, back = forward_of(call), backward_of(call)
    one(*call[2], call[3])
    back(*saved_of(call, call[2][0]))
    log.clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    one(*call[2], call[3])
    back(*saved_of(call, call[2][0]))
    assert {how for _, how, *_ in log} == {"front"}


def test_programs_keep_no_tensor():
    x = torch.zeros(4)
    operands = operands_of(("x", "captured"), (x, x[1:], None))
    assert [y and y.name for y in operands["captured"]] == ["captured[0]", None]
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None and operands["captured"][0].data_ptr() == 4


def test_an_operand_looks_as_its_tensor():
    x = torch.zeros(5, 7)
    for y in (x, x.T, x[:, 1:], x[:1], x[:0], x.expand(2, 5, 7)):
        operand = operand_of("y", y)
        assert operand.is_contiguous() == y.is_contiguous()
        assert (operand.shape, operand.stride()) == (y.shape, y.stride())
        assert operand.contiguous().stride() == y.contiguous().stride()
        assert operand.contiguous().is_copied == (not y.is_contiguous())
        assert operand.view(torch.int32).data_ptr() == y.data_ptr() % 16


def test_arguments_are_filled_by_name():
    x = Operand("x", (2,), torch.float32, CPU)
    args = 1, (x, (2, None), 0), "constant", ((Gap("y"),), x)
    fill = filler(args, ("y", "other", "x"))
    assert fill(48, 0, 32) == (1, (32, (2, None), 0), "constant", ((48,), 32))
    memory = torch.ones(2)
    assert filled(args, dict(x=memory, y=3))[3] == ((3,), memory)
    assert filled(x.view(torch.int32), dict(x=memory)).dtype == torch.int32
    with pytest.raises(KeyError):
        filler(args, ("x",))


def test_an_argument_in_the_wrong_place_is_refused():
    kernel = Kernel("kernel", [])
    kernel.arg_names, kernel.__name__ = ["x", "y", "TILE"], "kernel"
    assert checked(Launch(kernel, 1, dict(x=1, y=2), dict(TILE=3), {}))
    with pytest.raises(TypeError, match="kernel has parameters"):
        checked(Launch(kernel, 1, dict(y=2, x=1), dict(TILE=3), {}))


def test_a_tensor_and_its_copy_are_not_mixed():
    x = Operand("x", (4, 4), torch.float32, CPU, strides=(1, 4))
    kernel = Kernel("kernel", [])
    launches = [Launch(kernel, 1, dict(x=y), {}, {}) for y in (x, x.contiguous())]
    Program(["x"], launches[1:], Workspace(CPU))
    with pytest.raises(TypeError, match="copy"):
        Program(["x"], launches, Workspace(CPU))


def test_slices_lie_apart():
    work = Workspace(CPU)
    for n in (1, 0, 200):
        work.add(f"of {n}", (n,), torch.int64)
    starts = workspace.starts_of(work.slices)
    assert starts == [0, 512, 1024, 1024 + 2048]
    buffer = torch.zeros(starts[-1], dtype=torch.uint8)
    workspace.tensor_at(buffer, starts[2], work.slices[2]).fill_(-1)
    first, last = buffer.nonzero().aminmax()
    assert (first, last) == (1024, 1024 + 1599)


def test_a_program_without_launches_runs_again_on_a_cpu():
    run = Planned(("x",), lambda x: Program(["x"], [], Workspace(CPU), [x]))
    for _ in range(2):
        assert run((torch.zeros(1),))[0].shape == (1,)


def test_a_launch_that_fails_keeps_nothing(log):
    launch = Launch(Fails(), 1, dict(x=1), {}, {})
    run = Planned(("x",), lambda x: Program(["x"], [launch], Workspace(CPU)))
    with pytest.raises(KeyError):
        run((torch.zeros(1),))
    assert run.program is None


class Fails:
    """A kernel that cannot be launched."""

    def __getitem__(self, grid):
        raise KeyError(grid)


@pytest.mark.parametrize("options", [{}, dict(enable_fp_fusion=False)], ids=["default", "asked"])
def test_fusion_of_a_product_and_a_sum_is_no_default_of_tritons(options):
    """Triton 3.9 warns where no launch says it, and 3.10 turns it off."""
    compiled = []
    kernel = type("Kernel", (), dict(warmup=lambda self, **names: compiled.append(names)))()
    launch = Launch(kernel, programs=1, args={}, constants={}, options=dict(num_warps=4) | options)
    launch.compilation({})()
    (names,) = compiled
    assert names["enable_fp_fusion"] is ("enable_fp_fusion" not in options)
