"""The dropout mask is the map it says it is, and what it draws looks random."""

import pytest
import torch
from helpers.philox import KNOWN
from torch.utils.checkpoint import checkpoint

from tilewise.errors import ArgumentError
from tilewise.tile import random_bytes
from tilewise.tile.dropout_numbers import check_dropout, draw_rng, factor_of, threshold_of
from tilewise.tile.random_bytes import keep, keep_tile

RNG = torch.tensor([0x0123_4567_89AB_CDEF, -2])


def spec(rng, batch, head, q, k):
    """The random byte of one pair, in Python's integers, by the definition."""
    seed, offset = (x % 2**64 for x in rng.tolist())
    a = spec_philox((batch, head, offset % 2**32, offset >> 32), (seed % 2**32, seed >> 32))
    group_q, group_k = q // 16 * 8 + q % 8, k // 32 * 4 + k % 8 // 2
    words = spec_mixed(a, group_q, group_k)
    return words[k // 8 % 4] >> 8 * (q // 8 % 2 * 2 + k % 2) & 255


def spec_mixed(a, group_q, group_k):
    steps_k = 0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B
    steps_q = 0x510E527F, 0x9B05688D, 0x1F83D9AB, 0x5BE0CD19
    steps = zip(a, steps_k, steps_q)
    words = [start + group_k * by_k + group_q * by_q for start, by_k, by_q in steps]
    for _ in range(2):
        x, y, z, w = (int.from_bytes((n % 2**32).to_bytes(4, "big"), "little") for n in words)
        x += y * w
        y += z * x
        z += x * y
        w += y * z
        words = x, y, z, w
    return [n % 2**32 for n in words]


def spec_philox(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b % 2**32, a >> 32 ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_known_answers(line):
    rounds, *words = line.split()
    words = [torch.tensor(int(word, 16)) for word in words]
    found = random_bytes.philox(tuple(words[:4]), tuple(words[4:6]), rounds=int(rounds))
    assert torch.stack(found).equal(torch.stack(words[6:]))


def test_every_pair_has_the_byte_of_the_definition():
    threshold = 77
    indices = torch.randint(0, 2**31, (4, 200))
    indices[2:, :100] %= 300
    indices[:, :2] = torch.tensor([0, 2**31 - 1])
    found = keep(RNG, *indices, threshold)
    expected = [spec(RNG, *pair) >= threshold for pair in indices.T.tolist()]
    assert found.tolist() == expected
    assert 0 < sum(expected) < 200


@pytest.mark.parametrize("start", [(0, 0), (16, 32), (5, 70), (2**31 - 64, 2**31 - 33)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (33, 30), (64, 128), (3, 200)], ids=str)
def test_a_tile_is_its_pairs(start, size):
    (q_start, k_start), (rows, columns) = start, size
    batch, head = torch.tensor([[0], [7]]), torch.arange(3, dtype=torch.int32)
    tile = keep_tile(RNG, batch, head, q_start, k_start, rows, columns, 100)
    q_idx = q_start + torch.arange(rows)[:, None]
    k_idx = k_start + torch.arange(columns)
    pairs = keep(RNG, batch[..., None, None], head[:, None, None], q_idx, k_idx, 100)
    assert tile.shape == (2, 3, rows, columns) and tile.equal(pairs)
    assert tile[1, 2].equal(keep_tile(RNG, 7, 2, q_start, k_start, rows, columns, 100))
    narrow = [x.to(torch.int32) for x in (q_idx, k_idx)] if q_start < 2**30 else (q_idx, k_idx)
    assert tile[0, 1].equal(keep(RNG, 0, 1, *narrow, 100))


def test_drawing_does_not_synchronize():
    rng = torch.empty(2, dtype=torch.int64, device="meta")
    assert keep_tile(rng, 0, 1, 5, 6, 7, 8, 9).shape == (7, 8)
    index = torch.arange(8, device="meta")
    assert keep(rng, index, 0, index, index, 9).is_meta
    assert draw_rng("meta").shape == (2,)


@pytest.mark.slow
def test_compiled():
    """Whatever Inductor makes of 64-bit products and of reinterpreted words."""

    def tile(rng):
        return keep_tile(rng, 1, torch.arange(2), 5, 9, 20, 40, 77)

    assert torch.compile(tile, fullgraph=True)(RNG).equal(tile(RNG))


SIZE = 512


def mask(threshold, seed=1, offset=0, batch=0, head=0):
    rng = torch.tensor([seed, offset])
    return keep_tile(rng, batch, head, 0, 0, SIZE, SIZE, threshold)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_rate(p):
    """Within five standard deviations of what the threshold says, by tile and by each byte's place
    in its group.
    """
    threshold = threshold_of(p)
    rate = 1 - threshold / 256
    kept = mask(threshold).double()
    places = kept.view(SIZE // 16, 2, 8, SIZE // 32, 4, 4, 2).mean((0, 2, 3, 5)).flatten()
    for found, count in ((kept.mean()[None], SIZE**2), (places, SIZE**2 // 16)):
        sigma = (rate * (1 - rate) / count) ** 0.5
        assert (found - rate).abs().max() < 5 * sigma


def surprise(a, b, threshold):
    """Chi-square, three degrees of freedom, of how often two masks keep both, one or neither."""
    rate = 1 - threshold / 256
    pairs, both, in_a, in_b = a.numel(), *(x.sum().item() for x in (a & b, a, b))
    counts = (both, in_a - both, in_b - both, pairs - in_a - in_b + both)
    shares = (rate**2, rate * (1 - rate), rate * (1 - rate), (1 - rate) ** 2)
    return sum((n - pairs * x) ** 2 / (pairs * x) for n, x in zip(counts, shares))


MOST = 30.7  # exceeded once in a million
LAGS = [1, 2, 3, 4, 7, 8, 15, 16, 24, 31, 32, 64, 256]
OTHERS = [
    *(dict(head=x) for x in (1, 2, 31)),
    *(dict(batch=x) for x in (1, 2, 31)),
    *(dict(offset=x) for x in (1, 4, 2**31, 2**32, -1)),
    *(dict(seed=x) for x in (0, 2, 2**31 + 1, 2**32 + 1, -1)),
]


def surprises(threshold):
    here = mask(threshold)
    for lag in LAGS:
        yield f"queries {lag} apart", surprise(here[lag:], here[:-lag], threshold)
        yield f"keys {lag} apart", surprise(here[:, lag:], here[:, :-lag], threshold)
    for other in OTHERS:
        yield str(other), surprise(here, mask(threshold, **other), threshold)
    yield "transposed", surprise(here, mask(threshold, head=1).T, threshold)
    swapped = mask(threshold, batch=1, head=2), mask(threshold, batch=2, head=1)
    yield "batch and head", surprise(*swapped, threshold)


@pytest.mark.parametrize("threshold", [26, 128])
def test_neighbours_are_independent(threshold):
    found = dict(surprises(threshold))
    assert max(found.values()) < MOST, found
    # Were it all the same number, the test would not see a thing
    assert len(set(found.values())) > len(found) // 2


def test_a_weak_generator_is_seen(monkeypatch):
    """Words of one round it takes `test_dropout_words.py` to see."""
    monkeypatch.setattr(random_bytes, "MIXES", 0)
    assert max(value for _, value in surprises(128)) > MOST


def test_same_arguments_same_mask():
    assert mask(26).equal(mask(26))
    for other in OTHERS:
        assert not mask(26, **other).equal(mask(26)), other


def test_seed_decides():
    torch.manual_seed(5)
    first, second = draw_rng("cpu"), draw_rng("cpu")
    assert first.dtype == torch.int64 and first.shape == (2,)
    assert not first.equal(second)
    torch.manual_seed(5)
    assert draw_rng("cpu").equal(first) and draw_rng("cpu").equal(second)


def test_a_fork_draws_the_same():
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        inside = draw_rng("cpu")
    assert draw_rng("cpu").equal(inside)


def test_a_generator_of_ones_own():
    before = torch.get_rng_state()
    draws = [draw_rng("cpu", torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0].equal(draws[1]) and not draws[0].equal(draws[2])
    assert torch.get_rng_state().equal(before)


def test_recomputation_draws_the_same():
    draws = []

    def block(x):
        draws.append(draw_rng("cpu"))
        return x * keep_tile(draws[-1], 0, 0, 0, 0, 8, 8, 128)

    x = torch.ones(8, 8, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    y.sum().backward()
    assert len(draws) == 2 and draws[0].equal(draws[1])
    assert x.grad.equal(y.detach())


def test_all_bits_are_drawn():
    draws = torch.stack([draw_rng("cpu") for _ in range(500)])
    bits = (draws[..., None] >> torch.arange(64)) & 1
    counts = bits.sum(0)
    assert counts.min() > 250 - 60 and counts.max() < 250 + 60  # 5 sigma: 56


@pytest.mark.parametrize("p", [-0.1, 1, 1.0, 1.5, float("nan"), float("inf"), None, "0.1", True])
def test_wrong_probabilities(p):
    with pytest.raises(ArgumentError, match="dropout_p="):
        check_dropout(p)


@pytest.mark.parametrize("p", [0, 0.0, 0.1, 0.999999])
def test_right_probabilities(p):
    assert check_dropout(p) == p and type(check_dropout(p)) is float


def test_thresholds():
    assert threshold_of(0.0) == 0 and threshold_of(1e-30) == 1 and threshold_of(0.9999) == 255
    for p in torch.linspace(0.002, 0.998, 300).tolist():
        assert abs(threshold_of(p) / 256 - p) <= 1 / 512
    for threshold in range(256):
        assert factor_of(threshold) * (256 - threshold) / 256 == pytest.approx(1, rel=1e-15)
    assert mask(0).all() and factor_of(0) == 1.0
