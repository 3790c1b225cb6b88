"""Sets of lengths by name, and the work of packed shapes."""

import itertools
import json

import pytest
import torch

from benchmarks.bench.run import lengths_of
from benchmarks.bench.shapes import dense_of, packed
from benchmarks.bench.sharded import Sharded
from tilewise.explain.lengths import SETS, TOKENS, documents, sequences, zipf
from tilewise.explain.shapes import Shape

HEADS = (4, 2, 16)
SMALL = packed("fwd", "40,7,64,23", HEADS, True)


@pytest.mark.parametrize(
    ("name", "count", "tokens", "longest", "shortest"),
    [
        ("equal512", 128, 65536, 512, 512),
        ("equal4096", 16, 65536, 4096, 4096),
        ("zipf", 64, 65536, 16416, 169),
        ("one-long", 129, 65536, 32768, 256),
        ("prefill-chat", 64, 72366, 2005, 32),
    ],
)
def test_the_sets_of_lengths(name, count, tokens, longest, shortest):
    each = sequences(name)
    assert (len(each), sum(each), max(each), min(each)) == (count, tokens, longest, shortest)
    assert len(SETS) == 5


def test_zipf_is_proportional_and_shuffled():
    ranked = sorted(SETS["zipf"], reverse=True)
    weights = [rank**-1.1 for rank in range(1, 65)]
    for length, weight in zip(ranked, weights, strict=True):
        assert abs(length - TOKENS * weight / sum(weights)) < 1
    assert list(SETS["zipf"]) != ranked and SETS["zipf"] != tuple(sorted(SETS["zipf"]))


def test_draws_do_not_change():
    """Rows name a set and not its lengths."""
    assert SETS["prefill-chat"][:4] == (1653, 1307, 1372, 1768)
    assert SETS["zipf"][:4] == (300, 178, 1174, 175)
    assert all(16 <= length <= 2047 for length in SETS["prefill-chat"])


@pytest.mark.parametrize(("tokens", "count"), [(65536, 16), (131072, 64), (97, 3), (5, 1)])
def test_zipf_lengths_of_any_total(tokens, count):
    lengths = zipf(tokens, count)
    ranked, whole = sorted(lengths, reverse=True), sum(1 / rank for rank in range(1, count + 1))
    assert len(lengths) == count and sum(lengths) == tokens and lengths == zipf(tokens, count)
    for rank, length in enumerate(ranked[1:], 2):
        assert abs(length - tokens / rank / whole) <= 0.5
    assert abs(ranked[0] - tokens / whole) <= count / 2  # with what rounding leaves


def test_zipf_lengths_are_never_empty():
    with pytest.raises(ValueError, match="40 tokens are too few for 64 sequences"):
        zipf(40, 64)


def test_documents_of_a_sharded_sequence_are_of_zipf_lengths():
    of = Sharded(8, 8192, 64, 8, 128, documents=16)
    lengths = [b - a for a, b in itertools.pairwise(of.starts)]
    assert tuple(lengths) == zipf(65536, 16) != documents(65536, 16)
    assert (max(lengths), min(lengths)) == (19385, 1212)
    assert of.starts[0] == 0 and of.starts[-1] == of.seqlen
    assert Sharded(8, 8192, 64, 8, 128).starts is None


def test_lengths_as_numbers():
    assert sequences("160,300") == (160, 300)
    for wrong in ("zippf", "160,0", "160,", "-1", ""):
        with pytest.raises(ValueError, match="prefill-chat"):
            sequences(wrong)


@pytest.mark.parametrize("window", [None, 0, 5, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_pairs(window, causal):
    if window is not None and not causal:
        return
    shape = SMALL._replace(causal=causal, window=window)
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(shape.sequences))
    place = torch.arange(len(document))
    distance = place[:, None] - place
    seen = document[:, None] == document
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance <= window
    pairs = int(seen.sum())
    if causal and window is None:  # half of a square, as a dense causal shape counts
        pairs -= len(document) / 2
    assert shape.flops == 4 * shape.nheads * pairs * shape.headdim
    assert shape._replace(direction="bwd").flops == 2.5 * shape.flops


@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_shape_of_a_packed_one(causal):
    """Equal lengths are a batch of the same work, others one of about as many tokens."""
    for name, batch, seqlen in [
        ("equal512", 128, 512),
        ("equal4096", 16, 4096),
        ("zipf", 16, 4096),
        ("one-long", 16, 4096),
        ("prefill-chat", 17, 4096),
        ("160,300", 1, 460),
        ("300", 1, 300),
    ]:
        shape = packed("fwd", name, (32, 8, 128), causal)
        dense = dense_of(shape)
        assert (dense.batch, dense.seqlen_q, dense.seqlen_k) == (batch, seqlen, seqlen)
        assert not dense.lengths and dense.nheads_k == 8 and dense.causal is causal
        assert (dense.flops == shape.flops) is (not shape.is_ragged)


def test_a_packed_shape_says_its_lengths():
    shape = packed("bwd", "zipf", (32, 8, 128), True)
    assert str(shape) == "bwd zipf B64 S<=16416 H32:8 D128 causal bfloat16"
    assert "equal512 B128 S512 " in str(packed("fwd", "equal512", HEADS, True))
    assert lengths_of(shape) == {"sequences": 64, "longest": 16416, "tokens": 65536}
    assert Shape(**json.loads(json.dumps(shape._asdict()))) == shape
