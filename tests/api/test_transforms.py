"""functorch and autograd: every transform equals its loop or formula, or is refused by name."""

from functools import partial

import pytest
import torch
from helpers.tiers import sample
from torch.autograd import forward_ad, gradcheck
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacrev, jvp, vmap

import tilewise
from tilewise.mods import document
from tilewise.ops import attention as ops
from tilewise.sparse import create_block_mask

SIZE, BATCH, SEQLEN = 3, 2, 7
FP8 = torch.float8_e4m3fn


def test_a_loop_says_so_once(monkeypatch):
    monkeypatch.setattr(tilewise.errors, "_said", set())
    tensors = qkv(SIZE)
    with pytest.warns(tilewise.PerformanceWarning, match="one by one") as said:
        vmap(grad(loss))(*tensors)
        vmap(grad(loss))(*tensors)
    assert len(said) == 1


def qkv(*mapped):
    return [torch.randn(*mapped, BATCH, SEQLEN, heads, 16) for heads in (4, 2, 2)]


def loss(q, k, v, sinks=None, slopes=None, used=None):
    out, lse = tilewise.attention(
        q,
        k,
        v,
        causal=True,
        window=(4, None),
        sinks=sinks,
        alibi_slopes=slopes,
        seqused_k=used,
        return_lse=True,
    )
    return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()


def looped(function, in_dims, tensors):
    """What vmap has to equal."""
    calls = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims)))
        for i in range(SIZE)
    ]
    return tuple(torch.stack(parts) for parts in zip(*calls))


def test_func_grad_is_autograd():
    tensors = [x.requires_grad_() for x in (*qkv(), torch.randn(4))]
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = grad(loss, (0, 1, 2, 3))(*(x.detach() for x in tensors))
    torch.testing.assert_close(got, want)


EXTRAS = {
    "none": {},
    "sinks": {"sinks": torch.randn(SIZE, 4)},
    "slopes by head": {"alibi_slopes": torch.rand(SIZE, 4)},
    "slopes by batch": {"alibi_slopes": torch.rand(SIZE, BATCH, 4)},
    "seqused_k": {"seqused_k": torch.tensor([[3, 7], [0, 2], [7, 5]], dtype=torch.int32)},
}
EXTRAS["all"] = EXTRAS["sinks"] | EXTRAS["slopes by batch"] | EXTRAS["seqused_k"]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["shared", "mapped"])
@pytest.mark.parametrize("name", EXTRAS)
def test_vmap(name, is_mapped, needs_grad):
    """With extras that each mapped call has its own of, or that all share."""
    extras = {x: e if is_mapped else e[0] for x, e in EXTRAS[name].items()}
    tensors = [x.requires_grad_(needs_grad) for x in qkv(SIZE)] + [*extras.values()]

    def attend(q, k, v, *given):
        named = dict(zip(extras, given))
        return tilewise.attention(q, k, v, causal=True, return_lse=True, **named)

    in_dims = (0, 0, 0, *(0 if is_mapped else None for _ in extras))
    got = vmap(attend, in_dims)(*tensors)
    want = looped(attend, in_dims, tensors)
    torch.testing.assert_close(got, want)
    if needs_grad:
        grads = [
            torch.autograd.grad(out.square().sum(), tensors[:3], retain_graph=True)
            for out in (got[0], want[0])
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "in_dims",
    [(0, None, None), (None, 0, None), (None, None, 2), (1, 4, 3), (None, 3, 0)],
    ids=str,
)
def test_vmap_of_some_in_any_dimension(in_dims):
    tensors = [x if d is None else x.movedim(0, d) for x, d in zip(_mapped(in_dims), in_dims)]

    def attend(q, k, v):
        q, k, v = (x.contiguous() for x in (q, k, v))
        return tilewise.attention(q, k, v, return_lse=True)

    torch.testing.assert_close(vmap(attend, in_dims)(*tensors), looped(attend, in_dims, tensors))


@pytest.mark.parametrize("via", ["eager", "operator"])
@pytest.mark.parametrize("index", ["b", "h"])
def test_vmap_of_functions_that_tell_rows_or_heads_apart(index, via, monkeypatch):
    """A mapped call counts its batch from 0, as a call by itself does."""
    if via == "operator":
        monkeypatch.setattr(ops, "needs_dispatcher", lambda *_, **named: True)
        monkeypatch.setattr(ops, "_is_transformed", lambda: False)
    tensors = qkv(SIZE)

    def attend(q, k, v):
        mask = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 2 * {"b": b, "h": h}[index]  # noqa: E731
        score = lambda s, b, h, q_idx, kv_idx: s * ({"b": b, "h": h}[index] + 1)  # noqa: E731
        return tilewise.attention(q, k, v, mask_mod=mask, score_mod=score, return_lse=True)

    got = vmap(attend)(*tensors)
    monkeypatch.undo()
    torch.testing.assert_close(got, looped(attend, (0, 0, 0), tensors))


def _mapped(in_dims):
    shared, mapped = qkv(), qkv(SIZE)
    return [shared[i] if dim is None else mapped[i] for i, dim in enumerate(in_dims)]


def test_vmap_of_vmap():
    tensors = qkv(2, SIZE)
    want = torch.stack([vmap(tilewise.attention)(*x) for x in zip(*tensors)])
    torch.testing.assert_close(vmap(vmap(tilewise.attention))(*tensors), want)


@pytest.mark.parametrize("sinks_dim", [None, 0], ids=["shared sinks", "mapped sinks"])
def test_vmap_of_grad(sinks_dim):
    """Per-sample gradients, those of sinks that the samples share among them."""
    in_dims = (0, 0, 0, sinks_dim)
    tensors = [*qkv(SIZE), torch.randn(4) if sinks_dim is None else torch.randn(SIZE, 4)]
    each = grad(loss, (0, 1, 2, 3))
    got = vmap(each, in_dims)(*tensors)
    torch.testing.assert_close(got, looped(each, in_dims, tensors))


def test_grad_of_vmap():
    tensors = [*qkv(SIZE), torch.randn(SIZE, 4)]
    got = grad(lambda *t: vmap(loss)(*t).sum(), (0, 1, 2, 3))(*tensors)
    want = grad(lambda *t: sum(loss(*x) for x in zip(*t)), (0, 1, 2, 3))(*tensors)
    torch.testing.assert_close(got, want)


def test_vmap_of_grad_of_what_a_score_function_captured():
    q, k, v = qkv()

    def temperature(q, t):
        return tilewise.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * t[h]).square().sum()

    slopes = torch.randn(SIZE, 4)
    got = vmap(grad(temperature, (0, 1)), (None, 0))(q, slopes)
    want = looped(grad(temperature, (0, 1)), (None, 0), (q, slopes))
    torch.testing.assert_close(got, want)
    temperatures = partial(temperature, q)
    torch.testing.assert_close(jacrev(temperatures)(slopes[0]), jacobian(temperatures, slopes[0]))


def test_a_block_mask_of_mapped_documents_is_refused_by_name():
    q, k, v = qkv()
    documents = torch.randint(0, 2, (SIZE, SEQLEN), dtype=torch.int32)

    def by_blocks(ids):
        blocks = create_block_mask(document(ids), 1, 1, SEQLEN, SEQLEN)
        return tilewise.attention(q, k, v, block_mask=blocks)

    with pytest.raises(NotImplementedError, match=r"inside torch\.vmap: .*mask_mod"):
        vmap(by_blocks)(documents)
    got = vmap(lambda ids: tilewise.attention(q, k, v, mask_mod=document(ids)))(documents)
    torch.testing.assert_close(got, torch.stack([by_blocks(ids) for ids in documents]))


NOTHING = {
    "one launch": lambda q: tilewise.attention(q, q, q),
    "gradient": grad(lambda q: tilewise.attention(q, q, q).sum()),
    "captured": grad(
        lambda q: tilewise.attention(q, q, q, score_mod=lambda s, *_: s * q[0, 0, 0, 0]).sum()
    ),
    "bias": lambda q: tilewise.attention(q, q, q, bias=q[:, None, :, :1, 0]),
    "FP8": lambda q: tilewise.attention(q.to(FP8), q.to(FP8), q.to(FP8)),
    "cache": lambda q: tilewise.attention(q, q, q, split_size=4),
}


@pytest.mark.parametrize("name", NOTHING)
def test_vmap_over_no_calls(name):
    q = torch.randn(0, BATCH, 1 if name == "bias" else SEQLEN, 4, 16)
    assert vmap(NOTHING[name])(q).shape == q.shape


def test_vmap_of_fp8():
    tensors = qkv(SIZE)
    packed = [x.flatten(1, 2) for x in tensors]
    starts = torch.tensor([0, 5, BATCH * SEQLEN], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)

    def in_a_record(q, k, v):
        quantized = tilewise.quantize(q, k, v, **lengths)
        return tilewise.attention(quantized, causal=True, return_lse=True, **lengths)

    def as_tensors(*eight_bits):
        return tilewise.attention(*eight_bits, causal=True, return_lse=True)

    eight_bits = [x.to(FP8) for x in tensors]
    for attend, mapped in (in_a_record, packed), (as_tensors, eight_bits):
        got, want = vmap(attend)(*mapped), looped(attend, (0, 0, 0), mapped)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want))
    refused = pytest.raises(NotImplementedError, match=r"bf16.*torch\.func.*call it eagerly")
    with refused:
        grad(lambda q: tilewise.attention(tilewise.quantize(q, q, q), backward="bf16").sum())(
            tensors[0][0]
        )


COMPILED = {
    "plain": lambda q: tilewise.attention(q, q, q),
    "flex": lambda q: tilewise.flex_attention(q, q, q),  # which Dynamo traces, and leaves
}


@pytest.mark.filterwarnings("ignore")  # torch's, of its own tracing
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("order", ["grad", "vmap of grad", "grad of vmap"])
def test_a_gradient_inside_a_compiled_function(order, name):
    attend, x = COMPILED[name], torch.randn(2, 1, 5, 2, 8)

    def square(q):
        return attend(q).square().sum()

    transformed = {
        "grad": lambda x: grad(square)(x[0]),
        "vmap of grad": lambda x: vmap(grad(square))(x),
        "grad of vmap": lambda x: grad(lambda x: vmap(attend)(x).square().sum())(x),
    }[order]
    is_traced = name != "flex"
    again = torch.compile(transformed, backend="aot_eager", fullgraph=is_traced)
    torch.testing.assert_close(again(x), transformed(x))


@pytest.mark.parametrize("part", [0, 1], ids=["out", "lse"])
def test_jacrev_is_the_jacobian(part):
    q, k, v = (x[:1, :3, :1, :4].contiguous() for x in qkv())

    def attend(q, function=tilewise.attention):
        return function(q, k, v, return_lse=True)[part]

    want = torch.autograd.functional.jacobian(lambda q: attend(q, tilewise.attention_reference), q)
    torch.testing.assert_close(jacrev(attend)(q), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func's own
def test_forward_mode_is_refused_by_name():
    q, k, v = qkv()
    refused = pytest.raises(NotImplementedError, match=r"attention has no forward-mode.*reference")
    with refused:
        jvp(lambda q: tilewise.attention(q, k, v), (q,), (q,))
    with refused, forward_ad.dual_level():
        tilewise.attention(forward_ad.make_dual(q, q), k, v)
    with refused:
        hessian(loss)(q, k, v)


def test_a_dual_level_without_duals_changes_nothing():
    tensors = qkv()
    with forward_ad.dual_level():
        got = tilewise.attention(*tensors)
    torch.testing.assert_close(got, tilewise.attention(*tensors), rtol=0, atol=0)


def test_torchs_old_vmap_is_refused_by_name():
    """torch.func has another one, which is served."""
    q = qkv()[0]
    with pytest.raises(NotImplementedError, match=r"vectorize=True.*torch\.func\.jacrev"):
        jacobian(lambda q: tilewise.attention(q, q, q), q, vectorize=True)


def test_a_second_derivative_is_refused_by_name():
    q, k, v = (x.requires_grad_() for x in qkv())
    refused = pytest.raises(NotImplementedError, match=r"attention is differentiable once.*refer")
    (first,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
    with refused:
        torch.autograd.grad(first.sum(), q)
    (first,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
    with refused:  # a gradient penalty
        first.square().sum().backward()
    with refused:
        grad(lambda q: grad(loss)(q, k, v).sum())(q)


def test_create_graph_alone_gives_the_same_gradients():
    tensors = [x.requires_grad_() for x in qkv()]
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(loss(*tensors), tensors, create_graph=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "scale": {"scale": 0.7},
    "seqused_k": {"seqused_k": torch.tensor([4, 2], dtype=torch.int32)},
    "heads first": {"layout": "bhsd"},
}
FEATURES["all"] = {name: x for part in FEATURES.values() for name, x in part.items()}


@pytest.mark.parametrize("has_sinks", sample([False, True], True), ids=["", "sinks"])
@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck(name, has_sinks):
    """The derivative of out and lse against finite differences, in fp64."""
    features = FEATURES[name]
    shapes = [(2, 3, 2, 3), (2, 5, 1, 3), (2, 5, 1, 2)]
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    if features.get("layout") == "bhsd":
        tensors = [x.transpose(1, 2) for x in tensors]
    if has_sinks:
        tensors.append(torch.randn(2, dtype=torch.float64))

    def attend(q, k, v, sinks=None):
        return tilewise.attention(q, k, v, sinks=sinks, return_lse=True, **features)

    rows = attend(*tensors)[1].isfinite()
    assert rows.any()

    def finite(*tensors):
        out, lse = attend(*tensors)
        return out, lse[rows]

    assert gradcheck(finite, [x.requires_grad_() for x in tensors])
