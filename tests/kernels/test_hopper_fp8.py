"""The Hopper forward in FP8, in the emulator and on a GPU: against fp64 of the dequantised."""

import itertools
import math

import pytest
import torch
from helpers import fp8
from helpers.tiers import every, sample, sample_rows

from tilewise.kernels import hopper
from tilewise.kernels.hopper.fwd import fp8_launch
from tilewise.testing import use_emulator
from tilewise.testing.inputs import poisoned

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
BF16 = torch.bfloat16
LIMIT = 3e-2  # of zero-mean V: P has 3 bits after its first one
LSE_LIMIT = 2e-3


def normal(*shape, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) + mean


def run(call, seed=0, out_dtype=BF16, **options):
    """On a GPU where the call is there."""
    if call.quantized.q.is_cuda:
        attend = fp8.forward_of(hopper, call, out_dtype=out_dtype, **options)
        first, again = (attend(call.quantized, call.extras) for _ in range(2))
        for a, b in zip(first, again):  # by Triton's launcher, and without
            assert a.equal(b)
        return first
    with use_emulator(seed), poisoned():
        return fp8.run(hopper, call, out_dtype=out_dtype, **options)


def check(call, found, limit=LIMIT, **options):
    exact, exact_lse = fp8.reference(call, **options)
    assert fp8.error_of(found[0], exact) < limit
    assert fp8.lse_error(found[1], exact_lse) < LSE_LIMIT


def checked(call, limit=LIMIT, **options):
    check(call, run(call, **options), limit, **options)


CASES = {
    "full": (dict(q=(1, 130, 2, 128), k=(1, 300, 2, 128)), {}),
    "causal": (dict(q=(2, 300, 2, 128), k=(2, 300, 2, 128)), dict(causal=True)),
    "top-left": (dict(q=(1, 200, 1, 64), k=(1, 300, 1, 64)), dict(causal="top_left")),
    "more-queries": (dict(q=(1, 300, 1, 64), k=(1, 140, 1, 64)), dict(causal=True)),
    "group": (dict(q=(1, 140, 6, 64), k=(1, 200, 2, 64)), dict(causal=True)),
    "packed-heads": (dict(q=(2, 3, 8, 64), k=(2, 280, 2, 64)), dict(causal=True)),
    "window": (dict(q=(1, 290, 1, 64), k=(1, 290, 1, 64)), dict(window=(100, 20))),
    "softcap": (dict(q=(1, 140, 1, 64), k=(1, 200, 1, 64)), dict(softcap=3.0)),
    "256": (dict(q=(1, 130, 1, 256), k=(1, 300, 1, 256)), dict(causal=True)),
    "192-128": (dict(q=(1, 100, 1, 192), k=(1, 260, 1, 192), v=128), {}),
    "80": (dict(q=(1, 100, 1, 80), k=(1, 260, 1, 80)), {}),
    "256-of-v": (dict(q=(1, 70, 2, 64), k=(1, 200, 2, 64), v=192), {}),
    "one": (dict(q=(1, 1, 1, 64), k=(1, 1, 1, 64)), {}),
}


LONG = {
    "long": (dict(q=(2, 2048, 8, 128), k=(2, 2048, 2, 128)), dict(causal=True)),
    "long-64": (dict(q=(1, 4096, 4, 64), k=(1, 4096, 4, 64)), dict(causal=True)),
    "long-256": (dict(q=(1, 4096, 2, 256), k=(1, 4096, 2, 256)), {}),
    "long-window": (dict(q=(1, 4096, 2, 128), k=(1, 4096, 2, 128)), dict(window=(500, 0))),
    "long-softcap": (dict(q=(1, 2048, 2, 128), k=(1, 4096, 2, 128)), dict(softcap=5.0)),
}


def case(name, mean=0.0, **how):
    """The call of a case, and its options."""
    shapes, options = (CASES | LONG)[name]
    q, k = normal(*shapes["q"], seed=1), normal(*shapes["k"], seed=2)
    v = normal(*shapes["k"][:3], shapes.get("v", shapes["k"][3]), seed=3, mean=mean)
    return fp8.call_of(zip(q, k, v), **how), options


@pytest.mark.parametrize("name", every(2, CASES))
def test_against_fp64(name):
    call, options = case(name)
    checked(call, **options)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_against_fp64_on_a_gpu(name):
    call, options = case(name, device="cuda")
    checked(call, **options)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [1024, 16384, 65536, 131072])
def test_an_error_that_does_not_grow_on_a_gpu(headdim, seqlen_k):
    """V of mean 1: raw, and with its mean taken off."""
    for mean in (False, True):
        checked(around_one(headdim, seqlen_k, v_mean=mean, device="cuda"), 5e-3)


@needs_hopper
@pytest.mark.gpu
def test_repeats_are_bitwise_on_a_gpu():
    call, options = case("long", device="cuda")
    attend = fp8.forward_of(hopper, call, out_dtype=BF16, **options)
    first = attend(call.quantized, call.extras)
    for _ in range(50):
        for a, b in zip(first, attend(call.quantized, call.extras)):
            assert a.equal(b)


@needs_hopper
@pytest.mark.gpu
def test_a_needle_is_found_on_a_gpu():
    """One key of 131,072 that has nearly all of the softmax."""
    q, k, v = (normal(1, n, 1, 128, seed=i) for i, n in enumerate((64, 131072, 131072)))
    k[:, 77777] = 6 * q.mean(1) / q.mean(1).norm() * 128**0.5 / 4
    q[:] = k[:, 77777:77778]
    call = fp8.call_of(zip(q, k, v), device="cuda")
    assert fp8.error_of(run(call)[0], fp8.reference(call)[0]) < LIMIT


@pytest.mark.parametrize("seed", sample(range(8), 2))
def test_by_other_schedules(seed):
    """The emulator draws when copies land and matmuls read; the result is the same bits."""
    call, options = case("causal")
    for a, b in zip(run(call, **options), run(call, seed=seed + 1, **options)):
        assert a.equal(b)


def test_slopes_and_sinks():
    tensors = dict(alibi_slopes=torch.tensor([0.1, 0.3]), sinks=torch.tensor([2.0, -1.0]))
    call, options = case("causal", **tensors)
    checked(call, **options)


@pytest.mark.parametrize("dtype", sample([torch.float16, torch.float32], torch.float32))
def test_other_outputs(dtype):
    call, _ = case("full")
    out, lse = run(call, out_dtype=dtype)
    assert out.dtype == dtype
    check(call, (out, lse))


@pytest.mark.parametrize(
    "sinks", [pytest.param(None, marks=pytest.mark.slow), torch.tensor([1.0, 4.0])]
)
def test_the_mean_of_v_is_added(sinks):
    call, options = case("causal", mean=3.0, v_mean=True, sinks=sinks)
    checked(call, 5e-3, **options)


def test_a_sequence_of_unused_keys():
    """NaN in rows that are not in use changes nothing."""
    call = fp8.normal_call([300, 300], [129, 0], fp8.Heads(2, 2, 128, 128), spare=171)
    assert call.quantized.k[0, 129:].isnan().all() and call.quantized.k.shape[1] == 300
    found = run(call, causal=True)
    check(call, found, causal=True)
    assert (found[0][1] == 0).all()


def test_packed_sequences():
    call = fp8.normal_call([5, 130, 0, 70, 9], [7, 129, 3, 300, 0], packed=True)
    for causal in (False, True):
        checked(call, causal=causal)


def test_a_sink_comes_last():
    """Key 0 is 12 above all other scores: walked upwards, e4m3 would lose the others."""
    q, k, v = (normal(1, 300, 1, 128, seed=i) for i in (1, 2, 3))
    q = q / 8
    q[..., 0] = 4.0
    k[..., 0] = 0.0
    k[:, 0] = 0.0
    k[:, 0, :, 0] = 12 * 128**0.5 / 4.0
    checked(fp8.call_of(zip(q, k, v)), 3.5e-2, causal=True)


def around_one(headdim, seqlen_k, **how):
    q, k = normal(1, 64, 1, headdim, seed=1), normal(1, seqlen_k, 1, headdim, seed=2)
    v = normal(1, seqlen_k, 1, headdim, seed=3, mean=1.0)
    return fp8.call_of(zip(q, k, v), **how)


@pytest.mark.parametrize("seqlen_k", [1024, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("headdim", sample([128, 256], 128))
def test_a_large_sum_loses_nothing(headdim, seqlen_k):
    """V of mean 1: the error does not grow with the keys."""
    checked(around_one(headdim, seqlen_k), 5e-3)
    checked(around_one(headdim, seqlen_k, v_mean=True), 5e-3)


def test_the_tensor_cores_alone_would_lose_it():
    """In one level, with the mean of V: an H200 was measured to be 1.0 % off."""
    call = around_one(256, 1024)
    mean, drift = torch.zeros(1, 1, 256), torch.tensor(0.0)
    call = call._replace(quantized=call.quantized._replace(v_mean=mean, v_drift=drift))
    assert 8e-3 < fp8.error_of(run(call, out_dtype=BF16)[0], fp8.reference(call)[0]) < 1.3e-2


# V of more than 128 columns, with its mean
HALVES = {
    "full": (([130], [300], fp8.Heads(2, 2, 256, 256)), {}, {}),
    "one-block": (([130], [70], fp8.Heads(1, 1, 256, 256)), {}, {}),
    "causal": (([300], [300], fp8.Heads(1, 1, 256, 256)), dict(causal=True), {}),
    "more-queries": (([300], [140], fp8.Heads(1, 1, 256, 256)), dict(causal=True), {}),
    "group": (([3, 3], [280, 280], fp8.Heads(8, 2, 256, 256)), dict(causal=True), {}),
    "window": (([290], [290], fp8.Heads(1, 1, 256, 256)), dict(window=(100, 20)), {}),
    "softcap": (([140], [200], fp8.Heads(1, 1, 256, 256)), dict(softcap=3.0), {}),
    "64-192": (([70], [200], fp8.Heads(2, 2, 64, 192)), {}, {}),
    "used": (([300, 300], [129, 0], fp8.Heads(2, 2, 256, 256)), dict(causal=True), dict(spare=9)),
    "packed": (
        *(([5, 130, 0, 70, 9], [7, 129, 3, 300, 0], fp8.Heads(2, 2, 256, 256)), dict(causal=True)),
        dict(packed=True),
    ),
    "sinks": (
        *(([140], [200], fp8.Heads(2, 2, 256, 256)), {}),
        dict(sinks=torch.tensor([2.0, -1.0]), alibi_slopes=torch.tensor([0.1, 0.3])),
    ),
}


MEANS = {
    "with its mean": {},
    "drifts": dict(mean=1.0, v_mean=True, v_drift=math.inf),
    "does not": dict(mean=1.0, v_mean=True),
}
_halves = list(itertools.product(HALVES, MEANS))
# Each, with one mean or another
SAMPLED_HALVES = [(name, list(MEANS)[i % 3]) for i, name in enumerate(HALVES)][::2]


@pytest.mark.parametrize("name, mean", sample_rows(_halves, *SAMPLED_HALVES))
def test_in_halves_against_fp64(name, mean):
    """And in one level, where V lost its mean and does not drift."""
    lengths, options, how = HALVES[name]
    checked(fp8.normal_call(*lengths, **how, **MEANS[mean]), **options)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", HALVES)
def test_in_halves_against_fp64_on_a_gpu(name, mean):
    lengths, options, how = HALVES[name]
    checked(fp8.normal_call(*lengths, device="cuda", **how, **MEANS[mean]), **options)


@pytest.mark.parametrize("seed", sample(range(4), 0))
def test_in_halves_by_other_schedules(seed):
    lengths, options, how = HALVES["causal"]
    call = fp8.normal_call(*lengths, **how)
    for a, b in zip(run(call, **options), run(call, seed=seed + 1, **options)):
        assert a.equal(b)


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_in_halves_with_one_stage_of_queries(name, monkeypatch):
    """The next Q is copied before the stage that has the last V of this one."""
    monkeypatch.setattr(fp8_launch, "shared_memory", lambda *of: 2**20)
    fp8_launch.plan_of.cache_clear()
    try:
        lengths, options, how = HALVES[name]
        checked(fp8.normal_call(*lengths, **how), **options)
    finally:
        fp8_launch.plan_of.cache_clear()


@pytest.mark.parametrize("seqlen_k", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_in_halves_a_large_sum_loses_nothing(seqlen_k):
    checked(around_one(256, seqlen_k), 4e-3)


def test_in_halves_the_mean_may_drift():
    """From 0 to 2 along the sequence."""
    q, k, v = (normal(1, n, 1, 256, seed=i) for i, n in enumerate((64, 2048, 2048)))
    v[:, 1024:] += 2.0
    checked(fp8.call_of(zip(q, k, v)), 4e-3)


def drifting(rows, **how):
    """V is around -1 in the first half of 2048 keys, and around 1 in the second."""
    q, k, v = (normal(1, n, 1, 256, seed=i) for i, n in enumerate((rows, 2048, 2048)))
    v[:, :1024] -= 1.0
    v[:, 1024:] += 1.0
    return fp8.call_of(zip(q, k, v), v_mean=True, **how)


@pytest.mark.parametrize(
    "options", every(2, [dict(window=(1023, 0)), dict(causal="top_left")]), ids=str
)
def test_where_rows_see_a_part_of_the_keys_the_mean_may_drift(options):
    """V lost its mean over all keys, not the one of those that a row sees."""
    call = drifting(64 if "window" in options else 1024)
    found, exact = run(call, **options), fp8.reference(call, **options)
    assert fp8.error_of(found[0][:, -64:], exact[0][:, -64:]) < 5e-3
    assert fp8.lse_error(found[1], exact[1]) < LSE_LIMIT


def test_what_drifts_is_summed_in_halves():
    """In one level the rows that see one half would be off. What is not known drifts."""
    options, call = dict(window=(1023, 0)), drifting(64)
    exact, given = fp8.reference(call, **options)[0], call.quantized
    assert 600 < given.v_drift < 900  # 512 keys less spread than from their mean
    errors = {}
    for drift in (0.0, 512.0, 513.0, math.nan, None):
        v_drift = None if drift is None else torch.tensor(drift)
        of = call._replace(quantized=given._replace(v_drift=v_drift))
        errors[drift] = fp8.error_of(run(of, **options)[0], exact)
    assert all(8e-3 < errors[drift] < 2e-2 for drift in (0.0, 512.0)), errors
    assert all(errors[drift] < 5e-3 for drift in (513.0, math.nan, None)), errors


def test_a_key_of_nan_reaches_no_tile_before_it():
    """It reaches the tiles that visit its block, and no other ones."""
    q, k = normal(1, 300, 1, 256, seed=1), normal(1, 300, 1, 256, seed=2)
    call = fp8.call_of(zip(q, k, normal(1, 300, 1, 256, seed=3, mean=1.0)))
    v_t = call.quantized.v_t.clone()
    v_t[:, :, 5, 256] = math.nan
    out, _ = run(call._replace(quantized=call.quantized._replace(v_t=v_t)), causal=True)
    assert out[:, :256].isfinite().all() and out[:, 299, 0, 5].isnan()
