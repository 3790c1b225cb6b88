"""The CPU backend in fp64, where it must equal the reference, and its promises."""

import itertools
import math
import random

import pytest
import torch
from helpers.tiers import sample

import tilewise
from tilewise import attention, attention_reference
from tilewise.kernels import cpu
from tilewise.kernels.cpu import tiles
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.tolerance import judge

F64 = torch.float64


def results(attend, inputs, features, **how):
    """out, lse and all gradients, with a gradient coming in through both results."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    extras = inputs.extras
    sinks = None if extras.sinks is None else extras.sinks.clone().requires_grad_()
    given = dict(alibi_slopes=extras.alibi_slopes, sinks=sinks, seqused_k=extras.seqused_k)
    given |= {n: getattr(features, n) for n in ("causal", "window", "softcap", "scale", "layout")}
    out, lse = attend(*leaves, **given, **how, return_lse=True)
    leaves += [] if sinks is None else [sinks]
    dlse = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).view_as(lse)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, dlse))


@pytest.fixture(params=sample(["default", "tiny"], "tiny"))
def tile_sizes(request, monkeypatch):
    """So small that every case has many tiles and chunks; as shipped, as in the matrix, where all
    is tested.
    """
    if request.param == "tiny":
        for name, size in (("BLOCK_M", 16), ("BLOCK_N", 24), ("TILE", 2000)):
            monkeypatch.setattr(tiles, name, size)


@pytest.mark.parametrize("case", [c for c in CASES if c.tiles < 100], ids=lambda case: case.name)
def test_fp64_equals_the_reference(case, tile_sizes):
    inputs = make_inputs(case.sizes, case.features, F64, seed=case.seed)
    ours = results(attention, inputs, case.features, backend="cpu")
    theirs = results(attention_reference, inputs, case.features)
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)


def test_every_pair_of_features():
    q = torch.randn(2, 19, 4, 8, dtype=F64)
    k, v = torch.randn(2, 2, 23, 2, 8, dtype=F64).unbind(0)
    choices = dict(
        causal=(False, True, "top_left"),
        window=(None, (5, 0), (4, 3)),
        softcap=(None, 2.0),
        alibi_slopes=(None, torch.rand(4)),
        sinks=(None, torch.randn(4, dtype=F64)),
        seqused_k=(None, torch.tensor([9, 23], dtype=torch.int32)),
    )
    for values in itertools.product(*choices.values()):
        features = dict(zip(choices, values))
        expected = attention_reference(q, k, v, **features)
        torch.testing.assert_close(attention(q, k, v, **features), expected)


def test_gradcheck():
    q = torch.randn(1, 5, 2, 3, dtype=F64, requires_grad=True)
    k, v = (torch.randn(1, 4, 1, d, dtype=F64, requires_grad=True) for d in (3, 2))
    sinks = torch.randn(2, dtype=F64, requires_grad=True)

    def call(q, k, v, sinks):
        return attention(q, k, v, causal=True, softcap=3.0, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(40, 40), (9, 40), (40, 9), (9, 9)], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_nan_reaches_only_rows_that_see_it(causal, lengths, softcap):
    seqlen_q, seqlen_k = lengths
    q = torch.randn(1, seqlen_q, 2, 16)
    k, v = torch.randn(2, 1, seqlen_k, 2, 16).unbind(0)
    clean = attention(q, k, v, causal=causal, softcap=softcap)
    k[0, 7, 0] = math.nan
    q[0, 3, 1] = math.nan
    out = attention(q, k, v, causal=causal, softcap=softcap)
    q_idx = torch.arange(seqlen_q)
    sees_key = q_idx + seqlen_k - seqlen_q >= 7 if causal else q_idx >= 0
    sees_any = q_idx + seqlen_k - seqlen_q >= 0 if causal else q_idx >= 0
    assert torch.equal(out[0, :, 0].isnan().any(-1), sees_key)
    assert torch.equal(out[0, :, 1].isnan().any(-1), (q_idx == 3) & sees_any)
    rest = out.isfinite()
    torch.testing.assert_close(out[rest], clean[rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 1), (2, 15), (15, 15), (1, 9), (15, 40)], ids=str)
def test_few_keys(lengths, causal, dtype):
    """By torch's kernel, which takes NaN for a masked row, and a score of 0 stays one."""
    q = torch.randn(2, lengths[0], 2, 16, dtype=dtype)
    k, v = torch.randn(2, 2, lengths[1], 2, 16, dtype=dtype).unbind(0)
    wide = [x.double() for x in (q, k, v)]
    options = dict(causal=causal, return_lse=True)
    for case in (1, 0, math.nan, math.inf):
        q[1, 0, 1] = wide[0][1, 0, 1] = case
        found = attention(q, k, v, **options)
        oracle = attention_reference(*wide, **options)
        plain = attention_reference(q, k, v, upcast=False, **options)
        for results in zip(found, oracle, plain):
            assert torch.equal(results[0].isnan(), results[1].isnan())
            rest = results[1].isfinite()
            verdict = judge(*(x[rest] for x in results))
            assert verdict.ok, f"{case}: {verdict}"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("memory", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_strides_of_results(layout, memory, dtype):
    """What a traced graph asserts: out dense, sequence first; gradients strided as inputs."""
    q, k, v = torch.randn(3, 2, 6, 4, 8, dtype=dtype).unbind(0)
    if memory != layout:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, layout=layout, return_lse=True)
    sequence_first = out if layout == "bshd" else out.transpose(1, 2)
    assert sequence_first.is_contiguous() and lse.is_contiguous()
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), leaves)
    for x, grad in zip(leaves, grads):
        assert grad.stride() == x.stride() and grad.dtype == dtype


def strided(rng: random.Random, x: torch.Tensor, is_free: bool) -> torch.Tensor:
    """x in another order of memory, with gaps or rows that overlap; strides of dimensions of size 1
    are anything. The last one stays contiguous unless `is_free`.
    """
    order = [0, 1, 2]
    rng.shuffle(order)
    order = rng.sample(range(4), 4) if is_free else [*order, 3]
    room = [x.shape[dim] + rng.choice((0, 0, 1, 3)) for dim in order]
    y = torch.randn(room, dtype=x.dtype).permute([order.index(dim) for dim in range(4)])
    y = y[tuple(slice(n) for n in x.shape)].copy_(x)
    strides = list(y.stride())
    for dim, n in enumerate(x.shape):
        if n == 1:
            strides[dim] = rng.choice((strides[dim], 0, 1, 7, 10**12))
        elif dim < 3 and rng.random() < 0.1:
            strides[dim] = rng.choice((0, 1))
    return y.as_strided(y.shape, strides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(dtype):
    """torch's flash kernel for CPUs trusts strides that `F.pad`, `to` and `empty_like` do not keep:
    of head dims of 1, expanded inputs and overlapping rows.
    """
    rng = random.Random(str(dtype))
    torch.manual_seed(0)
    for _ in range(30):
        batch, nheads, seqlen_q, seqlen_k = (
            rng.choice(x) for x in ((1, 2), (1, 3), (1, 9), (1, 6))
        )
        headdim, headdim_v = rng.choice((1, 1, 2, 5)), rng.choice((1, 2, 8))
        shapes = [(seqlen_q, headdim), (seqlen_k, headdim), (seqlen_k, headdim_v)]
        shapes.append((seqlen_q, headdim_v))
        tensors = [torch.randn(batch, n, nheads, d, dtype=dtype) for n, d in shapes]
        inputs = [strided(rng, x, i == 3) for i, x in enumerate(tensors)]
        *leaves, dout = inputs
        leaves = [x.requires_grad_() for x in leaves]
        causal = rng.choice((False, True, "top_left"))
        out = attention(*leaves, causal=causal)
        grads = torch.autograd.grad(out, leaves, dout)
        plain = [x.detach().double().contiguous().requires_grad_() for x in inputs]
        expected = attention_reference(*plain[:3], causal=causal)
        theirs = torch.autograd.grad(expected, plain[:3], plain[3])
        bound = 1e-5 if dtype == torch.float32 else 0.1
        for mine, exact in zip((out, *grads), (expected, *theirs)):
            assert (mine - exact).abs().amax() <= bound * max(1, exact.abs().amax()), shapes


def test_memory_is_linear():
    """Twice the length may not take four times the memory: the tiles stay as they are."""
    peaks = []
    for seqlen in (2048, 4096):
        q = torch.randn(1, seqlen, 4, 8)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            attention(q, q, q, causal=True, softcap=10.0)
        peaks.append(max(e.self_cpu_memory_usage for e in profile.events()))
    assert peaks[1] < 3 * peaks[0]


def test_refusals_say_why():
    q = torch.randn(1, 4, 2, 8)
    problem = tilewise.problem.describe(
        q,
        q,
        q,
        tilewise.problem.Extras(),
        tilewise.problem.Scalars(1.0),
        "bottom_right",
        False,
    )
    assert cpu.supports(problem, torch.device("cpu")) is None
    assert "CPU" in cpu.supports(problem, torch.device("cuda:0"))
    assert "int8" in cpu.supports(problem._replace(dtype=torch.int8), torch.device("cpu"))


def test_same_bits_every_time():
    q, k, v = torch.randn(3, 2, 200, 4, 32).unbind(0)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run():
        out = attention(*leaves, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))
