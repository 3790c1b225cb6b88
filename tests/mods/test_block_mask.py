"""BlockMask against dense masks and FlexAttention's own, at any block and length."""

import dataclasses
import weakref

import pytest
import torch
from helpers import random_masks as masks
from helpers.tiers import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import ArgumentError
from tilewise.mods import (
    block_mask,
    causal,
    chunked,
    dilated,
    document,
    mask,
    prefix_lm,
    sliding_window,
)
from tilewise.sparse import BlockLists, BlockMask, create_block_mask
from tilewise.testing import use_interpreter

DOC = (torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.02).cumsum(0).int()
RAMP = torch.arange(300)
FLAGS = torch.rand(300, generator=torch.Generator().manual_seed(2)) < 0.99


def truth(made, shape, block):
    """0, 1 or 2 a tile, from the dense mask padded with what is not seen."""
    dense = made.dense(*shape)
    pad = [-n % size for n, size in zip(shape[2:], block)]
    padded = torch.nn.functional.pad(dense, (0, pad[1], 0, pad[0]))
    tiles = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).transpose(3, 4)
    return (tiles.flatten(4).any(4).int() + tiles.flatten(4).all(4)).to(torch.uint8)


def kinds_of(counts, indices, kind, n_blocks):
    """By the definition of the lists."""
    found = torch.zeros(*counts.shape, n_blocks, dtype=torch.uint8)
    for at in torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, 3).tolist():
        listed = indices[tuple(at)][: counts[tuple(at)]].tolist()
        assert listed == sorted(set(listed))
        assert not indices[tuple(at)][counts[tuple(at)] :].any()
        found[tuple(at)][listed] = kind
    return found


def check_lists(blocks, expected):
    n_blocks, m_blocks = blocks.grid[3], blocks.grid[2]
    expected = expected[: blocks.grid[0], : blocks.grid[1]]
    parts = [kinds_of(*x, i, n_blocks) for i, x in ((1, blocks.partial), (2, blocks.full))]
    assert torch.equal(parts[0] + parts[1], expected)
    partial, full = blocks.transposed
    parts = [kinds_of(*x, i, m_blocks) for i, x in ((1, partial), (2, full))]
    assert torch.equal((parts[0] + parts[1]).transpose(2, 3), expected)
    assert torch.equal(blocks.kinds(), expected)


MASKS = {
    "causal": causal(),
    "bottom right": causal(diagonal=43),
    "window": sliding_window(70, 5),
    "prefix": prefix_lm(torch.tensor([33, 200], dtype=torch.int32)),
    "document": document(DOC),
    "causal document": causal() & document(DOC.expand(2, -1).contiguous()),
    "chunked": causal() & chunked(64),
    "dilated": dilated(3) & sliding_window(100, 0),
    "not": ~document(DOC),
    "everything": mask(lambda b, h, q, k: True),
    "nothing": mask(lambda b, h, q, k: False),
    "heads": mask(lambda b, h, q, k: (q - k < 20 * (h + 1)) & (q >= k)),
    "flags": mask(lambda b, h, q, k: FLAGS[q] & FLAGS[k]) & causal(),
    "shifted": mask(lambda b, h, q, k: (RAMP[q - 90] < RAMP[k - 280]) & (RAMP[9 - q] > k)),
    "rows": mask(lambda b, h, q, k: FLAGS[q]),
    "floats": mask(lambda b, h, q, k: (q - k) * 0.5 < 31.5),
    "one number": mask(lambda b, h, q, k: torch.tensor(1.5) > 0.5),
    "one flag": mask(lambda b, h, q, k: FLAGS[3] & (DOC[b] == 0)),
}


@pytest.mark.parametrize("block", [(64, 64), (16, 128), (128, 32)])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_what_the_dense_mask_says(name, block):
    shape = (2, 3, 257, 300)
    blocks = create_block_mask(MASKS[name], *shape, block=block)
    check_lists(blocks, truth(MASKS[name], shape, block))
    assert blocks.shape[2:] == shape[2:]
    assert blocks.shape[0] == (2 if MASKS[name].depends_on("b") else 1)
    skipped = (blocks.kinds() == 0).double().mean() * 100
    assert blocks.sparsity() == pytest.approx(float(skipped))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 239, 1), (1, 1, 64, 64), (1, 1, 1, 300)])
def test_odd_lengths(shape):
    for made in (causal(), document(DOC), sliding_window(3, 3)):
        blocks = create_block_mask(made, *shape, block=(64, 64))
        check_lists(blocks, truth(made, shape, (64, 64)))


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (1, 1, 0, 8), (1, 1, 8, 0), (2, 3, 0, 0)])
def test_nothing_to_see(shape):
    blocks = create_block_mask(causal(), *shape)
    assert blocks.grid[2:] == (min(shape[2], 1), min(shape[3], 1))
    assert not blocks.full.counts.any() and not blocks.partial.counts.any()
    assert (
        blocks.sparsity() in (0.0, 100.0) and blocks.transposed[0].counts.shape[2] == blocks.grid[3]
    )


@given(text=masks.predicates(), block=st.sampled_from([(16, 16), (16, 32), (32, 16)]))
@settings(max_examples=60, deadline=None, database=None)
def test_any_expression(text, block):
    made, shape = masks.traced(text), (2, 2, 50, 64)
    assert torch.equal(made.dense(*shape), masks.truth(text, *shape))
    check_lists(create_block_mask(made, *shape, block=block), truth(made, shape, block))


@pytest.mark.parametrize("name", ["causal", "window", "document", "prefix", "chunked"])
def test_intervals_settle_the_usual_masks(name, monkeypatch):
    """Only tiles on an edge of the mask are evaluated."""
    evaluated, settle = [], block_mask._settle

    def counted(*args, kinds, **others):
        evaluated.append(int((kinds == block_mask.UNKNOWN).sum()))
        settle(*args, kinds=kinds, **others)

    monkeypatch.setattr(block_mask, "_settle", counted)
    ids = torch.arange(2048, dtype=torch.int32) // 500
    usual = {**MASKS, "document": causal() & document(ids)}
    blocks = create_block_mask(usual[name], 1, 1, 2048, 2048, block=(32, 32))
    # The diagonal alone is 64 tiles of 4,096
    assert sum(evaluated) <= int(blocks.partial.counts.sum()) + 128


def test_slabs_change_nothing(monkeypatch):
    made, shape = MASKS["causal document"] & MASKS["heads"], (2, 3, 257, 300)
    whole = create_block_mask(made, *shape, block=(16, 16)).kinds()
    for tiles in (1, 40, 400, 2000):
        monkeypatch.setattr(block_mask, "TILES_AT_ONCE", tiles)
        monkeypatch.setattr(block_mask, "PAIRS_AT_ONCE", tiles)
        assert torch.equal(create_block_mask(made, *shape, block=(16, 16)).kinds(), whole)


# As attention-gym writes them.
def gym_causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def gym_sliding_window(b, h, q_idx, kv_idx):
    causal_mask = q_idx >= kv_idx
    window_mask = q_idx - kv_idx <= 100
    return causal_mask & window_mask


def gym_prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx < PREFIX[b]) | (q_idx >= kv_idx)


def gym_document(b, h, q_idx, kv_idx):
    same_doc = DOC[q_idx] == DOC[kv_idx]
    return same_doc & (q_idx >= kv_idx)


def gym_dilated(b, h, q_idx, kv_idx):
    distance = torch.abs(q_idx - kv_idx)
    return (distance <= 120) & (distance % 2 == 0)


def gym_alternating(b, h, q_idx, kv_idx):
    local = (q_idx // 64 == kv_idx // 64) & (q_idx >= kv_idx)
    return torch.where(h % 2 == 0, local, q_idx >= kv_idx)


def gym_natten(b, h, q_idx, kv_idx):
    q_x, q_y, kv_x, kv_y = q_idx // 16, q_idx % 16, kv_idx // 16, kv_idx % 16
    return (torch.abs(q_x - kv_x) <= 2) & (torch.abs(q_y - kv_y) <= 2)


PREFIX = torch.tensor([40, 170], dtype=torch.int32)
GYM = [gym_causal, gym_sliding_window, gym_prefix_lm, gym_document]
GYM += [gym_dilated, gym_alternating, gym_natten]


def of_flex(function, shape, block=64):
    return flex_attention.create_block_mask(function, *shape, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("function", GYM, ids=lambda function: function.__name__)
def test_equals_flex_attention(function, length):
    shape = (2, 4, length, length)
    flex = of_flex(function, shape)
    ours = create_block_mask(function, *shape, block=(64, 64))
    theirs = BlockMask.from_flex(flex)
    assert torch.equal(ours.kinds().expand(2, 4, -1, -1), theirs.kinds())
    assert theirs.shape == shape and theirs.block == (64, 64)
    assert theirs.mask.key == ours.mask.key
    dense = flex_attention.create_mask(function, *shape, device="cpu")
    assert torch.equal(ours.mask.dense(*shape), dense)
    for mine, counts, indices in (
        (theirs.transposed[0], flex.q_num_blocks, flex.q_indices),
        (theirs.transposed[1], flex.full_q_num_blocks, flex.full_q_indices),
    ):
        assert torch.equal(mine.counts, counts)
        width = mine.indices.shape[3]
        listed = torch.arange(width) < counts[..., None]
        assert torch.equal(mine.indices, torch.where(listed, indices[..., :width], 0))


def test_flex_attention_takes_our_masks():
    made = causal() & document(DOC)
    theirs = of_flex(made, (1, 1, 300, 300))
    ours = create_block_mask(made, 1, 1, 300, 300, block=(64, 64))
    assert torch.equal(BlockMask.from_flex(theirs).kinds(), ours.kinds())


def test_from_flex_without_full_blocks_or_mask():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    flex = flex_attention.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    ours = BlockMask.from_flex(flex)
    assert ours.kinds().tolist() == [[[[2, 0], [2, 2]]]]
    assert ours.mask.dense(1, 1, 2, 2).all()


def test_lists_without_a_predicate_are_one():
    """What FlexAttention's lists alone hide, no backend may show, nor the reference."""
    counts = torch.tensor([[[1, 1]], [[2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [1, 0]]], [[[0, 1], [0, 1]]]], dtype=torch.int32)
    flex = flex_attention.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    blocks = BlockMask.from_flex(flex)
    listed = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [1, 0]]]).bool()[:, None]
    seen = listed.repeat_interleave(64, 2).repeat_interleave(64, 3)
    assert torch.equal(blocks.mask.dense(2, 1, 128, 128), seen)
    assert torch.equal(blocks.kinds() > 0, listed)
    q, k, v = torch.randn(3, 2, 2, 128, 16).unbind(0)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    options = dict(layout="bhsd", block_mask=blocks)
    with use_interpreter():
        found = tilewise.attention(q, k, v, backend="portable", **options)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(tilewise.attention(q, k, v, **options), want)
    torch.testing.assert_close(tilewise.attention_reference(q, k, v, **options), want)


def test_from_flex_refuses():
    with pytest.raises(ArgumentError, match="block_mask is an int: it must be a BlockMask"):
        BlockMask.from_flex(3)
    with pytest.raises(ArgumentError, match=r"sin\(q_idx\)"):
        BlockMask.from_flex(of_flex(lambda b, h, q, k: torch.sin(q) > 0, (1, 1, 64, 64)))


BAD = {
    "block": (dict(block=(100, 64)), r"block=\(100, 64\).*multiples of 16"),
    "one block": (dict(block=100), r"block=\(100, 100\): it must be a pair"),
    "batch": (dict(batch=-1), "batch=-1: it must be an int of at least 0"),
    "seqlen": (dict(seqlen_q=2.0), "seqlen_q=2.0: it must be an int"),
    "predicate": (dict(mask=lambda b, h, q, k: q and k), "truth of q_idx"),
    "no predicate": (dict(mask=None), "mask_mod is a NoneType"),
    "short": (dict(mask=document(DOC), seqlen_k=301), "seqlen_k is 301: dimension 0 is too short"),
    "device": (dict(mask=document(DOC), device="meta"), "captured tensors on cpu.*mask.to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arguments = dict(mask=causal(), batch=1, nheads=1, seqlen_q=64, seqlen_k=64)
    changed, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        create_block_mask(**{**arguments, **changed})


def test_which_calls_it_serves():
    shared = create_block_mask(causal(), 4, 8, 64, 64)
    shared.check(4, 8, 64, 64)
    shared.check(1, 3, 64, 64)
    with pytest.raises(ArgumentError, match=r"\(1, 1, 64, 64\) and the call has \(4, 8, 64, 65\)"):
        shared.check(4, 8, 64, 65)
    one = create_block_mask(document(DOC[None]), 1, 8, 64, 64)
    one.check(1, 8, 64, 64)
    with pytest.raises(ArgumentError, match="build it"):
        one.check(2, 8, 64, 64)  # its mask has documents for one sequence


def test_frozen_moved_and_shown():
    blocks = create_block_mask(document(DOC), 1, 1, 300, 300)
    with pytest.raises(dataclasses.FrozenInstanceError):
        blocks.shape = (1, 1, 1, 1)
    assert isinstance(blocks.full, BlockLists) and blocks.transposed is blocks.transposed
    assert repr(create_block_mask(causal(), 1, 1, 512, 256)).startswith(
        "BlockMask((1, 1, 512, 256), block=(128, 128), 2 partial, 5 full, 12.5% skipped"
    )
    moved = blocks.to("meta")
    assert moved.partial.indices.device.type == "meta"
    assert moved.mask.tensors[0].device.type == "meta"


class Peak(TorchDispatchMode):
    """The most bytes that torch's operators had out at once, and all that they gave."""

    bytes, total, calls, live = 0, 0, 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, (tuple, list)) else [found]
        self.live = [x for x in self.live if x() is not None]
        self.live += [weakref.ref(x) for x in made if isinstance(x, torch.Tensor)]
        self.calls += 1
        self.total += sum(x.nbytes for x in made if isinstance(x, torch.Tensor))
        storages = [x().untyped_storage() for x in self.live]
        self.bytes = max(self.bytes, sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
        return found


@pytest.mark.parametrize("name", sample(["causal", "window", "documents"], "documents"))
def test_128ki_by_128ki_is_cheap(name):
    """Memory and work by tiles and not by pairs, which would be 16 GiB of bools."""
    seqlen = 128 * 1024
    ids = torch.repeat_interleave(torch.arange(16, dtype=torch.int32), seqlen // 16)
    made = {"causal": causal(), "window": sliding_window(4096, 0)}
    made["documents"] = causal() & document(ids)
    with Peak() as peak:
        blocks = create_block_mask(made[name], 1, 1, seqlen, seqlen)
    assert peak.bytes < 100e6 and peak.total < seqlen**2 / 8, (peak.bytes, peak.total)
    assert peak.calls < 10**4
    partial, full = blocks.partial.counts.sum(), blocks.full.counts.sum()
    expected = {"causal": (1024, 523776), "window": (2016, 31248), "documents": (1024, 32256)}
    assert (int(partial), int(full)) == expected[name]
    assert int(blocks.transposed[1].counts.sum()) == full
