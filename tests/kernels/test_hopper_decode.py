"""Attention with a KV cache by Hopper's kernel, in the emulator: features against the formula, the
contract, what is not in use.
"""

import math

import pytest
import torch
from helpers.caches import INT32, paged
from helpers.emulated_decoding import BF16, FEATURES, assert_equal, check, drawn, run
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise.testing import use_emulator


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    s = drawn()
    check(s, run(s, 16, **FEATURES[name]), **FEATURES[name])


@pytest.mark.parametrize("name", sample(FEATURES, "causal"))
def test_pages_change_no_bit(name):
    """Of 16 keys, of 128, in another order, and one as long as the cache."""
    s = drawn()
    found = run(s, 16, **FEATURES[name])
    assert_equal(run(s, None, **FEATURES[name]), found)
    assert_equal(run(s, 128, seed=1, **FEATURES[name]), found)
    assert_equal(run(s, 8, seed=2, **FEATURES[name]), found)
    assert_equal(run(s, 3, seed=3, **FEATURES[name]), found)
    assert_equal(run(s, 1, seed=4, **FEATURES[name]), found)


@pytest.mark.parametrize("name", sample(["causal", "window"], "window"))
def test_pages_of_several_blocks_change_no_bit(name):
    """Blocks of 64 keys in pages of 192, as parts begin anywhere in them."""
    s = drawn([1, 3], [700, 450], headdims=(128, 128))
    expected = run(s, None, **FEATURES[name])
    assert_equal(run(s, 192, **FEATURES[name]), expected)
    assert_equal(run(s, 64, seed=1, **FEATURES[name]), expected)


SHAPES = [((1, 1), (64, 128)), ((6, 2), (128, 64)), ((34, 2), (72, 72)), ((4, 4), (256, 256))]


@pytest.mark.parametrize("heads, headdims", SHAPES)
@pytest.mark.parametrize("dtype", sample([torch.float16, BF16], torch.float16))
def test_heads_headdims_and_dtypes(heads, headdims, dtype):
    s = drawn([1, 5], [300, 70], heads, headdims, dtype)
    check(s, run(s, causal=True), causal=True)


@pytest.mark.parametrize("headdims", sample([(64, 64), (128, 72), (256, 256)], (128, 72)))
@pytest.mark.parametrize("name", sample(FEATURES, "softcap"))
def test_rows_of_a_tile_change_no_bit(headdims, name, monkeypatch):
    """Of 64, they are the rows of wgmma; of fewer its columns."""
    from tilewise.kernels.hopper.decode import launch

    s = drawn([1, 3], [200, 70], headdims=headdims)
    found = [run(s, 16, **FEATURES[name])]
    for rows in (16, 64):
        monkeypatch.setattr(launch, "rows_of", lambda *asked, rows=rows: rows)
        found.append(run(s, 16, **FEATURES[name]))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("name", sample(["causal", "window", "sinks"], "sinks"))
def test_one_part_gives_the_bits_of_many(name, monkeypatch):
    """Whether partial states have room decides nothing."""
    from tilewise.kernels.hopper.decode import launch

    s = drawn([1, 20], [700, 513])
    found = run(s, 16, **FEATURES[name])
    monkeypatch.setattr(launch, "WORKSPACE", 0)
    assert_equal(run(s, 16, **FEATURES[name]), found)


@pytest.mark.slow  # `test_a_chunk_has_the_bits_of_its_tokens` goes by this kernel, too
@pytest.mark.parametrize("name", ["causal", "window", "alibi"])
def test_the_contract_for_any_number_of_queries(name):
    """C0, C1 and C2: neither mates nor order nor pages nor how many queries come at once change a
    bit; on lengths of three pieces and more.
    """
    s = drawn([40, 1, 3], [530, 396, 407])
    options = FEATURES[name] | dict(split_size=128)
    out, _ = run(s, 16, **options)
    turned = type(s)(*(x[::-1] for x in s))
    found, _ = run(turned, 8, seed=3, **options)
    assert torch.equal(torch.cat(found.split([3, 1, 40])[::-1]), out)
    options |= dict(causal=True)
    whole = run(type(s)([s.q[0]], [s.k[0]], [s.v[0]]), 16, **options)
    for a, b in ((0, 1), (1, 5), (3, 38), (39, 40)):
        n = 530 - 40 + b
        part = type(s)([s.q[0][a:b]], [s.k[0][:n]], [s.v[0][:n]])
        found = run(part, 8, **options)
        assert_equal(found, (whole[0][a:b], whole[1][:, a:b]))


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_what_is_not_in_use_changes_nothing(fill):
    s = drawn([1, 2, 2], [400, 133, 0])
    expected = run(s, None, causal=True, window=(140, 0))
    k, v, table = paged(s, 8, fill=fill)
    first = (400 - 1 - 140) // 8
    k[table[0, :first].long()] = fill
    v[table[0, :first].long()] = fill
    table[0, :first] = -1
    q = torch.cat([*s.q, torch.full((3, *s.q[0].shape[1:]), math.nan, dtype=BF16)])
    out = torch.full_like(q, 7.0)
    with use_emulator(1):
        found, lse = tilewise.attention(
            *(q, k, v),
            page_table=torch.cat([table, torch.full_like(table, -1)]),
            seqused_k=torch.cat([s.lengths, torch.zeros(3, dtype=INT32)]),
            cu_seqlens_q=torch.cat([s.starts, s.starts[-1:].expand(3)]),
            **dict(causal=True, window=(140, 0), split_size=128, out=out, return_lse=True),
            backend="hopper",
        )
    assert torch.equal(found[:5], expected[0]) and torch.equal(lse[:, :5], expected[1])
    assert (found[5:] == 7).all()
    assert (found[3:5] == 0).all() and (lse[:, 3:5] == -math.inf).all()


def test_a_batch_of_queries():
    s = drawn([2, 2], [270, 9])
    k, v, table = paged(s, 8)
    options = dict(page_table=table, seqused_k=s.lengths, causal=True, return_lse=True)
    q = torch.stack(s.q)
    with use_emulator(2):
        out, lse = tilewise.attention(q, k, v, split_size=128, backend="hopper", **options)
    packed, packed_lse = run(s, 8, split_size=128, causal=True)
    assert torch.equal(out.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


@pytest.mark.parametrize(
    "most, ahead", sample_rows([(0, 16), (0, 1), (0, 2), (10**6, 16)], (0, 1), (10**6, 16))
)
@pytest.mark.parametrize("name", sample(["causal", "window"], "window"))
def test_where_a_tile_is_folded_changes_no_bit(most, ahead, name, monkeypatch):
    """All programs, in slices, or the one that ends the last part; of 1 row and of 64. In slices,
    of groups of states that are loaded ahead the first one is short or empty.
    """
    import triton.language as tl

    from tilewise.kernels.hopper.decode import factors
    from tilewise.tile import split_schedule

    s = drawn([1, 40], [520, 650])
    found = run(s, 16, **FEATURES[name])
    monkeypatch.setattr(split_schedule, "MANY_STATES", tl.constexpr(most))
    monkeypatch.setattr(factors, "STATES_AHEAD", tl.constexpr(ahead))
    assert_equal(run(s, 16, **FEATURES[name]), found)


def test_training_has_the_bits_of_decoding():
    """C3: the forward whose output has a gradient, a prefill in chunks, and single tokens."""
    s = drawn([400], [400])
    q, k, v = (x[0].unsqueeze(0) for x in s)
    options = dict(causal=True, split_size=128, backend="hopper", return_lse=True)
    with use_emulator(4):
        out, lse = tilewise.attention(q.clone().requires_grad_(), k, v, **options)
    assert out.requires_grad
    for a, b in ((0, 150), (150, 400), (128, 129), (391, 399)):
        part = type(s)([s.q[0][a:b]], [s.k[0][:b]], [s.v[0][:b]])
        found = run(part, 16, causal=True)
        assert_equal(found, (out[0, a:b].detach(), lse[0, :, a:b].detach()))


def test_tma_copies_few_bytes_ahead():
    """At most 96 KB, but always a second block while one is in use."""
    from tilewise.kernels.hopper.decode.tiles import swapped_tile

    for by_tma, shape, expected in (
        (True, (64, 128, 128), 3),
        (False, (64, 128, 128), 6),
        (True, (64, 256, 256), 2),
    ):
        assert swapped_tile(shape, 8, by_tma=by_tma).STAGES == expected
