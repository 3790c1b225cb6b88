"""The attention function that diffusers gets, without diffusers."""

import sys

import pytest
import torch
import torch.nn.functional as F

from tilewise import ArgumentError
from tilewise.integrations.diffusers import attention_forward, is_registered
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.inputs import make_inputs
from tilewise.testing.run import records, run, standards

BATCH, SEQLEN_Q, SEQLEN_K, NHEADS, HEADDIM = 2, 24, 40, 4, 16


def tensors(nheads_k=NHEADS, dtype=torch.float32):
    shapes = [(BATCH, SEQLEN_Q, NHEADS, HEADDIM), *2 * [(BATCH, SEQLEN_K, nheads_k, HEADDIM)]]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def of_torch(query, key, value, *flags, **options):
    """What diffusers' native backend computes."""
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, *flags, **options).transpose(1, 2)


def assert_same(inputs, ours, theirs):
    """The same output and the same gradients."""
    dout = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    found, expected = (torch.autograd.grad(out, inputs, dout) for out in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-4)


CALLS = {
    "plain": {},
    "scale": dict(scale=0.3),
    "causal": dict(is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_torchs_attention_with_heads_third(name):
    inputs = tensors()
    assert_same(inputs, attention_forward(*inputs, **CALLS[name]), of_torch(*inputs, **CALLS[name]))


def test_query_heads_share_key_heads():
    inputs = tensors(nheads_k=2)
    with pytest.raises(ArgumentError, match="enable_gqa"):
        attention_forward(*inputs)
    ours, theirs = (f(*inputs, enable_gqa=True) for f in (attention_forward, of_torch))
    assert_same(inputs, ours, theirs)


def padding(dtype=torch.bool):
    """A row of real keys with a hole, and one that ends early; bools, or numbers to add."""
    seen = torch.ones(BATCH, SEQLEN_K, dtype=torch.bool)
    seen[0, 3:9] = seen[1, 30:] = False
    return seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_batch_and_keys_is_padding(dtype):
    inputs, mask = tensors(), padding(dtype)
    for given in (mask, mask[:, None, None]):
        theirs = of_torch(*inputs, mask[:, None, None])
        assert_same(inputs, attention_forward(*inputs, given), theirs)


@pytest.mark.parametrize(
    "shape", [(SEQLEN_Q, SEQLEN_K), (1, SEQLEN_Q, SEQLEN_K), (1, NHEADS, 1, SEQLEN_K)]
)
def test_other_masks_broadcast_as_in_torch(shape):
    inputs, mask = tensors(), torch.rand(shape) < 0.7
    mask[..., 0] = True
    assert_same(inputs, attention_forward(*inputs, mask), of_torch(*inputs, mask))


def test_a_mask_that_is_learned_gets_its_gradient():
    inputs = [*tensors(), torch.randn(BATCH, 1, SEQLEN_Q, SEQLEN_K, requires_grad=True)]
    assert_same(inputs, attention_forward(*inputs), of_torch(*inputs))


@pytest.mark.parametrize("is_masked", [False, True])
def test_lse_is_batch_seqlen_nheads_and_differentiable(is_masked):
    inputs, mask = tensors(), padding() if is_masked else None
    out, lse = attention_forward(*inputs, mask, return_lse=True)
    assert lse.shape == (BATCH, SEQLEN_Q, NHEADS) and lse.dtype == torch.float32
    assert lse.is_contiguous()
    q, k, _ = (x.double() for x in inputs)
    scores = torch.einsum("bihd,bjhd->bijh", q, k) / HEADDIM**0.5
    if is_masked:
        scores = scores.masked_fill(~mask[:, None, :, None], -torch.inf)
    expected = scores.logsumexp(2)
    torch.testing.assert_close(lse, expected.float(), atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad(x.sum(), inputs[:2]) for x in (lse, expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out, attention_forward(*inputs, mask))


def test_dropout_leaves_something_out():
    inputs = tensors()
    assert not torch.equal(attention_forward(*inputs, dropout_p=0.5), attention_forward(*inputs))


def test_a_mask_of_three_dimensions_may_mean_two_things():
    inputs = tensors()
    mask = torch.ones(BATCH, SEQLEN_Q, SEQLEN_K, dtype=torch.bool)
    with pytest.raises(ArgumentError, match=r"attn_mask\[:, None\] for the batch"):
        attention_forward(*inputs, mask)


def test_wrong_arguments_are_named():
    query, key, value = tensors()
    with pytest.raises(ArgumentError, match="query has shape .*batch, seqlen, nheads, headdim"):
        attention_forward(query[0], key, value)
    with pytest.raises(ArgumentError, match="attn_mask"):
        attention_forward(query, key, value, torch.ones(BATCH, SEQLEN_K, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="attn_mask with is_causal"):
        attention_forward(query, key, value, padding(), is_causal=True)


def test_nothing_is_registered_without_diffusers(monkeypatch):
    monkeypatch.delitem(sys.modules, "diffusers.models.attention_dispatch", False)
    assert not is_registered()


def attend(q, k, v, *, seqused_k, **asked):
    """`attention` by way of `attention_forward`; rows that end early are told by a mask."""
    assert not any(asked[name] for name in ("causal", "window", "softcap", "alibi_slopes"))
    mask = seqused_k
    if mask is not None:
        mask = torch.arange(k.shape[1], device=k.device) < seqused_k[:, None]
    out, lse = attention_forward(q, k, v, mask, scale=asked["scale"], return_lse=True)
    return out, lse.transpose(1, 2)


CASES = {
    "flux": Features(lse_grad=True),
    "padded": Features(seqused_k=(77, 600), scale=0.1, lse_grad=True),
}


def assert_in_budget(name, device, dtype, **sizes):
    """out, lse and gradients beside fp64."""
    sizes = Sizes(batch=2, **sizes)
    case = Case(name, sizes, CASES[name])
    inputs = make_inputs(sizes, CASES[name], dtype, device, case.seed)
    inputs = inputs._replace(k=inputs.k.nan_to_num(0.5), v=inputs.v.nan_to_num(0.5))
    oracle, *plain = standards(case, inputs)
    for record in records(run(attend, case, inputs), oracle, plain):
        assert record.verdict.ok, record


@pytest.mark.parametrize("name", CASES)
def test_errors_are_within_the_budget(name):
    lengths = dict(seqlen_q=100, seqlen_k=640, nheads=2, nheads_k=2, headdim=32)
    assert_in_budget(name, "cpu", torch.float32, **lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_shapes_of_flux_on_a_gpu(name, dtype):
    """512 tokens of text before 1024 of an image, in heads of 128."""
    lengths = dict(seqlen_q=1536, seqlen_k=1536, nheads=6, nheads_k=6, headdim=128)
    assert_in_budget(name, "cuda", dtype, **lengths)
