"""Later launches get what Triton's launcher would: the same arguments, of the tensors of that call.

No GPU: kernels are fakes that record their calls.
"""

import math

import pytest
import torch
from helpers.fake_kernels import Kernel, compiled_for, has_rest, plain, saved_of
from helpers.looks import CALLS, call_of, counts

from tilewise.kernels.common import relaunch
from tilewise.kernels.common.relaunch import distinct_views, pattern_of
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.kernels.hopper.bwd import queue as bwd_queue
from tilewise.kernels.hopper.bwd import relaunch as bwd_again
from tilewise.ops import attention as ops
from tilewise.ops import calls
from tilewise.problem import Between, Call, Extras, Saved, Scalars, describe

BF16 = torch.bfloat16


class Quick:
    """`compat.Direct`, which takes a descriptor as its parts."""

    def __init__(self, kernel, programs):
        self.kernel, self.programs = kernel, programs

    def encode(self, which, x):
        return [x.base.data_ptr(), *x.shape, *x.strides]

    def __call__(self, stream, *args):
        self.kernel.log.append((self.kernel.name, "again", self.programs, args))


@pytest.fixture
def log(monkeypatch):
    """Calls of kernels. Memory that a call makes is the same for all calls."""
    log, made = [], {}

    def once(name, function):
        def make(*args):
            if name not in made:
                made[name] = function(*args)
            return made[name]

        return make

    names = {
        bwd_launch: [
            *("bwd_delta_kernel", "hopper_bwd_kernel", "hopper_bwd_dq_kernel"),
            *("attn_bwd_dbias_kernel", "attn_bwd_rest_kernel"),
        ],
    }
    for module, kernels in names.items():
        for name in kernels:
            monkeypatch.setattr(module, name, Kernel(name, log))
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    monkeypatch.setattr(bwd_queue, "counter_of", once("counter", lambda d: torch.zeros(1).int()))
    monkeypatch.setattr(bwd_again, "direct_of", Quick)
    monkeypatch.setattr(bwd_again, "counter", once("counter", lambda *_: torch.zeros(1).int()))
    monkeypatch.setattr(bwd_launch, "make_scratch", once("scratch", scratch_in_one))
    monkeypatch.setattr(bwd_again, "make_others", lambda *_: made["scratch"][5:])
    new_empty = torch.Tensor.new_empty

    def in_scratch(x, *shape, **options):
        if len(shape) == 1 and isinstance(shape[0], int):
            return made["scratch"].dq
        return new_empty(x, *shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", in_scratch)
    monkeypatch.setattr(bwd_launch, "empty_grads", once("grads", bwd_launch.empty_grads))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    return log


make_others = bwd_again.make_others  # which tests replace


def scratch_in_one(problem, shapes, lse):
    """Scratch memory as a backward has it that is done again."""
    starts, floats = bwd_again.in_one(shapes)
    memory = torch.zeros(floats)
    views = [
        None if shape is None else memory[start // 4 :][: math.prod(shape)].view(shape)
        for shape, start in zip(shapes, starts)
    ]
    views[3] = None if views[3] is None else views[3].view(torch.int32)
    return bwd_again.Scratch(*views, *make_others(problem, shapes, lse))


@pytest.mark.parametrize("name", CALLS)
def test_backward(log, name):
    given = []
    for _ in range(2):
        call = call_of(name)
        q = call[2][0]
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1]) if name == "sinks" else None
        given.append(saved_of(call, torch.randn(q.shape).to(BF16), dlse))
    back = bwd_launch.Backward(*call[:2])
    back(*given[0])
    kernels = len(log)
    # The gradient of a bias in pairs is written by the kernel of the others
    by_itself = ("bias", "moved bias", "shared bias", "bias by columns", "all")
    assert kernels == 3 + (name in by_itself) + has_rest(call[0])
    back(*given[1])
    back(*given[1])
    bwd_launch.Backward(*call[:2])(*given[1])
    groups = [log[i : i + kernels] for i in range(0, len(log), kernels)]
    assert [{how for _, how, *_ in x} for x in groups] == [
        {"front"},
        {"again"},
        {"again"},
        {"front"},
    ]
    for first, again, more, front in zip(*groups):
        assert again[0] == front[0] and again[2] == front[2]
        assert plain(again[3]) == plain(more[3]) == plain(front[3]), front[0]
        assert compiled_for(first[3]) == compiled_for(front[3])


def test_what_is_launched_between_the_kernels_of_a_backward(log):
    """At the first call and at later ones alike; dK and dV are those that are returned."""
    call = call_of("plain")
    given = saved_of(call, torch.randn(call[2][0].shape).to(BF16))
    found = []
    between = Between(
        lambda: log.append(("keys",)), lambda x: log.append(("sums", found.append(x)))
    )
    back = bwd_launch.Backward(*call[:2])
    order = ["bwd_delta_kernel", "keys", "hopper_bwd_kernel", "sums", "hopper_bwd_dq_kernel"]
    for how in ("front", "again"):
        log.clear()
        grads = back.interleaved(*given, between)
        assert [x[0] for x in log] == order and {x[1] for x in log[::2]} == {how}
        assert found.pop() is grads


def test_backwards_of_one_call_that_look_different(log, monkeypatch):
    """A gradient of other strides, or with one of lse, is another launch's."""
    monkeypatch.setattr(ops.dispatch, "choose_for", lambda *_: bwd_launch)
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
    monkeypatch.setattr(ops.dispatch, "choose_for", lambda *_: bwd_launch)
    call = call_of("plain")
    known = Call(*call[:2])
    for look in range(20):
        monkeypatch.setattr(ops, "cpu_modes", lambda look=look: look)
        ops.run_backward(known, *saved_of(call, torch.randn(call[2][0].shape).to(BF16)))
        assert len(known.backwards) <= ops.LOOKS
    assert [*known.backwards] == [*range(20 - ops.LOOKS, 20)]


def test_a_copied_tensor_is_copied_each_time(log):
    """Slopes that are not contiguous, and keys whose batches are no whole heads apart."""
    slopes = torch.rand(4, 2)[:, 0]
    q, k = torch.randn(2, 64, 4, 64).to(BF16), torch.randn(2 * 64 * 2 * 64 + 64).to(BF16)
    padded = k.as_strided((2, 64, 2, 64), (64 * 2 * 64 + 8, 128, 64, 1))
    for extras, keys in (
        (Extras(alibi_slopes=slopes), q),
        (Extras(seqused_k=counts(2)), padded),
    ):
        problem = describe(q, keys, keys, extras, Scalars(1.0), "bottom_right", False)
        back = bwd_launch.Backward(problem, Scalars(1.0))
        out, lse = torch.zeros_like(q), torch.zeros(2, 4, 64)
        for _ in range(2):
            back(Saved(q, None, q, keys, keys, out, lse), extras)
        assert back.ready is None
    assert {how for _, how, *_ in log} == {"front"}


def test_a_profiler_sees_every_launch(log, monkeypatch):
    call = call_of("sinks")
    back = bwd_launch.Backward(*call[:2])
    monkeypatch.setattr(relaunch, "has_launch_hooks", lambda: True)
    for _ in range(2):
        back(*saved_of(call, call[2][0]))
    assert {how for _, how, *_ in log} == {"front"}


def test_another_device_is_current(log, monkeypatch):
    call = call_of("sinks")
    back = bwd_launch.Backward(*call[:2])
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


def test_patterns_keep_no_tensor():
    x, y = distinct_views((torch.zeros(2), torch.zeros(3)))
    args = 1, (x, (2, None), 0), "constant", ((y,), x)
    pattern = pattern_of(args, (y, None, x))
    for addresses in ([48, 0, 32], [48, 0, 32], [16, 0, 64]):
        a, _, b = addresses
        assert pattern(addresses) == (1, (b, (2, None), 0), "constant", ((a,), b))
    assert pattern_of(args, (x,)) is None
    one, other = distinct_views((x, x))
    assert one is not other and one.data_ptr() == other.data_ptr()
    assert relaunch.ALIGNMENT == 16
