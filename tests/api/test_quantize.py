"""`tilewise.quantize`: what 8 bits stand for, what is not read, what does not leak."""

import functools
import itertools

import pytest
import torch
from helpers import fp8_calls
from helpers.fp8_calls import assert_same, bits
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import ArgumentError
from tilewise.kernels.common.quantized import FP8, KEY_ORDER, Lengths, Quantized
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.hadamard import rotate, rotate_back
from tilewise.ops.fp8 import meant
from tilewise.problem import Extras

INT32 = torch.int32
tensors = functools.partial(fp8_calls.tensors, k_mean=2)


def relative(x, exact):
    return ((x - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("headdim", [1, 16, 80, 96, 128, 256])
def test_the_rotation_is_orthogonal_and_has_an_inverse(headdim):
    x, y = torch.randn(2, 5, headdim)
    torch.testing.assert_close(rotate_back(rotate(x)), x)
    torch.testing.assert_close(rotate(x) @ rotate(y).mT, x @ y.mT, rtol=1e-4, atol=1e-4)


def test_what_channels_share_is_spread_evenly():
    assert rotate(torch.ones(128)).abs().max() < 1.5
    one = torch.zeros(128)
    one[5] = 1
    torch.testing.assert_close(rotate(one).abs(), torch.full((128,), 128**-0.5))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("smooth", [False, True, "v"])
def test_it_stands_for_what_was_quantised(rotate, smooth):
    given = tensors()
    x = tilewise.quantize(*given, rotate=rotate, smooth=smooth)
    assert (x.k_mean is None) == (smooth is not True) and (x.v_mean is None) == (smooth is False)
    for mine, exact in zip(meant(x, rotate, Extras()), given):
        assert relative(mine, exact) < 0.03
    for codes, scale in ((x.q, x.scales.q), (x.k, x.scales.k)):
        assert codes.dtype == FP8 and scale.shape == (2, 2) and scale.is_contiguous()
        largest = codes.float().abs().unflatten(2, (2, -1)).amax((1, 3, 4))
        assert (largest == 448).all()


def test_the_order_of_keys_in_v_t():
    v = torch.arange(150).remainder(60).float().view(1, 150, 1, 1).to(FP8)
    v_t = plain.transposed_values(v, None, None)
    assert v_t.shape == (1, 1, 1, 256)
    row = v_t[0, 0, 0].float()
    for column in range(150 // 16 * 16):
        key = column // 16 * 16 + KEY_ORDER[column % 16]
        assert row[column] == v[0, key].float()
    assert (row[160:] == 0).all()
    assert torch.equal(bits(plain.natural_values(v_t, 150, None)), bits(v))


def test_packed_sequences_are_quantised_as_they_are_alone():
    queries, keys = [70, 0, 33], [150, 5, 40]
    parts = [tensors(1, m, n, seed=i) for i, (m, n) in enumerate(zip(queries, keys))]
    starts = [torch.tensor([0, *lengths], dtype=INT32).cumsum(0) for lengths in (queries, keys)]
    cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (x.to(INT32) for x in starts)))
    x = tilewise.quantize(*(torch.cat([p[i][0] for p in parts]) for i in range(3)), **cu)
    assert x.q.shape == (103, 4, 32) and x.v_t.shape == (2, 16, 128 * (195 // 128 + 3))
    assert x.scales.q.shape == (3, 2)
    natural = plain.natural_values(x.v_t[None], 195, cu["cu_seqlens_k"])[0].split(keys)
    for i, part in enumerate(parts):
        alone = tilewise.quantize(*part)
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(x.scales, name)[i], getattr(alone.scales, name)[0])
        assert torch.equal(bits(x.q.split(queries)[i]), bits(alone.q[0]))
        assert torch.equal(bits(x.k.split(keys)[i]), bits(alone.k[0]))
        of_alone = plain.natural_values(alone.v_t, keys[i], None)[0]
        assert torch.equal(bits(natural[i]), bits(of_alone))
        torch.testing.assert_close(x.v_mean[i], alone.v_mean[0], rtol=1e-6, atol=1e-6)


def test_rows_that_are_not_in_use_are_not_read():
    q, k, v = tensors()
    used = torch.tensor([90, 0], dtype=INT32)
    dirty = [x.clone() for x in (k, v)]
    for x in dirty:
        x[0, 90:], x[1] = torch.nan, torch.inf
    x = tilewise.quantize(q, *dirty, seqused_k=used)
    alone = tilewise.quantize(q[:1], k[:1, :90], v[:1, :90])
    assert torch.equal(x.scales.k[0], alone.scales.k[0])
    assert torch.equal(bits(x.v_t[0, ..., :128]), bits(alone.v_t[0]))
    assert (x.v_t[1].float() == 0).all() and (x.v_t[0, ..., 128:].float() == 0).all()
    assert all(t.isfinite().all() for t in (*x.scales, x.k_mean, x.v_mean, x.k.float()))


def test_queries_that_are_not_in_use_are_not_read():
    q, k, v = (x[0] for x in tensors(1))
    ends = dict(cu_seqlens_q=torch.tensor([0, 70]), cu_seqlens_k=torch.tensor([0, 150]))
    ends = {name: x.to(INT32) for name, x in ends.items()}
    q[50:] = torch.nan
    x = tilewise.quantize(q, k, v, **ends, seqused_q=torch.tensor([50], dtype=INT32))
    assert x.scales.q.isfinite().all() and x.q.float().isfinite().all()


def values_of(x, v, **lengths):
    """What 8 bits stand for, and v, of each sequence and of keys in use, in fp64."""
    cu, used = lengths.get("cu_seqlens_k"), lengths.get("seqused_k")
    found = plain.dequantize(
        x if cu is None else x._replace(q=x.q[None], k=x.k[None], v_t=x.v_t[None]),
        Lengths(lengths.get("cu_seqlens_q"), cu, None, used),
    )[2]
    if cu is None:
        parts = [*zip(found, v)]
    else:
        ends = cu.tolist()
        parts = [(found[0, a:b], v[a:b]) for a, b in itertools.pairwise(ends)]
    counts = [len(part[1]) for part in parts] if used is None else used.tolist()
    return [tuple(y[:n].double() for y in part) for part, n in zip(parts, counts)]


@pytest.mark.parametrize("case", ["batch", "used", "packed", "given", "only v"])
def test_the_mean_over_keys_is_that_of_v(case):
    """What rounding loses is in v_mean: sums over many keys do not gather it."""
    q, k, v = tensors(seqlen_k=600, headdims=(32, 64))
    options, lengths = {}, {}
    if case == "used":
        lengths = dict(seqused_k=torch.tensor([300, 590], dtype=INT32))
    elif case == "packed":
        q, k, v = (x[0] for x in (q, k, v))
        ends = dict(cu_seqlens_q=[0, 20, 70], cu_seqlens_k=[0, 230, 600])
        lengths = {name: torch.tensor(x, dtype=INT32) for name, x in ends.items()}
    elif case == "given":
        options = dict(scales=(None, None, torch.tensor(0.02)))
    elif case == "only v":
        options = dict(smooth="v")
    x = tilewise.quantize(q, k, v, **options, **lengths)
    for found, exact in values_of(x, v, **lengths):
        torch.testing.assert_close(found.mean(0), exact.mean(0), rtol=0, atol=2e-6)


def test_without_means_nothing_is_added():
    assert tilewise.quantize(*tensors(), smooth=False).v_mean is None


def test_keys_of_small_values_limit_what_is_added():
    """A causal row that sees those alone is as close as without it."""
    q, k, v = tensors(1, 1024, 1024, headdims=(32, 64))
    v[:, :512] *= 0.01
    x = tilewise.quantize(q, k, v)
    without = x._replace(v_mean=v.double().mean(1).float())
    exact = tilewise.attention_reference(*(t.double() for t in (q, k, v)), causal=True)
    mine, plain_mean = (
        tilewise.attention(y, causal=True, out_dtype=torch.float32) for y in (x, without)
    )
    for rows in (slice(0, 128), slice(384, 512), slice(512, 1024)):
        off, before = (relative(y[:, rows], exact[:, rows]) for y in (mine, plain_mean))
        assert off < 1.05 * before


def drift_of(v, **options):
    """Of values (batch, keys, heads, headdim)."""
    q = torch.ones(v.shape[0], 1, v.shape[2], 16)
    return tilewise.quantize(q, torch.ones(*v.shape[:3], 16), v, **options).v_drift


@pytest.mark.parametrize("keys", [2000, 4096, 16384])
def test_sums_of_independent_values_drift_as_their_root(keys):
    v = torch.randn(1, keys, 1, 160, generator=torch.Generator().manual_seed(1)) + 3.0
    assert 1.1 < drift_of(v) / keys**0.5 < 1.6
    torch.testing.assert_close(drift_of(1e-3 * v), drift_of(v), rtol=1e-4, atol=0)


@pytest.mark.parametrize("off", [0.3, 1.0, 5.0])
def test_a_mean_of_half_of_the_keys_drifts_by_keys(off):
    """(1 + off^2)^(1/2) is the spread."""
    v = torch.randn(1, 8192, 1, 160, generator=torch.Generator().manual_seed(1))
    v[:, :4096] += off
    v[:, 4096:] -= off
    assert drift_of(v).item() == pytest.approx(4096 * off / (1 + off**2) ** 0.5, rel=0.1)
    # One channel that drifts counts as much as its sums are larger than others'
    v[..., 1:] = 0.5 * torch.randn(1, 8192, 1, 159, generator=torch.Generator().manual_seed(2))
    assert drift_of(v).item() > 0.8 * 4096 * off / (1 + off**2) ** 0.5


def test_what_drifts_most_counts():
    """Of heads and sequences, whatever is not in use."""
    v = torch.randn(2, 512, 2, 160, generator=torch.Generator().manual_seed(1))
    v[1, :256, 1] += 2.0
    each = [[drift_of(v[i : i + 1, :, h : h + 1]) for h in range(2)] for i in range(2)]
    assert drift_of(v) == each[1][1] and drift_of(v) > 3 * each[0][0]
    used = torch.tensor([512, 256], dtype=INT32)
    dirty = v.clone()
    dirty[1, 256:] = torch.nan
    assert drift_of(dirty, seqused_k=used) == max(*each[0], drift_of(v[1:, :256]))
    assert drift_of(torch.ones(1, 300, 1, 160)) == 0
    assert drift_of(v, smooth=False) is None
    assert drift_of(v[..., :128]) is None and drift_of(v[..., :129]) > 0  # of wide ones alone


def test_values_beyond_a_given_scale_saturate_and_leave_the_mean():
    q, k, v = tensors()
    v[0, 7] = 1e30
    x = tilewise.quantize(q, k, v, scales=(None, None, torch.tensor(1e-3)))
    assert x.v_mean.isfinite().all()


def test_many_short_sequences_take_no_memory_of_long_ones():
    """What is summed is of blocks, each of one sequence."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                largest = max(largest, found.numel())
            return found

    total, count, headdim = 65536, 1024, 4
    q, k, v = torch.randn(3, 1, total, 1, headdim).unbind(0)
    starts = torch.arange(0, total + 1, total // count, dtype=INT32)
    steps = plain.Steps(True, True, True)
    with Sizes():
        found = plain.quantize(q, k, v, steps, (None, None, None), Lengths(starts, starts))
    assert largest == found.v_t.numel()


def test_layouts():
    given = tensors()
    turned = (x.transpose(1, 2).contiguous() for x in given)
    assert_same(tilewise.quantize(*given), tilewise.quantize(*turned, layout="bhsd"))


def test_scales_that_are_given():
    q, k, v = tensors()
    x = tilewise.quantize(q, k, v, scales=(torch.tensor(0.02), torch.tensor([0.01, 0.03]), None))
    assert (x.scales.q == 0.02).all() and torch.equal(x.scales.k[1], torch.tensor([0.01, 0.03]))
    same = tilewise.quantize(q, k, v, scales=x.scales)
    assert_same(x, same)
    small = tilewise.quantize(q, k, v, scales=(None, None, torch.tensor(1e-4)))
    assert (small.v_t.float().abs().amax() == 448) and small.v_t.float().isfinite().all()


def test_static_scales_do_not_leak():
    """Later tokens change earlier outputs by rounding, unless nothing depends on them."""
    given = tensors(seqlen_q=150)
    later = [x.clone() for x in given]
    for x in later:
        x[:, 100:] *= 3
    static = dict(smooth=False, scales=[torch.tensor(0.03)] * 3)
    for options, leaks in ((static, False), ({}, True)):
        found = [
            tilewise.attention(tilewise.quantize(*x, **options), causal=True)[:, :100]
            for x in (given, later)
        ]
        assert torch.equal(*found) != leaks


def test_a_quantized_moves_through_torch():
    x = tilewise.quantize(*tensors())
    assert isinstance(x, Quantized) and x.source is None
    leaves, tree = torch.utils._pytree.tree_flatten(x)
    assert_same(torch.utils._pytree.tree_unflatten(leaves, tree), x)


def test_a_compiler_takes_it_apart():
    torch._dynamo.reset()
    given = tensors()
    compiled = torch.compile(tilewise.quantize, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*given), tilewise.quantize(*given))


def test_zeros_and_empty_tensors():
    q, k, v = tensors()
    x = tilewise.quantize(q, torch.zeros_like(k), torch.zeros_like(v))
    assert (x.k.float() == 0).all() and (tilewise.attention(x) == 0).all()
    none = tilewise.quantize(q, k[:, :0], v[:, :0])
    assert none.v_t.shape == (2, 2, 16, 0)
    out, lse = tilewise.attention(none, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(rotate="yes"), ArgumentError, "rotate='yes'"),
        (dict(smooth="k"), ArgumentError, "smooth='k'"),
        (dict(scales=torch.ones(3)), ArgumentError, "three"),
        (dict(scales=(torch.ones(5), None, None)), ArgumentError, "scales.q has shape"),
        (dict(scales=(None, torch.ones(()).double(), None)), ArgumentError, "scales.k.dtype"),
        (
            dict(scales=(None, None, torch.ones((), requires_grad=True))),
            NotImplementedError,
            "scales.v.requires_grad",
        ),
        (dict(layout="sbhd"), ArgumentError, "layout"),
        (dict(seqused_k=torch.tensor([1, 999], dtype=INT32)), ArgumentError, "seqused_k"),
    ],
)
def test_refusals(options, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(")):
        tilewise.quantize(*tensors(), **options)


def test_8_bits_are_not_quantised_again():
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match="dtype"):
        tilewise.quantize(*(x.to(FP8) for x in (q, k, v)))


def test_no_gradient_flows_into_the_codes():
    given = [x.requires_grad_() for x in tensors()]
    x = tilewise.quantize(*given)
    assert not x.q.requires_grad and x.source is not None
    with torch.no_grad():
        assert tilewise.quantize(*given).source is None
