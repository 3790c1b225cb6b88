"""mask_mod, block_mask, score_mod, bias and dropout through `tilewise.attention`."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import mods, scores
from tilewise.frontend.call import check_order
from tilewise.sparse import BlockMask, create_block_mask
from tilewise.testing import use_interpreter

STARTS = torch.tensor([0, 40, 40, 117], dtype=torch.int32)
RNG = torch.tensor([11, 7])


def qkv(seqlen_q=70, seqlen_k=90, nheads=4, nheads_k=2, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen_q, nheads, 16, dtype=dtype)
    k, v = torch.randn(2, batch, seqlen_k, nheads_k, 16, dtype=dtype)
    return q, k, v


def check(q, k, v, **asked):
    """Values and gradients against fp64."""

    def run(attend, dtype, **how):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, **asked, **how)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return out, *torch.autograd.grad(out, leaves, dout)

    for backend in ("cpu", "portable"):
        with use_interpreter():
            got = run(tilewise.attention, torch.float32, backend=backend)
        for a, b in zip(got, run(tilewise.attention_reference, torch.float64)):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


PACKED = {
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + b) % 3 != kv_idx % 3),
    "score": dict(score_mod=lambda s, b, h, q_idx, kv_idx: s + 0.1 * b * (kv_idx - q_idx)),
    "dropout": dict(dropout_p=0.3, dropout_rng=RNG, causal=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_count_from_their_own_start(name):
    q, k, v = (x[0] for x in qkv(117, 117, batch=1))
    check(q, k, v, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, **PACKED[name])


@pytest.mark.parametrize("name", PACKED)
def test_packed_or_padded_is_the_same(name):
    """The second sequence is empty; the rows of the batch are the same three."""
    q, k, v = qkv(117, 117, 2, 2, 1)
    packed = tilewise.attention(
        *(x[0] for x in (q, k, v)), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, **PACKED[name]
    )
    rows = [x.new_zeros(3, 77, 2, 16) for x in (q, k, v)]
    for row, x in zip(rows, (q, k, v)):
        row[0, :40], row[2] = x[0, :40], x[0, 40:]
    asked = dict(PACKED[name], causal="top_left" if "causal" in PACKED[name] else False)
    padded = tilewise.attention(
        *rows, seqused_k=torch.tensor([40, 0, 77], dtype=torch.int32), **asked
    )
    torch.testing.assert_close(packed[:40], padded[0, :40])
    torch.testing.assert_close(packed[40:], padded[2])


def causal_documents(seqlen):
    documents = torch.arange(seqlen).div(37, rounding_mode="floor").int()
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])


FLEX = {  # in the manner of attention-gym
    "causal": lambda n: lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "sliding window": lambda n: (
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= 13) & (q_idx >= kv_idx)
    ),
    "prefix": lambda n: lambda b, h, q_idx, kv_idx: (kv_idx < 20) | (q_idx >= kv_idx),
    "documents": causal_documents,
    "dilated": lambda n: lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) % 4 == 0,
    "transfusion": lambda n: (
        lambda b, h, q_idx, kv_idx: (
            (q_idx >= kv_idx) | ((q_idx >= 30) & (q_idx < 60) & (kv_idx >= 30) & (kv_idx < 60))
        )
    ),
    "stand alone": lambda n: (
        lambda b, h, q_idx, kv_idx: (
            (abs(q_idx // 8 - kv_idx // 8) <= 2) & (abs(q_idx % 8 - kv_idx % 8) <= 2)
        )
    ),
}


EAGER = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@EAGER
@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("by_blocks", [False, True])
def test_masks_of_flex_attention_give_what_it_gives(name, by_blocks):
    q, k, v = qkv(96, 96, 2, 2)
    predicate = FLEX[name](96)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    blocks = flex.create_block_mask(predicate, 2, 2, 96, 96, device="cpu", BLOCK_SIZE=32)
    theirs = flex.flex_attention(*heads_first, block_mask=blocks).transpose(1, 2)
    how = {"mask_mod": predicate}
    if by_blocks:
        how = {"block_mask": BlockMask.from_flex(blocks)}
    torch.testing.assert_close(tilewise.attention(q, k, v, **how), theirs)


SCORES = {
    "alibi": lambda s, b, h, q_idx, kv_idx: s + (kv_idx - q_idx) * torch.exp2(-(h + 1) * 2.0),
    "softcap": lambda s, b, h, q_idx, kv_idx: 5 * torch.tanh(s / 5),
    "masked": lambda s, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, s, -float("inf")),
    "checkered": lambda s, b, h, q_idx, kv_idx: torch.where((kv_idx - q_idx) % 2 == 0, s, -s),
}


@EAGER
@pytest.mark.parametrize("name", SCORES)
def test_scores_of_flex_attention_give_what_it_gives(name):
    q, k, v = qkv(96, 96, 2, 2)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = flex.flex_attention(*heads_first, score_mod=SCORES[name]).transpose(1, 2)
    torch.testing.assert_close(tilewise.attention(q, k, v, score_mod=SCORES[name]), theirs)


def test_what_a_block_mask_skips_is_never_read():
    q, k, v = qkv(256, 256, 2, 2, 1)
    k[:, 64:128], v[:, 64:128] = float("nan"), float("nan")
    mask = create_block_mask(lambda b, h, q, kv: (kv < 64) | (kv >= 128), 1, 1, 256, 256)
    blocks = create_block_mask(mask.mask, 1, 1, 256, 256, block=(64, 64))
    with use_interpreter():
        out = tilewise.attention(q, k, v, block_mask=blocks, backend="portable")
    assert out.isfinite().all()


def test_one_graph_with_every_modifier():
    """Masks are made outside: what is traced once compiles once."""
    mask, score = mods.mask(FLEX["prefix"](0)), scores.score(SCORES["softcap"])
    blocks = create_block_mask(mask, 2, 4, 96, 96, block=(32, 32))
    bias = torch.randn(1, 4, 96, 1)

    def attend(q, k, v, bias):
        one = tilewise.attention(q, k, v, mask_mod=mask, score_mod=score, bias=bias)
        return one + tilewise.attention(q, k, v, block_mask=blocks)

    inputs = [x.requires_grad_() for x in (*qkv(96, 96), bias)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got, want = compiled(*inputs), attend(*inputs)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.sum(), inputs) for out in (got, want)]
    torch.testing.assert_close(*grads)


def test_dropout_follows_torchs_generator():
    q, k, v = qkv()
    torch.manual_seed(5)
    first, second = (tilewise.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, tilewise.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)
    pinned = [tilewise.attention(q, k, v, dropout_p=0.5, dropout_rng=RNG) for _ in range(2)]
    assert torch.equal(*pinned)


def test_a_checkpoint_draws_the_same_dropout_again():
    q, k, v = (x.requires_grad_() for x in qkv())

    def attend(q, k, v):
        return tilewise.attention(q, k, v, dropout_p=0.5)

    grads = []
    for call in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(call(q, k, v).sum(), (q, k, v)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_dropout_keeps_the_mean():
    q, k, v = qkv(40, 200)
    v = torch.ones_like(v)
    draws = [tilewise.attention(q, k, v, dropout_p=0.25) for _ in range(40)]
    mean = torch.stack(draws).mean()
    assert abs(mean - 1) < 0.01  # 5 sigma: 40 * 560 rows of about 60 keys in effect


@pytest.mark.parametrize("shape", [(2, 4, 70, 90), (1, 1, 70, 1)])
def test_a_bias_that_needs_no_gradient_gets_none(shape):
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.randn(shape)
    tilewise.attention(q, k, v, bias=bias).sum().backward()
    assert bias.grad is None and q.grad is not None


def test_an_expanded_bias_gets_a_whole_gradient():
    q, k, v = qkv()
    bias = torch.randn(1, 1, 1, 90, requires_grad=True)
    for given in (bias, bias.expand(2, 4, 70, 90)):
        out = tilewise.attention(q, k, v, bias=given)
        (grad,) = torch.autograd.grad(out.square().sum(), bias)
        want = tilewise.attention_reference(q, k, v, bias=given)
        (expected,) = torch.autograd.grad(want.square().sum(), bias)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def blocks_of(*shape):
    return create_block_mask(mods.causal(), *shape)


WRONG = {
    "a number for a mask": (dict(mask_mod=3), "mask_mod is an int"),
    "a mask that asks for truth": (
        dict(mask_mod=lambda b, h, q, kv: q > kv and q > 3),
        "the truth of",
    ),
    "a short captured tensor": (
        dict(mask_mod=mods.document(torch.zeros(80, dtype=torch.int32))),
        "seqlen_k is 90",
    ),
    "a tensor for a block mask": (dict(block_mask=torch.ones(2)), "block_mask is a Tensor"),
    "two masks": (
        dict(mask_mod=mods.causal(), block_mask=blocks_of(1, 1, 70, 90)),
        "mask_mod with block_mask",
    ),
    "a block mask of other lengths": (
        dict(block_mask=blocks_of(1, 1, 70, 91)),
        "block_mask has .* and the call has",
    ),
    "a block mask beside a band": (
        dict(block_mask=blocks_of(1, 1, 70, 90), causal=True),
        "causal and window do not combine",
    ),
    "a bias of another shape": (dict(bias=torch.randn(2, 4, 70, 89)), "bias has shape"),
    "a bias of another rank": (dict(bias=torch.randn(70, 90)), "bias has shape"),
    "a bias of another dtype": (dict(bias=torch.ones(1, 1, 1, 1).int()), "bias.dtype is"),
    "all dropped": (dict(dropout_p=1.0), "dropout_p=1.0"),
    "less than none dropped": (dict(dropout_p=-0.1), "dropout_p=-0.1"),
    "a rng of another dtype": (
        dict(dropout_p=0.1, dropout_rng=torch.ones(2)),
        "dropout_rng.dtype is",
    ),
    "a rng of another shape": (
        dict(dropout_p=0.1, dropout_rng=torch.ones(3).long()),
        "dropout_rng has shape",
    ),
    "a score function of too few": (dict(score_mod=lambda s, b, h: s), "score"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("attend", [tilewise.attention, tilewise.attention_reference])
def test_what_is_wrong_is_named(name, attend):
    asked, claim = WRONG[name]
    with pytest.raises(tilewise.ArgumentError, match=claim):
        attend(*qkv(), **asked)


def test_gradients_in_any_order_are_none_for_deterministic_calls():
    """On a GPU, for which a tensor without memory stands here."""
    table = torch.randn(4, requires_grad=True, device="meta")
    with pytest.raises(NotImplementedError, match="pass the tensor as bias"):
        check_order((table,))
    with torch.no_grad():
        check_order((table,))
    check_order((torch.randn(4, requires_grad=True),))


def flipped(attend):
    """A function of (q, k, v) whose dimensions are in FlexAttention's order."""
    return lambda q, k, v, **x: attend(*(y.transpose(1, 2) for y in (q, k, v)), **x)


def mask_of(x):
    return lambda b, h, q_idx, kv_idx: (x[kv_idx] > -1) | (q_idx == kv_idx)


MASKED = {
    "mask_mod": lambda *x, mask: tilewise.attention(*x, mask_mod=mask),
    "both": lambda *x, mask: tilewise.attention(
        *x, mask_mod=mask, score_mod=lambda s, b, h, i, j: s * 2
    ),
    "block mask": lambda *x, mask: tilewise.attention(
        *x, block_mask=create_block_mask(mask, None, None, 70, 90)
    ),
    "reference": lambda *x, mask: tilewise.attention_reference(*x, mask_mod=mask),
    "flex": lambda *x, mask: flipped(tilewise.flex_attention)(
        *x, enable_gqa=True, block_mask=flex.create_block_mask(mask, None, None, 70, 90, "cpu")
    ),
    "portable": lambda *x, mask: tilewise.attention(*x, mask_mod=mask, backend="portable"),
}


@pytest.mark.parametrize("name", MASKED)
def test_what_a_mask_captures_gets_no_gradient(name):
    """It may require one, as an activation does, and changes no other gradient."""
    gate, results = torch.randn(90), []
    for requires_grad in (False, True, True):  # and a known call
        leaf = gate.clone().requires_grad_(requires_grad)
        kept = leaf * 2  # on the way to it, as an activation is
        leaves = [x.requires_grad_() for x in qkv()]
        with use_interpreter():
            out = MASKED[name](*leaves, mask=mask_of(kept))
            grads = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
            if requires_grad:
                loss = out.sum() + leaf.sum()
                assert torch.autograd.grad(loss, leaf)[0].eq(1).all()
        results.append((out, *grads))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


def test_what_the_mask_of_a_cache_captures_may_require_a_gradient():
    q, k, v = qkv(4, 90)
    gate, table = torch.randn(90, requires_grad=True), torch.tensor([[0], [1]], dtype=torch.int32)
    masks = (lambda b, h, i, j, x=x: x[j] > 0 for x in (gate, gate.detach()))
    outs = [tilewise.attention(q, k, v, page_table=table, mask_mod=mask) for mask in masks]
    assert torch.equal(*outs) and not outs[0].requires_grad


def test_packed_sequences_take_no_bias_and_no_block_mask():
    q, k, v = (x[0] for x in qkv(117, 117, batch=1))
    lengths = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
    with pytest.raises(tilewise.ArgumentError, match="bias does not support packed"):
        tilewise.attention(q, k, v, bias=torch.zeros(1, 1, 1, 1), **lengths)
    with pytest.raises(tilewise.ArgumentError, match="block_mask does not support packed"):
        tilewise.attention(q, k, v, block_mask=blocks_of(1, 1, 117, 117), **lengths)
