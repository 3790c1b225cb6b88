"""A masked tile keeps the scores of visible pairs and makes every other -inf."""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import features, sequence

from tilewise.testing import interpret
from tilewise.tile.mask import apply_mask


@triton.jit
def mask_kernel(
    s, m_start, n_start, seq, FEATURES: tl.constexpr, BLOCK: tl.constexpr, SWAPPED: tl.constexpr
):
    offs = tl.arange(0, BLOCK)
    ptrs = s + offs[:, None] * BLOCK + offs[None, :]
    q_idx, k_idx = m_start + offs, n_start + offs
    if SWAPPED:  # keys down, queries across, as in the backward of keys
        masked = apply_mask(tl.load(ptrs), q_idx[None, :], k_idx[:, None], seq, FEATURES)
    else:
        masked = apply_mask(tl.load(ptrs), q_idx[:, None], k_idx[None, :], seq, FEATURES)
    tl.store(ptrs, masked)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("diagonal", [0, 9, -6])
@pytest.mark.parametrize("band", [(-1, -1), (-1, 0), (3, -1), (2, 4)], ids=str)
def test_band_and_end_of_keys(band, diagonal, swapped):
    left, right = band
    on = features(LEFT=left >= 0, RIGHT=right >= 0)
    seq = sequence(64, 29, diagonal, left, right)
    q_idx, k_idx = torch.arange(16, 32)[:, None], torch.arange(16, 32)[None, :]
    distance = k_idx - q_idx - diagonal
    keep = (k_idx < 29).expand(16, 16).clone()
    keep &= distance >= -left if left >= 0 else True
    keep &= distance <= right if right >= 0 else True
    before = torch.randn(16, 16)
    s = before.clone()
    interpret(mask_kernel)[(1,)](s, 16, 16, seq, FEATURES=on, BLOCK=16, SWAPPED=swapped)
    keep = keep.T if swapped else keep
    assert torch.equal(s, torch.where(keep, before, -math.inf))
