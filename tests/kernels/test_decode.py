"""The portable kernels of a cache, in the interpreter: features against the formula, the contract,
what is not in use, and appending.
"""

import math

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.caches import INT32, contiguous, paged, sequences
from helpers.plans import Memory
from helpers.plans import run as launched
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise import cache
from tilewise.frontend import values
from tilewise.kernels.portable import decode_launch
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import use_interpreter
from tilewise.testing.tolerance import assert_within

QUERIES, LENGTHS = [1, 3, 0, 6], [130, 64, 5, 200]
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(20, 3)),
    "softcap": dict(causal=True, scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % 3 != h) | (b == 1)),
}


@pytest.fixture(autouse=True)
def interpreted():
    with use_interpreter():
        yield


def run(s, page_size=16, seed=0, attend=tilewise.attention, cast=None, split_size=64, **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = paged(s, page_size, seed)
    q = torch.cat(s.q)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    if attend is tilewise.attention:
        options |= dict(split_size=split_size, backend="portable")
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts)
    return attend(q, k, v, return_lse=True, **at, **options)


def check(s, found, page_size=None, **options):
    reference = tilewise.attention_reference
    oracle = run(s, page_size, attend=reference, cast=torch.float64, **options)
    plain = run(s, page_size, attend=reference, upcast=False, **options)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    s = sequences(QUERIES, LENGTHS)
    check(s, run(s, 16, **FEATURES[name]), **FEATURES[name])


@pytest.mark.parametrize("name", sample(FEATURES, "causal"))
def test_pages_change_no_bit(name):
    """Of 16 keys, of 3, in another order, and one as long as the cache."""
    s = sequences(QUERIES, LENGTHS)
    found = run(s, 16, **FEATURES[name])
    assert_equal(run(s, None, **FEATURES[name]), found)
    assert_equal(run(s, 3, seed=1, **FEATURES[name]), found)


SHAPES = [((1, 1), (8, 8)), ((6, 2), (40, 24)), ((34, 2), (16, 72))]


@pytest.mark.parametrize("heads, headdims", SHAPES)
@pytest.mark.parametrize("dtype", sample([torch.float32, torch.bfloat16], torch.bfloat16))
def test_heads_headdims_and_dtypes(heads, headdims, dtype):
    s = sequences([1, 5], [130, 64], heads, headdims, dtype)
    check(s, run(s, causal=True), causal=True)


@pytest.mark.parametrize("split_size", [7, 63, 100, 10**6])
def test_any_piece(split_size):
    s = sequences([2], [130])
    check(s, run(s, split_size=split_size, causal=True), causal=True)


@pytest.mark.parametrize("name", sample(["causal", "window", "sinks"], "sinks"))
def test_one_launch_gives_the_bits_of_two(name):
    """Whether what lies between two launches has room decides nothing."""
    s = sequences(QUERIES, LENGTHS)
    found = []
    for workspace in (0, 2**30):
        plans, written = plans_of(s, 64, workspace, **FEATURES[name])
        assert len(plans) == (2 if workspace else 1)
        for plan in plans:
            launched(plan)
        found.append(written)
    assert_equal(*found)


@pytest.mark.parametrize("window", sample([(20, 0), (35, 3)]))
def test_tiles_of_a_block_begin_with_different_pieces(window, monkeypatch):
    """Of a window, which no program's first pieces may be taken from."""
    s = sequences([12, 7], [300, 250], (8, 2), dtype=torch.bfloat16)
    found = []
    for lead in (1, 3):
        monkeypatch.setattr(decode_launch, "lead_of", lambda *_, n=lead: n)
        plans, written = plans_of(s, 16, 2**30, window=window)
        for plan in plans:
            launched(plan)
        found.append(written)
    assert_equal(*found)


@pytest.mark.parametrize("name", sample(["causal", "window", "sinks"]))
def test_pieces_that_one_program_walks_change_no_bit(name, monkeypatch):
    """The first pieces that are seen: 1, some, all but one, all; in a window's middle, too."""
    s = sequences(QUERIES, LENGTHS)
    found, programs = [], []
    for lead in (1, 2, 3, 8, 100):
        monkeypatch.setattr(decode_launch, "lead_of", lambda *_, n=lead: n)
        plans, written = plans_of(s, 16, 2**30, **FEATURES[name])
        for plan in plans:
            launched(plan)
        found.append(written)
        programs.append(plans[0].programs)
    if name != "window":
        assert sorted(set(programs), reverse=True) == programs
    for mine in found[1:]:
        assert_equal(mine, found[0])


def test_a_program_walks_what_is_its_share():
    share = 2 * 128  # of programs, on 128 SMs
    assert decode_launch.lead_of(share // 16, 16, 512, 128) == 1
    assert decode_launch.lead_of(share // 4, 16, 512, 128) == 4
    assert decode_launch.lead_of(share * 4, 2, 512, 128) == 2
    assert decode_launch.lead_of(share * 4, 2**10, 512, 128) == decode_launch.LEAD // 512
    assert decode_launch.lead_of(share * 4, 2**10, 10**6, 128) == 1
    assert decode_launch.lead_of(8, 0, 512, 128) == 1


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_programs_suffice_for_any_lengths(tokens):
    for lengths in ([0, 0, 5], [1, 1, 1], [4, 5, 9], [0], [7, 0, 1, 1]):
        needed = sum(-(-n // tokens) for n in lengths)
        assert decode_launch.most_blocks(len(lengths), sum(lengths), tokens, True) >= needed


def plans_of(s, split_size, workspace, **options):
    """Launches for packed sequences in pages of 16, and where they write."""
    options = dict(causal=False, window=None, softcap=None, scale=None) | options
    k, v, table = paged(s, 16)
    numbers = *(options[x] for x in ("causal", "scale", "window", "softcap")), split_size
    learned = options.get("alibi_slopes"), options.get("sinks"), options.get("mask_mod")
    lengths = s.lengths, s.starts
    q = torch.cat(s.q)
    cached = check_cached(q, k, v, table, lengths, learned, numbers, "bshd")
    out = q.new_full((*q.shape[:2], v.shape[3]), 7.0)
    lse = torch.full(out.shape[1::-1], 7.0)
    plans = decode_launch.launches_of(cached, cached.problem, out, lse, Memory(), workspace)
    return plans, (out, lse)


@pytest.mark.parametrize("row_tiles", sample([2, 4], 4))
@pytest.mark.parametrize(
    "name, workspace", sample_rows([("window", 0), *((x, 2**30) for x in FEATURES)], ("window", 0))
)
def test_tiles_that_share_keys_have_the_bits_of_one_alone(name, workspace, row_tiles, monkeypatch):
    """Whichever tile of a block a row is in, and whatever the others see."""
    s = sequences([8, 1, 40, 3], [130, 96, 107, 5], (8, 2))
    options = FEATURES[name]
    if name in ("alibi", "sinks"):
        options = {**options, **{k: x.repeat(2) for k, x in options.items() if k != "causal"}}
    found = []
    for n in (1, row_tiles):
        monkeypatch.setattr(decode_launch, "row_tiles_of", lambda *_, n=n: n)
        plans, written = plans_of(s, 32, workspace, **options)
        assert plans[0].constants["ROW_TILES"] == n
        for plan in plans:
            launched(plan)
        found.append(written)
    assert_equal(*found)


@pytest.mark.parametrize("at_once", sample([1, 3], 3))
def test_pieces_that_are_loaded_at_once_are_folded_one_by_one(at_once):
    s = sequences([2, 1], [130, 20])
    found = []
    for n in (8, at_once):
        (split, fold), written = plans_of(s, 16, 2**30, causal=True)
        launched(split)
        fold.constants["AT_ONCE"] = n
        launched(fold)
        found.append(written)
    assert_equal(*found)


def test_a_choice_goes_by_the_queries():
    problem = describe(
        *(torch.empty(1, 1, n, 128) for n in (32, 8, 8)),
        Extras(),
        Scalars(1.0),
        "bottom_right",
        False,
    )
    problem = problem._replace(dtype=torch.bfloat16)
    choices = {n: decode_launch.choice_of(problem, n) for n in (0, 1, 4, 5, 8, 9, 10**5)}
    assert [x.rows for x in choices.values()] == [16, 16, 16, 32, 32, 32, 32]
    assert [x.row_tiles for x in choices.values()] == [1, 1, 1, 1, 1, 2, 2]
    assert len({x.tile for x in choices.values()}) == 1
    exact = problem._replace(dtype=torch.float32)
    assert {decode_launch.choice_of(exact, n)[3:5] for n in choices} == {(16, 1)}


def test_a_block_of_wide_tiles_has_whole_groups():
    """Of 3 query heads a key head 5 tokens have room in 16 rows, and 10 in 32."""
    s = sequences([40, 3], [107, 5], (6, 2))
    s = s._replace(**{x: [y.bfloat16() for y in getattr(s, x)] for x in ("q", "k", "v")})
    (split, fold), _ = plans_of(s, 32, 2**30)
    assert split.constants["TILE"].BLOCK_M == 32 and split.constants["ROW_TILES"] == 2
    assert fold.constants["TILE"].BLOCK_M == 16
    assert split.args["partials"].lead is None
    assert split.programs == (43 + 2 * 19) // 20 * 2 * split.args["cache"].pages // 2


def test_a_batch_of_queries():
    s = sequences([2, 2], [70, 9])
    k, v, table = paged(s, 8)
    options = dict(page_table=table, seqused_k=s.lengths, causal=True, return_lse=True)
    q = torch.stack(s.q)
    out, lse = tilewise.attention(q, k, v, split_size=32, backend="portable", **options)
    packed, packed_lse = run(s, 8, split_size=32, causal=True)
    assert torch.equal(out.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


@pytest.mark.parametrize("name", sample(["causal", "window", "alibi"], "causal"))
def test_the_contract_among_one_to_eight_queries(name):
    """C0, C1 and C2: neither mates nor order nor pages nor how many queries are verified at once
    change a bit; on lengths of three pieces and more.
    """
    s = sequences([8, 1, 3], [130, 96, 107])
    options = FEATURES[name] | dict(split_size=32)
    out, _ = run(s, 16, **options)
    turned = type(s)(*(x[::-1] for x in s))
    found, _ = run(turned, 5, seed=3, **options)
    assert torch.equal(torch.cat(found.split([3, 1, 8])[::-1]), out)
    options |= dict(causal=True)
    whole = run(type(s)([s.q[0]], [s.k[0]], [s.v[0]]), 16, **options)
    for a, b in ((0, 1), (1, 5), (3, 8), (7, 8)):
        n = 130 - 8 + b
        part = type(s)([s.q[0][a:b]], [s.k[0][:n]], [s.v[0][:n]])
        found = run(part, 8, **options)
        assert_equal(found, (whole[0][a:b], whole[1][:, a:b]))


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_what_is_not_in_use_changes_nothing(fill):
    s = sequences([1, 2, 2], [100, 33, 0])
    expected = run(s, None, causal=True, window=(40, 0))
    k, v, table = paged(s, 8, fill=fill)
    first = (100 - 1 - 40) // 8
    k[table[0, :first].long()] = fill
    table[0, :first] = -1
    q = torch.cat([*s.q, torch.full((3, 4, 16), math.nan)])
    out = torch.full_like(q, 7.0)
    found, lse = tilewise.attention(
        *(q, k, v),
        page_table=torch.cat([table, torch.full_like(table, -1)]),
        seqused_k=torch.cat([s.lengths, torch.zeros(3, dtype=INT32)]),
        cu_seqlens_q=torch.cat([s.starts, s.starts[-1:].expand(3)]),
        **dict(causal=True, window=(40, 0), split_size=64, out=out, return_lse=True),
        backend="portable",
    )
    assert torch.equal(found[:5], expected[0]) and torch.equal(lse[:, :5], expected[1])
    assert (found[5:] == 7).all()
    assert (found[3:5] == 0).all() and (lse[:, 3:5] == -math.inf).all()


def test_lengths_and_entries_that_are_wrong_read_what_is_there(monkeypatch):
    monkeypatch.setattr(values, "knows_values", lambda x: False)  # as on a GPU
    s = sequences([1, 1], [64, 32])
    k, v, table = paged(s, 16, fill=0.0)
    table[1, 1] = 2**31 - 1
    used = torch.tensor([2**31 - 1, -5], dtype=INT32)
    at = dict(page_table=table[:, :3], cu_seqlens_q=s.starts, split_size=16, backend="portable")
    found = tilewise.attention(torch.cat(s.q), k, v, seqused_k=used, **at)
    fit = torch.tensor([48, 0], dtype=INT32)
    expected = tilewise.attention(torch.cat(s.q), k, v, seqused_k=fit, **at)
    assert torch.equal(found, expected) and (found[1] == 0).all()


# appending


def tables(positions, rotary_dim):
    angles = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(0, rotary_dim, 2) / 9))
    return angles.cos(), angles.sin()


def both(call):
    """What the kernel of the CPU and the interpreted one make of zeros."""
    found = []
    for backend in ("cpu", "portable"):
        caches = torch.zeros(2, 9, 8, 3, 24).unbind(0)
        if backend == "cpu":
            from tilewise.kernels.cpu.append import append
        else:
            from tilewise.kernels.portable.append_launch import append
        append(call(*caches))
        found.append(torch.stack(caches))
    return found


@pytest.mark.parametrize("interleaved", [False, True, None])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [None, 8])
def test_appending(page_size, packed, interleaved):
    k, v = torch.randn(2, 3, 4, 3, 24).unbind(0)
    starts = torch.tensor([0, 7, 7, 10], dtype=INT32) if packed else None
    if packed:
        k, v = k.flatten(0, 1), v.flatten(0, 1)  # two rows belong to no sequence
    rotary = None if interleaved is None else cache.Rotary(*tables(20, 16), interleaved)
    table = torch.tensor([[5, 0, -1], [8, 2, 1], [3, 2**31 - 1, 4]], dtype=INT32)
    used = torch.tensor([9, 2, 13], dtype=INT32)

    def call(k_cache, v_cache):
        if page_size is None:
            k_cache, v_cache = (x.view(3, 24, 3, 24) for x in (k_cache, v_cache))
        place = None if page_size is None else table
        return cache.Append(k_cache, v_cache, k, v, place, used, starts, None, rotary)

    cpu, portable = both(call)
    assert cpu.count_nonzero() > 0
    torch.testing.assert_close(portable, cpu, atol=1e-6, rtol=1e-6)


def test_slots_and_their_last_key():
    k, v = torch.randn(2, 40, 3, 24).unbind(0)
    slots = torch.randint(-5, 75, (40,))
    slots[::3] = 11
    cpu, portable = both(lambda *caches: cache.Append(*caches, k, v, None, None, None, slots, None))
    assert torch.equal(cpu, portable) and cpu[0].flatten(0, 1)[11].any()


def test_an_append_and_a_decode_in_the_interpreter():
    q, k, v = torch.randn(2, 1, 6, 24), torch.randn(2, 1, 3, 24), torch.randn(2, 1, 3, 24)
    where = dict(
        page_table=torch.tensor([[1, 0], [2, 3]], dtype=INT32),
        seqused_k=torch.tensor([9, 3], dtype=INT32),
    )
    found = []
    for backend in ("portable", "cpu"):
        k_cache, v_cache = torch.ones(2, 4, 8, 3, 24).unbind(0)
        cache.append(k_cache, v_cache, k, v, **where)
        found.append(tilewise.attention(q, k_cache, v_cache, backend=backend, **where))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
