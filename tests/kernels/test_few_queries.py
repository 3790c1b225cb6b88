"""Few queries and many keys take the split-KV kernels, from every function."""

import functools

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.frontend.call import check
from tilewise.frontend.scalars import Numbers
from tilewise.kernels.portable import few_queries
from tilewise.problem import NO_EXTRAS, Extras
from tilewise.testing import use_interpreter
from tilewise.testing.tolerance import assert_within

F64, BF16 = torch.float64, torch.bfloat16


def inputs(seqlen_q=3, seqlen_k=1100, nheads=4, nheads_k=2, headdim=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, nheads, headdim).to(dtype)
    k, v = torch.randn(2, 2, seqlen_k, nheads_k, headdim).to(dtype)
    return q, k, v


def checked(q, k, v, extras=NO_EXTRAS, align="bottom_right", right=0):
    numbers = Numbers(causal=align if right == 0 else False, window=(-1, right))
    call = check(q, k, v, extras=extras, numbers=numbers, deterministic=False)
    call.problem = call.problem._replace(align=align)
    return call


def hold(found, inputs, **named):
    """Within the budget of fp64."""
    reference = functools.partial(tilewise.attention_reference, return_lse=True, **named)
    oracle, plain = reference(*(x.double() for x in inputs)), reference(*inputs, upcast=False)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough, name)


@pytest.mark.parametrize("causal", [True, False])
def test_they_are_right(causal):
    q, k, v = inputs()
    call = checked(q, k, v, right=0 if causal else -1)
    with use_interpreter():
        out, lse = few_queries.prepare(call.problem, call.scalars)(q, k, v, NO_EXTRAS)
    hold((out, lse), (q, k, v), causal=causal)


def test_lengths_and_sinks_are_used():
    q, k, v = inputs()
    extras = Extras(sinks=torch.randn(4), seqused_k=torch.tensor([700, 2], dtype=torch.int32))
    call = checked(q, k, v, extras)
    with use_interpreter():
        found = few_queries.prepare(call.problem, call.scalars)(q, k, v, extras)
    hold(found, (q, k, v), causal=True, sinks=extras.sinks, seqused_k=extras.seqused_k)


@pytest.mark.parametrize(
    ("sizes", "is_served"),
    [
        (dict(), True),
        (dict(seqlen_q=8), True),
        (dict(seqlen_q=9), False),  # 18 rows a key head
        (dict(seqlen_k=511), False),
        (dict(dtype=torch.float32), False),
        (dict(headdim=264), False),
        (dict(seqlen_q=0), False),
    ],
)
def test_few_queries_are_one_tile_beside_many_keys(sizes, is_served):
    q, k, v = inputs(**sizes)
    assert few_queries.serves(checked(q, k, v).problem, q, k) is is_served


def test_what_those_kernels_lack_is_left_to_others():
    q, k, v = inputs()
    assert not few_queries.serves(checked(q, k, v, align="top_left").problem, q, k)
    assert few_queries.serves(checked(q, k, v, align="top_left", right=-1).problem, q, k)
    bias = torch.zeros(1, 1, 3, 1100, dtype=q.dtype)
    assert not few_queries.serves(checked(q, k, v, Extras(bias=bias)).problem, q, k)


def test_on_a_cpu_they_are_not_asked(monkeypatch):
    monkeypatch.setattr(few_queries, "serves", lambda *_, **named: pytest.fail("asked"))
    q, k, v = inputs()
    call = checked(q, k, v)
    forward = dispatch.forward_of(call, q, k, v, NO_EXTRAS)
    assert forward(q, k, v, NO_EXTRAS)[0].shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("headdim", [64, 100, 128, 256])
def test_on_a_gpu_every_call_of_few_queries_takes_them(headdim, causal, monkeypatch):
    q, k, v = (x.cuda().requires_grad_() for x in inputs(headdim=headdim))
    made = []
    real = few_queries.prepare

    def spied(*args):
        forward = real(*args)
        return lambda *tensors: made.append(0) or forward(*tensors)

    monkeypatch.setattr(few_queries, "prepare", spied)
    # On the CPU: of threads that find no context of a device cuBLAS warns
    exact, plain = (
        [x.detach().cpu().to(t).requires_grad_() for x in (q, k, v)] for t in (F64, BF16)
    )
    wanted = tilewise.attention_reference(*exact, causal=causal)
    rough = tilewise.attention_reference(*plain, causal=causal, upcast=False)
    dout = torch.randn_like(rough)
    oracle = torch.autograd.grad(wanted, exact, dout.double())
    rough_grads = torch.autograd.grad(rough, plain, dout)
    for _ in range(2):  # as Triton launches it, and past Triton
        out = tilewise.attention(q, k, v, causal=causal)
        assert_within(out.cpu(), wanted, rough)
        grads = torch.autograd.grad(out, (q, k, v), dout.cuda())
        for mine, exact_grad, rough_grad in zip(grads, oracle, rough_grads):
            assert_within(mine.cpu(), exact_grad, rough_grad)
    assert len(made) == 2
