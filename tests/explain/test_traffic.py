"""Bytes by formula, against counts by hand and by brute force."""

import itertools

import pytest
import torch

from benchmarks.bench.shapes import SUITES, packed, square
from benchmarks.steps import standard_steps
from tilewise.explain.traffic import moved, visited_tiles

PAPER = SUITES["gpt2-medium"][0]
MATRIX = 64 * 16 * 1024 * 1024 * 2  # bytes of the scores


def test_standard_attention_moves_its_matrix_at_every_step():
    """Forward: S out, softmax in and out, P in. Backward: P, dP, P and dP and dS, dS, dS."""
    for direction, times in (("fwd", 4), ("bwd", 7), ("fwd+bwd", 11)):
        steps = standard_steps(PAPER._replace(direction=direction))
        total = sum(step.read + step.written for step in steps)
        assert times * MATRIX < total <= (times + 1) * MATRIX
    with_mask = standard_steps(PAPER._replace(direction="fwd", causal=True))
    assert [step.name for step in with_mask].count("mask") == 1


def test_tilewise_moves_each_tensor_once_or_by_tile():
    forward = PAPER._replace(direction="fwd")
    tensor = 64 * 16 * 1024 * 64 * 2
    lse = 64 * 16 * 1024 * 4
    assert moved(forward, (128, 128), "hopper") == (
        4 * tensor + lse,
        2 * tensor + lse + 16 * tensor,
    )
    both = moved(PAPER, (128, 128), "portable")
    assert both.once < both.tiled < sum(sum(step[1:]) for step in standard_steps(PAPER))


def test_bytes_grow_with_the_length_and_the_matrix_with_its_square():
    for shorter, longer in itertools.pairwise([1024, 2048, 4096]):
        shapes = [square("fwd+bwd", s, 64, False, tokens=s) for s in (shorter, longer)]
        ours = [moved(shape, (128, 128), "hopper").once for shape in shapes]
        standard = [sum(sum(step[1:]) for step in standard_steps(shape)) for shape in shapes]
        assert ours[1] == 2 * ours[0] and 3.5 < standard[1] / standard[0] < 4


def test_packed_sequences_count_each():
    one = packed("fwd", "256,256", (2, 2, 64), False)
    dense = square("fwd", 256, 64, False, tokens=512, hidden=128)
    assert moved(one, (128, 128), "hopper") == moved(dense, (128, 128), "hopper")


@pytest.mark.parametrize("lengths", [(300, 300), (200, 456), (456, 200), (1, 700)], ids=str)
@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 70)])
def test_visited_tiles_are_those_with_a_pair(lengths, is_causal, window):
    seqlen_q, seqlen_k = lengths
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if is_causal:
        seen &= key <= position
    if window is not None:
        seen &= position - key <= window
    m, n = 64, 128
    tiles = [block.any() for rows in seen.split(m) for block in rows.split(n, dim=1)]
    assert visited_tiles(*lengths, (m, n), is_causal, window) == sum(tiles)
