"""FP8 attention by the portable kernel, in the interpreter: the error contract against fp64 of the
dequantised tensors. The interpreter sums products exactly: what tensor cores lose is for a GPU.
"""

import math

import pytest
import torch
from helpers.fp8 import Heads, error_of, lse_error, normal_call, reference, run
from helpers.tiers import sample

from tilewise import mods
from tilewise.kernels import portable
from tilewise.kernels.portable import fp8_launch
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import NO_EXTRAS, NO_MODS, Extras, Scalars, describe
from tilewise.testing import use_interpreter
from tilewise.tuning.select import override
from tilewise.tuning.tables import Config

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ZERO_MEAN, MEAN_1, LSE, SINK = 3e-2, 5e-3, 2e-3, 3.5e-2


@pytest.fixture(params=["native", "dequantised"])
def product(request, monkeypatch):
    """With products of e4m3, and as GPUs without them compute: in bfloat16."""
    if request.param == "dequantised":
        monkeypatch.setattr(fp8_launch, "architecture", lambda device: "sm80")
    return request.param


def checked(call, most=ZERO_MEAN, **options):
    """out and lse, within the error contract."""
    with use_interpreter():
        found = run(portable, call, **options)
    expected = reference(call, **options)
    assert found[0].isfinite().all() and not found[1].isnan().any()
    assert error_of(found[0], expected[0]) < most
    assert lse_error(found[1], expected[1]) < LSE
    return found


FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "top-left": dict(causal="top_left"),
    "window": dict(window=(20, 9)),
    "causal-window": dict(causal=True, window=(40, 0)),
    "left-open": dict(window=(-1, 13)),
    "softcap": dict(softcap=3.0),
}
SLOPES = torch.tensor([0.3, 0.02])


@pytest.mark.parametrize("name", FEATURES)
def test_features(name, product):
    call = normal_call([70, 70], [150, 131], Heads(2, 1, 32, 32))
    out, _ = checked(call, **FEATURES[name])
    assert out.dtype == FP32


@pytest.mark.parametrize("causal", [False, True])
def test_alibi(causal, product):
    checked(normal_call([90], [90], alibi_slopes=SLOPES), causal=causal)
    per_batch = torch.stack([SLOPES, 2 * SLOPES])
    checked(normal_call([40, 40], [90, 90], alibi_slopes=per_batch), causal=causal)


def test_sinks_join_once(product):
    sinks = torch.tensor([0.5, -math.inf])
    call = normal_call([90], [90], sinks=sinks, v_mean=True, mean=2.0)
    checked(call, causal=True)
    nothing = normal_call([5, 5], [0, 9], sinks=sinks, v_mean=True)
    out, lse = checked(nothing)
    assert out[0].eq(0).all() and lse[0, 0].allclose(sinks[0]) and lse[0, 1].eq(-math.inf).all()


def test_everything_at_once(product):
    call = normal_call(
        [70, 70], [150, 95], Heads(4, 2, 40, 24), spare=7, v_mean=True, mean=1.0,
        alibi_slopes=torch.tensor([0.3, 0.02, 0.1, 0.0]), sinks=torch.randn(4),
    )  # fmt: skip
    assert call.quantized.k.isnan().any() and call.extras.seqused_k is not None
    checked(call, causal=True, window=(60, 0), softcap=5.0, out_dtype=BF16)


HEADDIMS = [(16, 16), (64, 16), (16, 64), (40, 72), (128, 128), (100, 65), (256, 256), (192, 128)]


@pytest.mark.parametrize("headdims", sample(HEADDIMS, (16, 16), (40, 72), (256, 256)), ids=str)
def test_head_dims(headdims, product):
    checked(normal_call([40], [70], Heads(2, 1, *headdims)), causal=True)


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_output_dtypes(out_dtype):
    out, lse = checked(normal_call([33], [70]), out_dtype=out_dtype)
    assert out.dtype == out_dtype and out.shape == (1, 33, 2, 64) and lse.dtype == FP32


TILES = [(16, 32), (32, 128), (128, 32), (64, 64), (128, 128)]


@pytest.mark.parametrize("tile", sample(TILES, (16, 32), (128, 32), (64, 64)), ids=str)
@pytest.mark.parametrize("name", ["causal", "causal-window"])
def test_every_tile_shape_is_right(tile, name):
    with override(fp8_fwd=Config(*tile, 4, 1)):
        checked(normal_call([130, 130], [150, 97], Heads(1, 1, 32, 32)), **FEATURES[name])


PACKED = [((5, 0, 70, 33), (7, 4, 60, 50)), ((160, 30), (160, 300)), ((9, 20), (0, 30))]


@pytest.mark.parametrize("spare", sample([0, 5], 5))
@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_packed(lengths, spare, product):
    """Each sequence has scales and a mean of its own; what lies between them is NaN."""
    call = normal_call(
        *map(list, lengths), Heads(4, 2, 32, 48), packed=True, spare=spare, v_mean=True
    )
    assert (call.extras.seqused_q is not None) == bool(spare)
    out, lse = checked(call, causal=True)
    if spare:
        assert out[0, lengths[0][0]].eq(0).all() and lse[0, :, lengths[0][0]].eq(-math.inf).all()


def test_a_masked_row_is_zero(product):
    call = normal_call([60], [40], v_mean=True, mean=1.0)
    out, lse = checked(call, causal=True)
    assert out[:, :20].eq(0).all() and lse[:, :, :20].eq(-math.inf).all()


def test_a_window_that_begins_behind_the_keys(product):
    """Queries whose window has passed the last key, and blocks of nothing but masked pairs."""
    call = normal_call([200], [70], Heads(1, 1, 32, 32))
    out, _ = checked(call, window=(10, 0), causal="top_left")
    assert out[:, 80:].eq(0).all()


def test_strides(product):
    """Heads before rows, and rows apart; V^T is contiguous by contract."""
    call = normal_call([40, 40], [70, 70])
    expected = checked(call, causal=True)
    x = call.quantized
    q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k))
    wide = torch.empty(2, 70, 3, 100).to(k.dtype)
    wide[:, :, :2, :64] = k
    scales = (s.t().contiguous().t() for s in x.scales)
    moved = x._replace(q=q, k=wide[:, :, :2, :64], scales=x.scales._make(scales))
    found = checked(call._replace(quantized=moved), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    one = x._replace(scales=x.scales._make(s[:1, :1].expand(2, 2) for s in x.scales))
    exact = tuple(t.double() * s[0, 0].double() for t, s in zip((x.q, x.k, call.v), x.scales))
    checked(call._replace(quantized=one, exact=exact), causal=True)


@pytest.mark.parametrize("keys", sample([1024, 4096], 1024))
def test_an_error_that_does_not_grow_with_a_mean_of_v(keys):
    with override(fp8_fwd=Config(128, 128, 4, 1)):
        checked(normal_call([128], [keys], Heads(1, 1), mean=1.0), MEAN_1)
        call = normal_call([128], [keys], Heads(1, 1), mean=1.0, v_mean=True)
        checked(call, MEAN_1 / 2)


def test_a_sink_comes_last():
    """A first key 12 above the others; with keys upwards 1.3e-1."""
    with override(fp8_fwd=Config(128, 64, 4, 1)):
        checked(normal_call([128], [4096], Heads(1, 1), sink=12.0), SINK, causal=True)


def test_a_sink_comes_last_in_a_window():
    """For the rows that still see it."""
    call, seeing = normal_call([64], [4096], Heads(1, 1), sink=12.0), 33
    options = dict(causal=True, window=(4096 - 64 + seeing - 1, 0))
    with override(fp8_fwd=Config(64, 64, 4, 1)):
        out, _ = checked(call, 1.0, **options)
    exact, _ = reference(call, **options)
    norms = exact[0].flatten(1).norm(dim=1)
    assert norms[:seeing].max() < 0.1 * norms[seeing:].min()
    assert error_of(out[:, :seeing], exact[:, :seeing]) < SINK


def test_small_probabilities_beside_a_large_one():
    """In one block: 2^-9 of the largest, which e4m3 has no normal number for without 2^8."""
    checked(normal_call([64], [64], Heads(1, 1), sink=6.0))


def test_repeats_are_bitwise():
    call = normal_call([90], [150], v_mean=True)
    first, second = checked(call, causal=True), checked(call, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_scores_of_100(product):
    """Nothing overflows: the largest P is 2^8."""
    call = normal_call([40], [70])
    scale = call.quantized.scales.q * 30
    x = call.quantized._replace(scales=call.quantized.scales._replace(q=scale))
    q, k, v = call.exact
    checked(call._replace(quantized=x, exact=(q * 30, k, v)), causal=True)


def of(dtype=torch.float8_e4m3fn, headdim=64, extras=NO_EXTRAS, dropout_p=0.0, mods_used=NO_MODS):
    q = torch.empty(1, 40, 2, headdim).to(dtype)
    scalars = Scalars(1.0, dropout_p=dropout_p)
    return describe(q, q, q, extras, scalars, "bottom_right", False, mods_used)


def test_refusals():
    mask = modifiers_of(
        mods.causal() & mods.document(torch.zeros(40, dtype=torch.int32)),
        None,
        None,
        (1, 2, 40, 40),
    )
    score = modifiers_of(None, lambda s, b, h, i, j: s * 2, None, (1, 2, 40, 40))
    assert "use_interpreter" in portable.supports_fp8(of(), CPU, BF16)
    with use_interpreter():
        assert portable.supports_fp8(of(), CPU, BF16) is None
        refused = {
            "float8_e5m2": (of(torch.float8_e5m2), BF16),
            "torch.float64": (of(), torch.float64),
            "a bias": (of(extras=Extras(bias=torch.zeros(1, 1, 40, 40))), BF16),
            "dropout": (of(dropout_p=0.1), BF16),
            "headdim 272": (of(headdim=272), BF16),
            "a mask function": (of(mods_used=mask.mods), BF16),
            "a score function": (of(mods_used=score.mods), BF16),
        }
        for word, (problem, out_dtype) in refused.items():
            assert word in portable.supports_fp8(problem, CPU, out_dtype)
    assert "xpu" in portable.supports_fp8(of(), torch.device("xpu"), BF16)


@pytest.mark.parametrize(
    ("arch", "has_product"),
    [("sm80", False), ("sm86", False), ("sm89", True), ("sm90", True), ("sm100", True)]
    + [("sm120", True), ("gfx90a", False), ("gfx942", False), ("gfx950", True)],
)
def test_which_gpus_multiply_e4m3(arch, has_product):
    assert fp8_launch.has_product(arch) == has_product
