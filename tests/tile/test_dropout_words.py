"""The words of a group: each bit of where it is reaches every bit, and bytes are uniform."""

import pytest
import torch

from tilewise.tile import random_bytes
from tilewise.tile.random_bytes import Stream, group_words, stream_of

RNG = torch.tensor([3, 4])
ZEROS = Stream(*[torch.tensor(0)] * 4)
SIZE = 256
GROUP_BITS = 29  # of 2^31 - 1 keys
SAMPLES = 1024


def words_of(stream, group_q, group_k):
    return torch.stack(group_words(stream, group_q, group_k), -1)


def avalanche(stream):
    """How far from a half the share of flipped bits is at most, in standard deviations: of each
    word's each bit, where one bit of the key group or of the query group is another.
    """
    generator = torch.Generator().manual_seed(1)
    group_q, group_k = torch.randint(2**14, (2, SAMPLES), generator=generator)
    bits = (1 << torch.arange(GROUP_BITS))[:, None]
    before = words_of(stream, group_q, group_k)
    after = [words_of(stream, group_q ^ bits, group_k), words_of(stream, group_q, group_k ^ bits)]
    flipped = (torch.stack(after) ^ before)[..., None] >> torch.arange(32) & 1
    counts = flipped.sum(2, dtype=torch.int32)
    return (counts - SAMPLES / 2).abs().max().item() / (SAMPLES / 4) ** 0.5


def test_every_bit_reaches_every_bit():
    """5.5 standard deviations: once in 3500 times for 7424 pairs of bits."""
    assert avalanche(stream_of(RNG, 0, 0)) < 5.5
    assert avalanche(ZEROS) < 5.5


def differences():
    """The words of many groups, and their differences in either direction and in both."""
    indices = torch.arange(SIZE)
    words = words_of(stream_of(RNG, 0, 0), indices[:, None], indices)
    along_q, along_k = words[1:] ^ words[:-1], words[:, 1:] ^ words[:, :-1]
    yield from (words, along_q, along_k, along_q[:, 1:] ^ along_q[:, :-1])
    yield words ^ words_of(stream_of(RNG, 0, 1), indices[:, None], indices)


def unevenness(words):
    """Chi-square of how often each of 16 bytes has each value, in standard deviations."""
    values = words[..., None] >> 8 * torch.arange(4) & 255
    at = torch.arange(16).view(4, 4) * 256
    counts = torch.bincount((values + at).flatten(), minlength=4096).view(16, 256)
    mean = values.numel() / 4096
    chi_square = (counts - mean).square().sum(1) / mean
    return ((chi_square - 255) / 510**0.5).max().item()


def test_bytes_are_uniform():
    """6 standard deviations: once in 10^6 times for 80 bytes."""
    assert max(map(unevenness, differences())) < 6


@pytest.mark.parametrize("mixes", [0, 1])
def test_weak_words_are_seen(monkeypatch, mixes):
    monkeypatch.setattr(random_bytes, "MIXES", mixes)
    assert avalanche(stream_of(RNG, 0, 0)) > 10
    assert max(map(unevenness, differences())) > 10
