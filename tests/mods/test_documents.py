"""A mask of documents is found, and attention under it is attention over packed sequences."""

import pytest
import torch

import tilewise
from tilewise import mods
from tilewise.frontend import attention as api
from tilewise.sparse import create_block_mask
from tilewise.testing.tolerance import assert_within

SEQLEN, BATCH = 300, 2
IDS = torch.arange(SEQLEN) // 70
BY_ROW = torch.stack([IDS, torch.arange(SEQLEN) // 111])
FULL = mods.mask(lambda b, h, q, k: q >= 0)
BY_SEQUENCE = mods.mask(lambda b, h, q, k: BY_ROW[b, q] == BY_ROW[b, k])
# The mask, where documents begin in each of two sequences, and whether it is causal
DOCUMENTS = {
    "documents": (mods.document(IDS), [(0, 70, 140, 210, 280)] * 2, False),
    "causal": (mods.document(IDS) & mods.causal(), [(0, 70, 140, 210, 280)] * 2, True),
    "by sequence": (BY_SEQUENCE, [(0, 70, 140, 210, 280), (0, 111, 222)], False),
    "one": (FULL, [(0,)] * 2, False),
    "one, causal": (mods.causal(), [(0,)] * 2, True),
    "of one token": (mods.mask(lambda b, h, q, k: q == k), [range(SEQLEN)] * 2, True),
}
OTHERS = {
    "window": mods.sliding_window(50, 3),
    "window in documents": mods.document(IDS) & mods.sliding_window(20, 0),
    "prefix": mods.prefix_lm(40),
    "a document sees nothing": mods.mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[q] != 2)),
    "keys of another": mods.mask(lambda b, h, q, k: (k < 100) & (q >= 0)),
    "a later start": mods.mask(lambda b, h, q, k: (k <= q) & (k >= 5)),
    "anti-causal": mods.mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k >= q)),
    "later keys alone": mods.mask(lambda b, h, q, k: k > q),
    "one pair less": mods.mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & ((q != 75) | (k != 139))),
    "by heads": mods.mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q + h * 999)),
}


@pytest.fixture
def packed(monkeypatch):
    """Whether each call was of packed sequences."""
    seen, real = [], api.call

    def call(*given, **options):
        seen.append(options["extras"].cu_seqlens_q is not None)
        return real(*given, **options)

    monkeypatch.setattr(api, "call", call)
    return seen


def inputs(headdim_v=24, dtype=torch.float32, layout="bshd"):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 16), (2, 16), (2, headdim_v)
    sizes = [
        (BATCH, SEQLEN, *s) if layout == "bshd" else (BATCH, s[0], SEQLEN, s[1]) for s in shapes
    ]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_found(name):
    mask, starts, is_causal = DOCUMENTS[name]
    found = create_block_mask(mask, BATCH, 4, SEQLEN, SEQLEN).documents
    expected = [i * SEQLEN + start for i in range(BATCH) for start in starts[i]]
    assert found.cu_seqlens.tolist() == [*expected, BATCH * SEQLEN]
    assert found.cu_seqlens.dtype == torch.int32
    assert found.longest == max(found.cu_seqlens.diff().tolist())
    assert found.causal == is_causal and found.batch == BATCH


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_none(name):
    assert create_block_mask(OTHERS[name], BATCH, 4, SEQLEN, SEQLEN).documents is None


def test_of_other_lengths_there_are_none():
    assert create_block_mask(mods.causal(), 1, 1, 100, 128).documents is None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_attention_is_within_documents(name, packed):
    mask = DOCUMENTS[name][0]
    blocks = create_block_mask(mask, BATCH, 4, SEQLEN, SEQLEN)
    given, exact, plain = inputs(), inputs(), inputs()
    results = [tilewise.attention(*given, block_mask=blocks, return_lse=True)]
    for x, cast in ((exact, torch.float64), (plain, torch.float32)):
        options = dict(mask_mod=mask, return_lse=True, upcast=cast == torch.float64)
        with torch.no_grad():
            results.append(tilewise.attention_reference(*(y.to(cast) for y in x), **options))
    assert packed == [not name.startswith("one")]
    for what, *one in zip(("out", "lse"), *results):
        assert_within(*one, what)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_gradients_are_those_of_the_documents_packed(name):
    blocks = create_block_mask(DOCUMENTS[name][0], BATCH, 4, SEQLEN, SEQLEN)
    found = blocks.documents
    at = dict(cu_seqlens_q=found.cu_seqlens, cu_seqlens_k=found.cu_seqlens)
    at |= dict(max_seqlen_q=found.longest, max_seqlen_k=found.longest)
    given, rows = inputs(), inputs()
    out, lse = tilewise.attention(*given, block_mask=blocks, return_lse=True)
    packed_rows = (x.flatten(0, 1) for x in rows)
    options = dict(causal=DOCUMENTS[name][2], return_lse=True)
    packed_out, packed_lse = tilewise.attention(*packed_rows, **at, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), given, (dout, dlse))
    dlse = dlse.transpose(0, 1).flatten(1)
    expected = torch.autograd.grad((packed_out, packed_lse), rows, (dout.flatten(0, 1), dlse))
    for mine, other in zip(grads, expected):
        torch.testing.assert_close(mine, other)


def test_a_view_by_heads_and_a_smaller_batch_are_right(packed):
    """Rows that are no view of packed ones stay beside the mask's blocks."""
    mask = DOCUMENTS["causal"][0]
    blocks = create_block_mask(mask, BATCH, 4, SEQLEN, SEQLEN)
    q, k, v = inputs(layout="bhsd")
    expected = tilewise.attention_reference(
        *(x.transpose(1, 2) for x in (q, k, v)), mask_mod=mask
    ).transpose(1, 2)
    found = tilewise.attention(q, k, v, block_mask=blocks, layout="bhsd")
    torch.testing.assert_close(found, expected)
    found = tilewise.attention(*(x[:1] for x in (q, k, v)), block_mask=blocks, layout="bhsd")
    torch.testing.assert_close(found, expected[:1])
    assert packed == [False, False]
    one = create_block_mask(mask, 1, 4, SEQLEN, SEQLEN)
    found = tilewise.attention(*(x[:1] for x in (q, k, v)), block_mask=one, layout="bhsd")
    torch.testing.assert_close(found, expected[:1])
    assert packed == [False, False, True]


BESIDE = {
    "bias": dict(bias=torch.randn(1, 4, SEQLEN, SEQLEN)),
    "score_mod": dict(score_mod=lambda s, b, h, q, k: s + 0.01 * k),
    "alibi_slopes": dict(alibi_slopes=torch.rand(BATCH, 4)),
    "seqused_k": dict(seqused_k=torch.tensor([200, 300], dtype=torch.int32)),
    "mask_mod": dict(mask_mod=lambda b, h, q, k: k % 7 != 0),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_asks_for_positions_keeps_the_blocks(name, packed):
    blocks = create_block_mask(DOCUMENTS["documents"][0], BATCH, 4, SEQLEN, SEQLEN)
    with torch.no_grad():
        if name == "mask_mod":
            with pytest.raises(tilewise.ArgumentError, match="mask_mod"):
                tilewise.attention(*inputs(), block_mask=blocks, **BESIDE[name])
            return
        tilewise.attention(*inputs(), block_mask=blocks, **BESIDE[name])
    assert packed == [False]


def test_dropout_keeps_the_pairs_of_the_mask(packed):
    """They are drawn by position."""
    mask = DOCUMENTS["documents"][0]
    blocks = create_block_mask(mask, BATCH, 4, SEQLEN, SEQLEN)
    options = dict(dropout_p=0.3, dropout_rng=torch.tensor([5, 7]))
    found = tilewise.attention(*inputs(), block_mask=blocks, **options)
    torch.testing.assert_close(found, tilewise.attention(*inputs(), mask_mod=mask, **options))
    assert packed[0] is False


def test_another_device_has_them(packed):
    blocks = create_block_mask(DOCUMENTS["documents"][0], BATCH, 4, SEQLEN, SEQLEN).to("cpu")
    tilewise.attention(*inputs(), block_mask=blocks)
    assert packed == [True]
