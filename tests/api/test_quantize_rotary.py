"""`tilewise.quantize` with rotary tables: q and k are turned in fp32 before they are rounded."""

import functools

import pytest
import torch
from helpers import fp8_calls
from helpers.fp8_calls import assert_same, bits, starts

import tilewise
from tilewise import ArgumentError
from tilewise.cache import Rotary
from tilewise.tile.rotary import rotate

INT32 = torch.int32
CALL = torch.ops.tilewise.quantize.default
tensors = functools.partial(fp8_calls.tensors, k_mean=2)


def tables(positions=150, rotary_dim=32, interleaved=True, dtype=torch.float32):
    angles = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(0, rotary_dim, 2) / 32))
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_then_quantised(interleaved, rotary_dim, dtype):
    """Queries are the last of the keys, as under a causal mask; halves are not rounded between."""
    q, k, v = (x.to(dtype) for x in tensors())
    rotary = tables(160, rotary_dim, interleaved, dtype)
    turned = rotate(q.float(), rotary, torch.arange(80, 150))
    of_k = rotate(k.float(), rotary, torch.arange(150))
    expected = tilewise.quantize(turned, of_k, v.float())
    assert_same(tilewise.quantize(q, k, v, rotary=rotary), expected)


def test_scores_are_of_distances():
    """Attention of turned q and k, in the caller's order."""
    q, k, v = tensors()
    rotary = tables()
    x = tilewise.quantize(q, k, v, rotary=rotary)
    found, lse = tilewise.attention(x, causal=True, return_lse=True)
    turned = rotate(q, rotary, torch.arange(80, 150)), rotate(k, rotary, torch.arange(150))
    expected, of_lse = tilewise.attention_reference(
        *(t.double() for t in (*turned, v)), causal=True, return_lse=True
    )
    assert (found - expected).norm() < 3e-2 * expected.norm()
    assert (lse - of_lse).norm() < 1e-2 * of_lse.norm()


def test_more_queries_than_keys():
    """Those before the first key see none; they are at position 0."""
    q, k, v = tensors(seqlen_q=9, seqlen_k=5)
    rotary = tables(5)
    turned = rotate(q, rotary, torch.tensor([0, 0, 0, 0, 0, 1, 2, 3, 4]))
    expected = tilewise.quantize(turned, rotate(k, rotary, torch.arange(5)), v)
    assert_same(tilewise.quantize(q, k, v, rotary=rotary), expected)


@pytest.mark.parametrize("used", [None, ([7, 0, 30], [150, 5, 33])])
def test_positions_begin_again_in_each_sequence(used):
    queries, keys = [20, 0, 33], [150, 5, 40]
    parts = [tensors(1, m, n, seed=i) for i, (m, n) in enumerate(zip(queries, keys))]
    packed = [torch.cat([p[i][0] for p in parts]) for i in range(3)]
    cu = dict(cu_seqlens_q=starts(*queries), cu_seqlens_k=starts(*keys))
    ends = queries, keys
    if used is not None:
        ends = used
        cu |= dict(zip(("seqused_q", "seqused_k"), (torch.tensor(x, dtype=INT32) for x in used)))
    rotary = tables()
    x = tilewise.quantize(*packed, rotary=rotary, **cu)
    for i, (q, k, v) in enumerate(parts):
        m, n = ends[0][i], ends[1][i]
        alone = tilewise.quantize(q[:, :m], k[:, :n], v[:, :n], rotary=rotary)
        assert torch.equal(bits(x.q.split(queries)[i][:m]), bits(alone.q[0]))
        assert torch.equal(bits(x.k.split(keys)[i][:n]), bits(alone.k[0]))


def test_lengths_in_use_of_a_batch():
    """Queries are the last of the keys in use."""
    q, k, v = tensors(seqlen_q=10)
    used = torch.tensor([100, 12], dtype=INT32)
    k[0, 100:], k[1, 12:] = torch.nan, torch.nan
    v[0, 100:], v[1, 12:] = torch.nan, torch.nan
    rotary = tables(100)
    x = tilewise.quantize(q, k, v, rotary=rotary, seqused_k=used)
    for b, n in enumerate(used.tolist()):
        alone = tilewise.quantize(*(t[b : b + 1, :n] for t in (q, k, v)), rotary=rotary)
        assert torch.equal(bits(x.q[b]), bits(alone.q[0]))
        assert torch.equal(bits(x.k[b, :n]), bits(alone.k[0]))


def test_layouts():
    given = tensors()
    turned = (x.transpose(1, 2).contiguous() for x in given)
    rotary = tables()
    expected = tilewise.quantize(*given, rotary=rotary)
    assert_same(tilewise.quantize(*turned, rotary=rotary, layout="bhsd"), expected)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_turned_back(interleaved, is_packed):
    """Straight through: those of what was given, not of what was turned."""
    lengths = [30, 40]
    cu = dict(cu_seqlens_q=starts(*lengths), cu_seqlens_k=starts(*lengths)) if is_packed else {}
    given = [x[0] if is_packed else x for x in tensors(1, 70, 70, headdims=(32, 32))]
    given = [x.requires_grad_() for x in given]
    rotary = tables(70, 24, interleaved)
    x = tilewise.quantize(*given, rotary=rotary, **cu)
    weights = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1))
    (tilewise.attention(x, causal=True, backward="bf16", **cu) * weights).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in given]
    at = torch.cat([torch.arange(n) for n in (lengths if is_packed else [70])])
    turned = [rotate(t, rotary, at) for t in exact[:2]]
    out = tilewise.attention_reference(*turned, exact[2], causal=True, **cu)
    (out * weights).sum().backward()
    for mine, oracle in zip(given, exact):
        assert (mine.grad - oracle.grad).norm() < 0.08 * oracle.grad.norm()


def arguments(**options):
    q, k, v = tensors()
    rotary = tables()
    given = dict(cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None) | options
    scales = torch.rand(2, 2) + 0.01, None, None
    return (q, k, v, *scales, *given.values(), rotary.cos, rotary.sin, True, True, True, True)


def test_opcheck():
    torch.library.opcheck(CALL, arguments())
    torch.library.opcheck(CALL, arguments(seqused_k=torch.tensor([90, 0], dtype=INT32)))
    assert not CALL._schema.is_mutable


def test_the_operator_has_no_gradient():
    given = list(arguments())
    given[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        CALL(*given)[3].sum().backward()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("scales", [None, (torch.tensor(0.02), None, torch.rand(2) + 0.01)])
def test_one_graph(layout, scales):
    torch._dynamo.reset()
    rotary = tables()

    def step(q, k, v):
        options = dict(rotary=rotary, layout=layout, scales=scales, rotate=scales is not None)
        return tilewise.quantize(q, k, v, smooth=scales is None, **options)

    given = tensors()
    if layout == "bhsd":
        given = [x.transpose(1, 2).contiguous() for x in given]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*given), step(*given))


Q, K, V = tensors()
WRONG = {
    "a tuple": (dict(rotary=tuple(tables())), "rotary is a tuple: it must be a tilewise.cache.R"),
    "no tensor": (dict(rotary=Rotary(None, Q)), "rotary.cos"),
    "shape": (dict(rotary=tables(150, 34)), r"rotary.cos has shape \(150, 17\)"),
    "unlike": (
        dict(rotary=tables()._replace(sin=tables(150, 8).sin)),
        r"rotary.sin has shape \(150, 4\)",
    ),
    "dtype": (dict(rotary=tables(dtype=torch.int32)), "rotary.cos.dtype is torch.int32"),
    "device": (dict(rotary=Rotary(*(x.to("meta") for x in tables()[:2]))), "rotary.cos is on meta"),
    "pairing": (dict(rotary=tables()._replace(interleaved=2)), "rotary.interleaved=2"),
    "length": (dict(rotary=tables(149)), "rotary.cos has 149 positions and k has 150 keys"),
    "lengths in use": (
        dict(rotary=tables(99), seqused_k=torch.tensor([100, 3], dtype=INT32)),
        "rotary.cos has 99 positions and k has 100 keys",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    options, says = WRONG[name]
    with pytest.raises(ArgumentError, match=says):
        tilewise.quantize(Q, K, V, **options)


def test_tables_of_packed_sequences_are_long_enough():
    given = [x[0] for x in tensors(1, 60, 60)]
    cu = dict(cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(20, 40))
    tilewise.quantize(*given, rotary=tables(40), **cu)
    with pytest.raises(ArgumentError, match="rotary.cos has 39 positions and k has 40 keys"):
        tilewise.quantize(*given, rotary=tables(39), **cu)


def test_tables_that_are_none_are_refused_after_a_call_without_tables():
    tilewise.quantize(Q, K, V)
    with pytest.raises(ArgumentError, match="rotary.cos"):
        tilewise.quantize(Q, K, V, rotary=tilewise.cache.Rotary(None, None, None))


def test_tables_have_no_gradient():
    rotary = tables()
    rotary.sin.requires_grad_()
    with pytest.raises(NotImplementedError, match="rotary.sin.requires_grad"):
        tilewise.quantize(Q, K, V, rotary=rotary)
    with torch.no_grad():
        tilewise.quantize(Q, K, V, rotary=rotary)
