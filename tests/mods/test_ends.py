"""Masks whose rows and columns are intervals are found, and their ends are the mask."""

import pytest
import torch

from tilewise import mods
from tilewise.mods import ends
from tilewise.sparse import create_block_mask

SEQLEN = 333
IDS = torch.arange(SEQLEN, dtype=torch.int32) // 70
LIMITS = torch.tensor([20, 300])
INTERVALS = {
    "causal": mods.causal(),
    "documents": mods.document(IDS),
    "causal documents": mods.document(IDS) & mods.causal(),
    "window": mods.sliding_window(50, 3),
    "prefix": mods.prefix_lm(40),
    "by heads": mods.mask(lambda b, h, q, k: (k <= q) & (q - k < 20 * (h + 1))),
    "by sequences": mods.mask(lambda b, h, q, k: k < LIMITS[b]),
    "nothing": mods.mask(lambda b, h, q, k: q < 0),
    "some queries": mods.mask(lambda b, h, q, k: (q > 100) & (q < 120) & (k < 7)),
}
OTHERS = {
    "strided": mods.mask(lambda b, h, q, k: (q + k) % 3 == 0),
    "two runs of keys": mods.mask(lambda b, h, q, k: (k < 9) | (k > q)),
    "two runs of queries": mods.mask(lambda b, h, q, k: (q < 40) | (q > 200)),
    "one pair is missing": mods.mask(lambda b, h, q, k: (q != 130) | (k != 140)),
}


@pytest.mark.parametrize("block", [(128, 128), (64, 16)], ids=str)
@pytest.mark.parametrize("name", INTERVALS)
def test_ends_are_the_mask(name, block):
    sizes = 2, 3, SEQLEN, SEQLEN
    blocks = create_block_mask(INTERVALS[name], *sizes, block=block)
    assert ends.says_ends(blocks.for_kernels.key)
    assert torch.equal(blocks.for_kernels.dense(*sizes), INTERVALS[name].dense(*sizes))


def test_of_other_lengths():
    mask, sizes = mods.sliding_window(9, 30), (1, 1, 100, 250)
    blocks = create_block_mask(mask, *sizes, block=(32, 64))
    assert [x.shape[2] for x in blocks.ends] == [100, 100, 250, 250]
    assert torch.equal(blocks.for_kernels.dense(*sizes), mask.dense(*sizes))


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_none(name):
    blocks = create_block_mask(OTHERS[name], 1, 1, SEQLEN, SEQLEN)
    assert blocks.ends is None and blocks.for_kernels is blocks.mask


def test_a_mask_written_like_ends_is_not_taken_for_them():
    """Its columns are not those of its rows, so kernels must ask both."""
    rows = torch.arange(SEQLEN, dtype=torch.int32)[None, None]
    first, stop = rows * 0, (rows * 7) % SEQLEN
    mask = ends.Ends(first, stop, first.clone(), stop.clone()).mask()
    blocks = create_block_mask(mask, 1, 1, SEQLEN, SEQLEN)
    assert ends.says_ends(mask.key) and blocks.ends is None
    assert not ends.says_ends(blocks.for_kernels.key)
    sizes = 1, 1, SEQLEN, SEQLEN
    assert torch.equal(blocks.for_kernels.dense(*sizes), mask.dense(*sizes))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("tilewise.mods.block_mask.MAX_END_ROWS", 2 * SEQLEN - 1)
    assert create_block_mask(mods.causal(), 1, 1, SEQLEN, SEQLEN).ends is None


def test_they_move_with_the_mask():
    blocks = create_block_mask(mods.causal(), 1, 1, SEQLEN, SEQLEN).to("meta")
    assert all(x.device.type == "meta" for x in blocks.ends)
