"""`flex_attention` is torch's, argument for argument, and takes what FlexAttention's masks are made
of.
"""

import functools
import inspect
import math

import pytest
import torch
from helpers.tiers import sample_rows
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, or_masks

import tilewise
from tilewise import ArgumentError, errors, mods
from tilewise.mods import from_flex
from tilewise.sparse import BlockMask, create_block_mask
from tilewise.testing.tolerance import assert_within

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]
FREE = pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning")
DOCUMENTS = torch.arange(96) // 20


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 13


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < 10


def of_heads(b, h, q_idx, kv_idx):
    return (q_idx + h + b) % 3 != kv_idx % 3


def sees_late(b, h, q_idx, kv_idx):
    return (q_idx > 5) & (q_idx >= kv_idx)


def same_document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def slanted(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * 0.125 * (h + 1)


def blocks_of(mask, batch=None, nheads=None, seqlen_q=96, seqlen_k=96):
    sizes = batch, nheads, seqlen_q, seqlen_k
    return flex.create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=32)


def qkv(dtype=torch.float32, seqlen_q=96, seqlen_k=96, nheads_k=4, batch_k=2):
    q = torch.randn(2, 4, seqlen_q, 16, dtype=dtype)
    k, v = torch.randn(2, batch_k, nheads_k, seqlen_k, 16, dtype=dtype)
    return q, k, v


def of_torch(query, key, value, score_mod=None, block_mask=None, scale=None, **asked):
    """torch's function; on a CPU it has no gradients, so those are autograd's of its formula."""
    values = [x.detach() for x in (query, key, value)]
    found = flex.flex_attention(*values, score_mod, block_mask, scale, **asked)
    blocks = flex._create_empty_block_mask(query, key) if block_mask is None else block_mask
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    score_mod = score_mod or flex._identity
    out, lse, _ = math_attention(query, key, value, score_mod, blocks.as_tuple(), scale, {})
    lse = lse * math.log(2)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, out.detach())
        return out
    torch.testing.assert_close(found[0], out.detach())
    stated = found[1] if isinstance(found[1], torch.Tensor) else found[1].lse
    torch.testing.assert_close(stated, lse.detach())
    return out, lse


def run(attend, tensors, **asked):
    """Out, lse if it is asked for, and gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = attend(*leaves, **asked)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    outputs = [x if isinstance(x, torch.Tensor) else x.lse for x in outputs]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    given = [d.masked_fill(x.isinf(), 0) for d, x in zip(given, outputs)]
    return *outputs, *torch.autograd.grad(outputs, leaves, given)


def check(tensors, **asked):
    """Ours is torch's, in shapes, dtypes and values; in half precision both are held to fp64."""
    ours, theirs = (run(attend, tensors, **asked) for attend in (tilewise.flex_attention, of_torch))
    if tensors[0].dtype.itemsize > 2:
        torch.testing.assert_close(ours, theirs)
        return
    exact = run(of_torch, [x.double() for x in tensors], **asked)
    for x, oracle, plain in zip(ours, exact, theirs, strict=True):
        if x.dtype == torch.float32:  # lse, by torch's own fused CPU kernel where nothing is asked
            torch.testing.assert_close(x, oracle.float(), rtol=0, atol=1e-4)
        else:
            assert_within(x, oracle, plain)


def test_the_signature_is_torchs():
    ours, theirs = (
        [(p.name, p.default, p.kind) for p in inspect.signature(f).parameters.values()]
        for f in (tilewise.flex_attention, flex.flex_attention)
    )
    assert ours == theirs
    assert tilewise.faces.flex_attention is tilewise.flex_attention


ASKED = {
    "nothing": dict,
    "lse": lambda: {"return_lse": True},
    "aux": lambda: {"return_aux": AuxRequest(lse=True)},
    "masks that must all hold": lambda: {
        "block_mask": blocks_of(and_masks(causal, same_document, near)),
        "return_lse": True,
    },
    "masks of which one must hold": lambda: {
        "block_mask": blocks_of(or_masks(and_masks(causal, near), prefix)),
        "return_lse": True,
    },
    "score": lambda: {
        "score_mod": slanted,
        "block_mask": blocks_of(causal),
        "scale": 0.25,
        "return_aux": AuxRequest(lse=True),
    },
    "rows and heads of their own": lambda: {"block_mask": blocks_of(of_heads, 2, 4)},
    "everything": lambda: {"block_mask": blocks_of(flex.noop_mask)},
    "kernel options": lambda: {"kernel_options": {"BLOCK_M": 64, "USE_TMA": True}},
}


DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
CALLS = [(name, dtype) for name in ASKED for dtype in DTYPES]
FAST = [(name, torch.float32) for name in ASKED] + [(next(iter(ASKED)), x) for x in DTYPES[1:]]


@pytest.mark.parametrize("name, dtype", sample_rows(CALLS, *FAST))
def test_equals_torchs(name, dtype):
    check(qkv(dtype), **ASKED[name]())


def test_rows_that_see_no_key():
    q, k, v = qkv()
    out, lse = tilewise.flex_attention(q, k, v, None, blocks_of(sees_late), return_lse=True)
    assert not out[:, :, :6].any() and (lse[:, :, :6] == -math.inf).all()
    check((q, k, v), block_mask=blocks_of(sees_late), return_lse=True)


def test_keys_that_are_shared():
    check(qkv(nheads_k=2), block_mask=blocks_of(of_heads, 2, 4), enable_gqa=True)
    check(qkv(batch_k=1), block_mask=blocks_of(of_heads, 2, 4))
    check(qkv(seqlen_q=40), block_mask=blocks_of(causal, seqlen_q=40), return_lse=True)


@FREE
def test_strides_and_scales_that_want_a_copy(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    q, k, v = qkv()
    with pytest.warns(tilewise.PerformanceWarning, match="^key has stride .* copies it"):
        tilewise.flex_attention(q, k.mT.contiguous().mT, v)
    check([x.mT.contiguous().mT for x in (q, k, v)])
    check((q, k, v), scale=-0.5)
    check((q, k, v), scale=0.0)


REFUSED = {  # by torch, too
    "heads": (lambda: qkv(nheads_k=2), {}, "query has 4 heads and key has 2.*enable_gqa=True"),
    "heads to share": (lambda: qkv(nheads_k=3), {"enable_gqa": True}, "4 heads and .* has 3"),
    "batches": (lambda: qkv(batch_k=1), {}, "batch 2 and key has batch 1"),
    "rank 3": (lambda: [x[0] for x in qkv()], {}, r"query has shape \(4, 96, 16\).*4 dimensions"),
    "a short mask": (
        lambda: qkv(),
        {"block_mask": lambda: blocks_of(causal, seqlen_q=40)},
        "block_mask has .*build it for the shape of the call",
    ),
    "a sliced mask": (
        lambda: qkv(),
        {"block_mask": lambda: blocks_of(causal, 2)[:1]},
        "sliced BlockMask",
    ),
    "a function": (lambda: qkv(), {"block_mask": lambda: causal}, "block_mask is a function"),
    "lse twice": (
        lambda: qkv(),
        {"return_lse": True, "return_aux": AuxRequest(lse=True)},
        "return_lse and return_aux",
    ),
    "options": (lambda: qkv(), {"kernel_options": 3}, "kernel_options is an int: .*dict"),
    "aux": (lambda: qkv(), {"return_aux": 3}, "return_aux is an int: .*AuxRequest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    tensors, asked, said = REFUSED[name]
    tensors = tensors()
    asked = {x: value() if x == "block_mask" else value for x, value in asked.items()}
    with pytest.raises(Exception):  # noqa: B017  torch has a type for each
        flex.flex_attention(*tensors, **asked)
    with pytest.raises(ArgumentError, match=said):
        tilewise.flex_attention(*tensors, **asked)


def test_no_heads_give_no_heads():
    q, k, v = (x[:, :0] for x in qkv())
    out, lse = tilewise.flex_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]


def test_maxima_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="max_scores.*request lse"):
        tilewise.flex_attention(*qkv(), return_aux=AuxRequest(max_scores=True))


def test_joined_masks_are_those_of_the_algebra():
    """The constants that they begin with leave no trace."""
    ours = mods.causal() & mods.mask(near)
    assert mods.mask(and_masks(causal, near)).key == ours.key
    assert mods.mask(or_masks(causal, near)).key == (mods.causal() | mods.mask(near)).key
    joined = and_masks(mods.causal(), or_masks(mods.document(DOCUMENTS), prefix))
    want = flex.create_mask(joined, 1, 1, 96, 96, device="cpu")
    assert torch.equal(mods.mask(joined).dense(1, 1, 96, 96), want)
    for everything in (and_masks(), flex.noop_mask, and_masks(flex.noop_mask, flex.noop_mask)):
        assert mods.mask(everything).dense(1, 1, 2, 2).all()
    assert not mods.mask(or_masks()).dense(1, 1, 2, 2).any()


def by_distance(table, q_idx, kv_idx):
    return table[q_idx - kv_idx]


FROM_THE_END = {
    "difference": by_distance,
    "shifted": lambda table, q_idx, kv_idx: table[q_idx - 5] * table[kv_idx - 96],
    "read": lambda table, q_idx, kv_idx: table[DOCUMENTS[kv_idx] - 3],
    "constant": lambda table, q_idx, kv_idx: table[-1] * table[kv_idx],
}


@FREE
@pytest.mark.parametrize("name", FROM_THE_END)
def test_negative_indices_count_from_the_end(name):
    read, tensors = FROM_THE_END[name], qkv()
    table = torch.randn(96, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def biased(score, b, h, q_idx, kv_idx):
        return score + read(table, q_idx, kv_idx)

    def seen(b, h, q_idx, kv_idx):
        return (read(table.detach(), q_idx, kv_idx) > 0) | (q_idx == kv_idx)

    got, want = (f(*tensors, score_mod=biased) for f in (tilewise.flex_attention, of_torch))
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    dense = flex.create_mask(seen, 1, 1, 96, 96, device="cpu")
    assert torch.equal(mods.mask(seen).dense(1, 1, 96, 96), dense)
    blocks = create_block_mask(seen, 1, 1, 96, 96, block=(32, 32))
    assert torch.equal(blocks.kinds() > 0, blocks_of(seen, 1, 1).to_dense() > 0)


def test_block_masks_are_created_as_torchs():
    named = dict(B=None, H=None, Q_LEN=96, KV_LEN=64, device="cpu", BLOCK_SIZE=32, _compile=False)
    want = create_block_mask(same_document, 1, 1, 96, 64, block=(32, 32))
    for made in (
        create_block_mask(mask_mod=same_document, **named),
        create_block_mask(same_document, None, None, 96, 64, "cpu", 32),
        create_block_mask(same_document, 1, nheads=None, Q_LEN=96, KV_LEN=64, BLOCK_SIZE=(32, 32)),
    ):
        assert made.shape == want.shape and made.block == want.block
        assert torch.equal(made.kinds(), want.kinds())
    names = inspect.signature(flex.create_block_mask).parameters.keys() - {"device"}
    assert names <= from_flex.NAMES.keys()
    with pytest.raises(TypeError, match="both block= and BLOCK_SIZE="):
        create_block_mask(same_document, 1, 1, 96, 64, block=(32, 32), BLOCK_SIZE=32)
    with pytest.raises(TypeError, match="'BLOCKSIZE'"):
        create_block_mask(same_document, 1, 1, 96, 64, BLOCKSIZE=32)


def test_they_are_masks_wherever_one_is():
    q, k, v = (x.transpose(1, 2) for x in qkv())
    joined = and_masks(causal, same_document)
    want = tilewise.attention(q, k, v, mask_mod=mods.causal() & mods.mask(same_document))
    assert torch.equal(tilewise.attention(q, k, v, mask_mod=joined), want)
    blocks = create_block_mask(joined, 1, 1, 96, 96, block=(32, 32))
    torch.testing.assert_close(tilewise.attention(q, k, v, block_mask=blocks), want)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q_idx, kv_idx: q_idx.new_ones((3,)) > 0, r"new_ones` of shape \(3,\)"),
        (lambda b, h, q_idx, kv_idx: q_idx.new_zeros(3) < 1, "new_zeros` of shape 3"),
        (lambda b, h, q_idx, kv_idx: q_idx.new_full((), 3) < 1, "new_full.* has no meaning"),
        (lambda b, h, q_idx, kv_idx: kv_idx < b.device, "None .* as an operand has no meaning"),
    ],
)
def test_the_language_is_no_larger(function, said):
    with pytest.raises(ArgumentError, match=said):
        mods.mask(function)


def test_constants_have_a_kind():
    made = mods.mask(lambda b, h, q, k: q - q.new_ones(()) < k + k.new_zeros((), dtype=torch.int))
    assert repr(made) == "Mask(((q_idx - 1) < k_idx))"


@pytest.mark.parametrize("attend", [tilewise.attention, tilewise.attention_reference])
def test_a_block_mask_of_torchs_is_one_of_ours(attend):
    q, k, v = (x.transpose(1, 2) for x in qkv())
    blocks = blocks_of(and_masks(causal, near))
    want = attend(q, k, v, block_mask=BlockMask.from_flex(blocks))
    assert torch.equal(attend(q, k, v, block_mask=blocks), want)
    for wrong in (3, causal):
        with pytest.raises(
            ArgumentError, match=r"block_mask is an? .*tilewise\.sparse.* or of torch"
        ):
            attend(q, k, v, block_mask=wrong)


def test_lists_are_converted_once(monkeypatch):
    made = []
    convert = from_flex.converted
    monkeypatch.setattr(from_flex, "converted", lambda *x: made.append(x) or convert(*x))
    tensors = qkv()
    limit = torch.tensor(20)
    blocks = blocks_of(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx >= limit))
    attend = functools.partial(tilewise.flex_attention, *tensors, block_mask=blocks)
    first = attend()
    assert torch.equal(attend(), first) and len(made) == 1
    limit.fill_(10)  # kernels read it at every call
    assert not torch.equal(attend(), first) and len(made) == 1
    blocks.mask_mod = prefix
    torch.testing.assert_close(attend(), tilewise.flex_attention(*tensors, None, blocks_of(prefix)))
    assert len(made) == 3
    blocks.kv_num_blocks.add_(0)  # as a caller that reuses the tensors
    attend()
    assert len(made) == 4


def test_a_mask_that_reads_another_number_is_another():
    tensors = qkv()
    width = 10
    blocks = blocks_of(lambda b, h, q_idx, kv_idx: kv_idx <= width)
    narrow = tilewise.flex_attention(*tensors, block_mask=blocks)
    width = 5
    assert not torch.equal(tilewise.flex_attention(*tensors, block_mask=blocks), narrow)


def test_compiles_with_a_block_mask_of_ours():
    blocks = create_block_mask(causal, 1, 1, 96, 96, block=(32, 32))

    def attend(q, k, v):
        return tilewise.flex_attention(q, k, v, block_mask=blocks, return_aux=AuxRequest(lse=True))

    again = torch.compile(attend, backend="aot_eager", fullgraph=True)
    tensors = qkv()
    torch.testing.assert_close(again(*tensors), attend(*tensors))


@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_block_mask_of_torchs_breaks_the_graph_and_says_how_not_to(fullgraph):
    torch.compiler.reset()
    blocks, tensors = blocks_of(causal), qkv()
    attend = functools.partial(tilewise.flex_attention, block_mask=blocks)
    again = torch.compile(attend, backend="aot_eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(Exception, match=r"BlockMask\.from_flex"):
            again(*tensors)
    else:
        torch.testing.assert_close(again(*tensors), attend(*tensors))
