"""torch's flash attention operators, computed by tilewise: what torch's registry replaces. On the
CPU torch has no kernel of these, so `varlen_attn` runs there by ours alone.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers.caches import paged, sequences
from integrations.torch_calls import both, inputs, packed, square
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import tilewise
from tilewise import PerformanceWarning, errors
from tilewise.integrations import torch_flash
from tilewise.integrations.torch_flash import FlashArguments

STARTS = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:enable_sdpa and torch.compile")


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    torch._dynamo.utils.counters.clear()
    with tilewise.enable_sdpa():
        yield


def tokens(heads=4, heads_k=4, total=30, **made):
    return inputs((total, heads, 16), (total, heads_k, 16), (total, heads_k, 16), **made)


def attend(q, k, v, starts=STARTS, **options):
    longest = int(starts.diff().max())
    return varlen_attn(q, k, v, starts, starts, longest, longest, **options)


def reference(q, k, v, **options):
    """Sequence by sequence, by torch's own kernels."""
    tilewise.disable_sdpa()
    try:
        return both(lambda *x: packed(*x, STARTS, **options), q, k, v)
    finally:
        tilewise.enable_sdpa()


ARGUMENTS = inspect.signature(varlen_attn).parameters


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_packed_sequences(causal, heads_k):
    tensors, window = tokens(heads_k=heads_k), (-1, 0 if causal else -1)
    shared = dict(enable_gqa=heads_k < 4)
    known = shared if "enable_gqa" in ARGUMENTS else {}  # torch 2.11 shares by head counts
    found = both(lambda *x: attend(*x, window_size=window, **known), *tensors)
    expected = reference(*tensors, is_causal=causal, **shared)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [(3, 0), (2, 1), (-1, 2)])
def test_windows_and_scale(window):
    tensors = tokens()
    found = both(lambda *x: attend(*x, window_size=window, scale=0.3), *tensors)
    ends = [None if side < 0 else side for side in window]

    def ours(q, k, v, **options):
        return tilewise.attention(q, k, v, window=ends, scale=0.3, layout="bhsd")

    expected = both(lambda *x: packed(*x, STARTS, ours), *tensors)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_lse_and_compiled():
    q, k, v = tokens(dtype=torch.float32)
    out, lse = attend(q, k, v, return_aux=AuxRequest(lse=True))
    scores = torch.einsum("qhd,khd->hqk", q[:9], k[:9]) / 4
    torch.testing.assert_close(lse[:, :9], scores.logsumexp(-1))
    compiled = torch.compile(lambda *x: attend(*x, STARTS), backend="aot_eager", fullgraph=True)
    expected = both(attend, q, k, v)
    torch.testing.assert_close(both(compiled, q, k, v), expected)
    torch.testing.assert_close(out, expected[0])


@pytest.mark.skipif("seqused_k" not in ARGUMENTS, reason="torch 2.12 and later")
def test_used_keys():
    q, k, v = (x.detach() for x in tokens())
    used = torch.tensor([5, 0, 21], dtype=torch.int32)
    found = attend(q, k, v, seqused_k=used)
    expected = tilewise.attention(q, k, v, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, seqused_k=used)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif("block_table" not in ARGUMENTS, reason="torch 2.13 and later")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages(page_size, window):
    s = sequences([3, 0, 1, 9], [40, 17, 5, 33])
    k, v, table = paged(s, page_size)
    q, longest = torch.cat(s.q), 9
    options = dict(seqused_k=s.lengths, window_size=window, enable_gqa=True)
    shape = s.starts, None, longest, 40
    found = varlen_attn(q, k, v, *shape, **options, block_table=table)
    ends = [None if side < 0 else side for side in window]
    starts_k = torch.tensor([0, 40, 57, 62, 95], dtype=torch.int32)
    starts = dict(cu_seqlens_q=s.starts, cu_seqlens_k=starts_k)
    expected = tilewise.attention(q, torch.cat(s.k), torch.cat(s.v), window=ends, **starts)
    torch.testing.assert_close(found, expected)
    into = torch.empty_like(q)
    varlen.varlen_attn_out(into, q, k, v, *shape, **options, block_table=table)
    assert torch.equal(into, found)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch 2.12 and later")
def test_into_a_tensor_of_the_callers():
    q, k, v = (x.detach() for x in tokens(dtype=torch.float32))
    into = torch.empty_like(q)
    varlen.varlen_attn_out(into, q, k, v, STARTS, STARTS, 21, 21, window_size=(-1, 0))
    torch.testing.assert_close(into, attend(q, k, v, window_size=(-1, 0)))


NAMES = [x.name for x in aten._flash_attention_forward.default._schema.arguments]
REFUSED = {
    "dropout_p": dict(dropout_p=0.1),
    "block_table without seqused_k": dict(block_table=torch.zeros(3, 1, dtype=torch.int32)),
    "seqused_k with a gradient": dict(
        block_table=torch.zeros(3, 1, dtype=torch.int32), seqused_k=STARTS.diff()
    ),
    "return_debug_mask": dict(return_debug_mask=True),
    "alibi_slopes with a gradient": dict(alibi_slopes=torch.ones(4)),
}


@pytest.mark.parametrize("name", [x for x in REFUSED if {x.split()[0], *REFUSED[x]} <= set(NAMES)])
def test_what_is_refused_is_named(name):
    options = dict(dropout_p=0.0, is_causal=False, return_debug_mask=False) | REFUSED[name]
    with pytest.raises(NotImplementedError, match=name):
        aten._flash_attention_forward(*tokens(), STARTS, STARTS, 21, 21, **options)


def test_what_a_newer_torch_adds_is_refused_where_it_is_set():
    assert torch_flash._arguments((1,) * 10, dict(novelty=None, scale=2.0)).scale == 2.0
    with pytest.raises(NotImplementedError, match="novelty"):
        torch_flash._arguments((1,) * 10, dict(novelty=3))


def test_slopes():
    q, k, v = (x.detach() for x in tokens())
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    given = STARTS, STARTS, 21, 21, 0.0, True, False
    found = aten._flash_attention_forward(q, k, v, *given, alibi_slopes=slopes)[0]
    lengths = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
    expected = tilewise.attention(q, k, v, causal=True, alibi_slopes=slopes, **lengths)
    torch.testing.assert_close(found, expected)


# the operator of F.scaled_dot_product_attention on a GPU


def dense(q, k, v, *flags, **options):
    return aten._scaled_dot_product_flash_attention(q, k, v, *flags, **options)


LAYOUTS = {
    "heads first": lambda x: x,
    "sequence first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a larger one": lambda x: torch.cat([x, x], -1)[..., :16],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_dense(layout, causal):
    tensors = [LAYOUTS[layout](x).detach().requires_grad_() for x in square(heads_k=2)]
    out, lse, *_, mask = dense(*tensors, 0.0, causal, scale=0.3)
    assert out.stride() == torch.empty_like(tensors[0]).stride() and lse.is_contiguous()
    assert lse.shape == (2, 4, 24) and mask.numel() == 0
    found = both(lambda *x: dense(*x, 0.0, causal, scale=0.3)[0], *tensors)
    for x, grad in zip(tensors, found[1:]):
        assert grad.stride() == torch.empty_like(x).stride()
    options = dict(is_causal=causal, scale=0.3, enable_gqa=True)
    expected = both(lambda *x: F.scaled_dot_product_attention(*x, **options), *tensors)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_causal_ends_in_the_last_key():
    """As `causal_lower_right` asks of this operator."""
    q, k, v = inputs((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    found = both(lambda *x: dense(*x, 0.0, True)[0], q, k, v)
    expected = both(lambda *x: tilewise.attention(*x, causal=True, layout="bhsd"), q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Earlier:
    """A kernel that was there before ours."""

    def call_boxed(self, keyset, *args, **options):
        return "torch's own"


def test_what_is_refused_goes_to_the_kernel_before():
    kernel = torch_flash._or_before("_flash_attention_forward", refuses, Earlier())
    with pytest.warns(PerformanceWarning, match=r"own kernel computes aten::_flash.*no such thing"):
        assert kernel(None) == "torch's own"
    with pytest.raises(NotImplementedError, match="no such thing"):
        torch_flash._or_before("_flash_attention_forward", refuses, None)(None)


def refuses(*args):
    raise NotImplementedError("no such thing")


def test_arguments_are_those_of_torch():
    """In its order, as far as this torch has them."""
    assert list(FlashArguments._fields[: len(NAMES)]) == NAMES
    for name in (torch_flash.OF_DENSE, torch_flash.OF_PACKED):
        names = [x.name for x in getattr(aten, name).default._schema.arguments]
        assert names[6:12] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
