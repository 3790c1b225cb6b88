"""FP8 by the portable kernels on a GPU: the error contract against fp64 of the dequantised tensors,
and quantising as plain torch does it.
"""

import functools

import pytest
import torch
from helpers.fp8 import Heads, error_of, lse_error, normal_call, reference, run

import tilewise
from tilewise.cache import Rotary
from tilewise.kernels import portable
from tilewise.kernels.common.program import Program
from tilewise.kernels.common.quantized import FP8, Lengths
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.quantize import Steps

pytestmark = pytest.mark.gpu

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
ZERO_MEAN, MEAN_1, LSE, SINK = 3e-2, 5e-3, 2e-3, 3.5e-2
FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "top-left": dict(causal="top_left"),
    "window": dict(window=(200, 90)),
    "causal-window": dict(causal=True, window=(400, 0)),
    "softcap": dict(softcap=3.0),
}
HEADDIMS = [(64, 64), (128, 128), (256, 256), (16, 16), (40, 72), (192, 128), (100, 65)]


def checked(call, most=ZERO_MEAN, **options):
    """out and lse, within the error contract; twice, the second time past Triton's front end."""
    found, again = run(portable, call, **options), run(portable, call, **options)
    expected = reference(call, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    assert found[0].isfinite().all() and not found[1].isnan().any()
    assert error_of(found[0], expected[0]) < most
    assert lse_error(found[1], expected[1]) < LSE
    return found


@pytest.mark.parametrize("headdims", HEADDIMS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, headdims):
    call = normal_call([700, 700], [1500, 1310], Heads(4, 2, *headdims), device="cuda")
    checked(call, **FEATURES[name])


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_everything_at_once(headdim):
    call = normal_call(
        *([700, 700], [1500, 950], Heads(4, 2, headdim, headdim)),
        **dict(spare=7, v_mean=True, mean=1.0, device="cuda"),
        alibi_slopes=torch.tensor([0.3, 0.02, 0.1, 0.0], device="cuda"),
        sinks=torch.randn(4).cuda(),
    )
    checked(call, causal=True, window=(600, 0), softcap=5.0, out_dtype=BF16)


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("headdims", [(64, 64), (128, 128), (96, 80)], ids=str)
def test_packed(headdims, spare):
    lengths = [5, 0, 700, 333], [7, 4, 700, 500]
    where = dict(packed=True, spare=spare, v_mean=True, device="cuda")
    checked(normal_call(*lengths, Heads(4, 2, *headdims), **where), causal=True)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("keys", [1024, 16384, 65536])
def test_an_error_that_does_not_grow_with_a_mean_of_v(keys, headdim):
    """Sums in the tensor cores would be 18 % off at 16Ki keys."""
    heads = Heads(2, 2, headdim, headdim)
    checked(normal_call([256], [keys], heads, mean=1.0, device="cuda"), MEAN_1)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_sink_comes_last(headdim):
    heads = Heads(2, 2, headdim, headdim)
    checked(normal_call([1024], [4096], heads, sink=12.0, device="cuda"), SINK, causal=True)


def test_a_relaunch_reads_other_tensors(monkeypatch):
    """One signature, other memory."""
    calls = [normal_call([300], [500], device="cuda", v_mean=True, seed=seed) for seed in (0, 1)]
    real, options = portable.prepare_fp8, dict(causal=True)
    monkeypatch.setattr(portable, "prepare_fp8", functools.cache(real))
    relaunched, launch = [], Program.__call__
    monkeypatch.setattr(
        Program, "__call__", lambda self, *x: relaunched.append(self.again) or launch(self, *x)
    )
    for call in (*calls, *calls):
        out, lse = run(portable, call, **options)
        expected = reference(call, **options)
        assert error_of(out, expected[0]) < ZERO_MEAN and lse_error(lse, expected[1]) < LSE
    assert relaunched[0] is None
    assert None not in relaunched[1:] or torch.version.hip


def test_repeats_are_bitwise():
    call = normal_call([2048], [2048], Heads(8, 8, 128, 128), device="cuda")
    first = run(portable, call, causal=True)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(portable, call, causal=True), first))


# quantising


STARTS = [0, 7, 7, 2000, 3000]
LENGTHS = {
    "batch": ((2, 1500), {}),
    "used": ((2, 1500), dict(seqused_k=[1310, 0])),
    "packed": ((1, 3000), dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)),
}


@pytest.mark.parametrize("headdim", [64, 128, 256, 96])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("steps", [Steps(True, True, True), Steps(False, False, False)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_quantising_is_that_of_plain_torch(name, steps, dtype, headdim):
    from helpers.quantizing import quantized

    rows, lengths = LENGTHS[name]
    of = Lengths(**{n: torch.tensor(x, dtype=INT32, device="cuda") for n, x in lengths.items()})
    q, k, v = (torch.randn(*rows, n, headdim, device="cuda").to(dtype) for n in (4, 2, 2))
    k[..., 3] += 5.0
    v = v + 1.0
    found, again = (quantized(q, k, v, steps, (None, None, None), of) for _ in range(2))
    # On the CPU: torch divides by a number on a GPU by multiplying with its inverse
    given, lengths = ([None if x is None else x.cpu() for x in xs] for xs in ((q, k, v), of))
    expected = plain.quantize(*given, steps, (None, None, None), Lengths(*lengths))
    for mine, theirs in zip((*found.scales, found.k_mean), (*expected.scales, expected.k_mean)):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs.cuda(), rtol=1e-5, atol=1e-6)
    if expected.v_mean is not None:
        # It has a share of what rounding takes: where a mean that was summed in another order has
        # one value rounded the other way, that of its column differs by a step over the keys
        mine, theirs = found.v_mean, expected.v_mean.cuda()
        differs = ~torch.isclose(mine, theirs, rtol=1e-5, atol=1e-6)
        other = found.v_t.float() != expected.v_t.float().cuda()
        assert differs.sum() <= other.sum()
        assert (mine - theirs).abs().max() <= 32 * found.scales.v.max()
    for mine, second, theirs in zip(found[:3], again[:3], expected[:3]):
        assert torch.equal(mine.view(torch.uint8), second.view(torch.uint8))
        x, y = mine.float(), theirs.float().cuda()
        assert (x != y).sum() <= (5e-3 if steps.rotate else 0) * x.numel()
        assert (x - y).abs().le(y.abs() / 8 + 2.0**-9).all()


@pytest.mark.parametrize("steps", [Steps(True, True, True), Steps(False, False, False)], ids=str)
@pytest.mark.parametrize("value", [1000.0, torch.inf, torch.nan])
def test_what_a_scale_has_no_room_for_is_rounded_again(value, steps):
    """In a block that was not looked at before, of one sequence."""
    from helpers.quantizing import quantized

    q, k, v = (torch.randn(2, 3000, n, 64, device="cuda").to(BF16) for n in (4, 2, 2))
    for x in (q, k, v):
        x[1, 131, -1, 5] = value
    found = quantized(q, k, v, steps, (None, None, None), Lengths())
    given = (x.cpu() for x in (q, k, v))
    expected = plain.quantize(*given, steps, (None, None, None), Lengths())
    for mine, theirs in zip(found.scales, expected.scales):
        assert torch.equal(mine.cpu().isfinite(), theirs.isfinite())
        is_one = theirs.isfinite()
        torch.testing.assert_close(mine.cpu()[is_one], theirs[is_one], rtol=1e-5, atol=0)
    for mine, theirs in zip(found[:3], expected[:3]):
        x, y = mine.float().cpu(), theirs.float()
        if value < torch.inf:
            assert (x != y).sum() <= 5e-3 * x.numel()
            assert (x - y).abs().le(y.abs() / 8 + 2.0**-9).all()
        assert torch.equal(x[0].isnan(), y[0].isnan())


@pytest.mark.parametrize("headdim", [64, 128, 256, 96])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_rotary_tables(name, interleaved, headdim):
    rows, lengths = LENGTHS[name]
    given = {n: torch.tensor(x, dtype=INT32, device="cuda") for n, x in lengths.items()}
    q, k, v = (torch.randn(*rows, n, headdim, device="cuda").to(BF16) for n in (4, 2, 2))
    angles = torch.outer(torch.arange(3000), 100.0 ** -(torch.arange(0, headdim, 2) / headdim))
    rotary = Rotary(angles.cos().cuda(), angles.sin().cuda(), interleaved)
    options = dict(rotary=rotary, **given)
    if "cu_seqlens_q" in given:
        q, k, v = q[0], k[0], v[0]
    found, again = (tilewise.quantize(q, k, v, **options) for _ in range(2))
    of = Lengths(**given)
    batch = (x if x.dim() == 4 else x[None] for x in (q, k, v))
    expected = plain.quantize(*batch, Steps(True, True, True), (None, None, None), of, rotary)
    for mine, second, theirs in zip(found[:3], again[:3], expected[:3]):
        assert torch.equal(mine.view(torch.uint8), second.view(torch.uint8))
        x, y = mine.float(), theirs.float().view(mine.shape)
        assert (x != y).sum() <= 5e-3 * x.numel()
        assert (x - y).abs().le(y.abs() / 8 + 2.0**-9).all()


@pytest.mark.parametrize("name", LENGTHS)
def test_transposed_values(name):
    from helpers.quantizing import transposed_by_kernels

    rows, lengths = LENGTHS[name]
    of = Lengths(**{n: torch.tensor(x, dtype=INT32, device="cuda") for n, x in lengths.items()})
    v = torch.randn(*rows, 3, 128, device="cuda").to(FP8)
    found, expected = (
        f(v, of.seqused_k, of.cu_seqlens_k)
        for f in (transposed_by_kernels, plain.transposed_values)
    )
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_rows_past_2_to_31_elements():
    from helpers.quantizing import transposed_by_kernels

    apart, rows = 1 << 24, 200
    v = torch.empty(rows * apart, dtype=torch.uint8, device="cuda")
    v = v.as_strided((1, rows, 1, 16), (0, apart, 16, 1))
    v.copy_(torch.randint(0, 100, v.shape))
    found = transposed_by_kernels(v.view(FP8), None, None)
    expected = plain.transposed_values(v.contiguous().view(FP8), None, None)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
