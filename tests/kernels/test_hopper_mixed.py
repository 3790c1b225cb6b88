"""Steps of decodes and chunks over a KV cache in the emulator: two launches, each of which computes
its own sequences.
"""

import functools
import math

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.caches import contiguous, paged, sequences
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise.frontend.scalars import longest_of
from tilewise.kernels.common.decode_step import program_of
from tilewise.kernels.common.direct import filler
from tilewise.kernels.hopper import tile_counter
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.kernels.hopper.launch import Launch
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within
from tilewise.tile.types import Optionals

BF16 = torch.bfloat16
CHUNK = 32  # queries from which on a packed sequence is one, below
QUERIES = [1, 70, 0, 3, 32, 31]
LENGTHS = [300, 133, 90, 0, 20, 64]  # of the fourth none sees a key, of the fifth some
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(40, 0)),
    "softcap": dict(causal=True, softcap=3.0, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
}


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """Counters of one stream, as launches find and leave them; few queries are a chunk."""
    counters = torch.zeros(1 << 14, dtype=torch.int32)
    monkeypatch.setattr(tile_counter, "counters", lambda *_, count: counters)
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 2 * CHUNK)
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: 1)
    yield
    assert not counters.any()


def drawn(queries=QUERIES, lengths=LENGTHS, heads=(4, 1), headdims=(64, 64), seed=0):
    return sequences(queries, lengths, heads, headdims, BF16, seed)


def run(s, page_size=16, seed=0, tail=5, longest=None, **options):
    """Of rows behind the last sequence, too."""
    cache = dict(k=contiguous(s.k), v=contiguous(s.v), seqused_k=s.lengths)
    if page_size is not None:
        cache |= dict(zip(("k", "v", "page_table"), paged(s, page_size, seed)))
    q = torch.cat([*s.q, s.q[0].new_full((tail, *s.q[0].shape[1:]), math.nan)])
    options = dict(max_seqlen_q=longest or max(map(len, s.q)), return_lse=True) | options
    with use_emulator(seed):
        out, lse = tilewise.attention(q, **cache, cu_seqlens_q=s.starts, **options)
    rows = [len(x) for x in s.q]
    if tail and "out" not in options:
        assert (out[-tail:] == 0).all() and (lse[:, -tail:] == -math.inf).all()
    total = sum(rows)
    return list(zip(out[:total].split(rows), lse[:, :total].split(rows, 1)))


def alone(s, i, page_size, **options):
    """A sequence as a batch of one."""
    s = type(s)(*([x[i]] for x in s))
    k, v, table = paged(s, page_size, 7) if page_size else (*map(contiguous, s[1:]), None)
    cache = dict(k=k, v=v, page_table=table, seqused_k=s.lengths)
    with use_emulator(3):
        out, lse = tilewise.attention(s.q[0][None], **cache, return_lse=True, **options)
    return out[0], lse[0]


def test_only_a_kernel_that_waits_may_begin_early(monkeypatch):
    """The kernel before may let it begin before all is written that it reads."""
    early, start = [], Launch.start

    def started(launch, values, device):
        early.append((launch.options.get("launch_pdl", False), launch.constants["FEATURES"].CHUNK))
        return start(launch, values, device)

    monkeypatch.setattr(Launch, "start", started)
    run(drawn(), causal=True)
    assert [is_early for is_early, _ in early] == [False, True]
    early.clear()
    q, k, v = torch.randn(3, 1, 70, 4, 64, dtype=BF16).unbind(0)
    starts = torch.tensor([0, 30, 70], dtype=torch.int32)
    with use_emulator(0):
        tilewise.attention(q, k, v, causal=True)
        tilewise.attention(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert early and not any(is_early for is_early, _ in early)
    early.clear()
    s = drawn(queries=[70, 70], lengths=[133, 300])
    cache = dict(zip(("k", "v", "page_table"), paged(s, 16, 0)))
    with use_emulator(0):
        tilewise.attention(torch.stack(s.q), **cache, seqused_k=s.lengths, causal=True)
    assert early and all(chunk > 0 for is_early, chunk in early if is_early)


def check(s, found, **options):
    for i, triple in enumerate(zip(*s)):
        q, k, v = (x[None] for x in triple)
        if not q.numel():
            continue
        exact = tilewise.attention_reference(
            *(x.double() for x in (q, k, v)), return_lse=True, **options
        )
        rough = tilewise.attention_reference(q, k, v, upcast=False, return_lse=True, **options)
        for name, mine, right, near in zip(("out", "lse"), found[i], exact, rough):
            assert_within(mine[None], right, near, f"{name} of sequence {i}")


def assert_equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("page_size", sample([16, None, 64], 16))
@pytest.mark.parametrize("name", sample(FEATURES, "causal"))
def test_each_sequence_has_the_bits_it_has_alone(name, page_size):
    s, options = drawn(), FEATURES[name]
    found = run(s, page_size, **options)
    check(s, found, **options)
    assert_equal([alone(s, 1, page_size, **options)], [found[1]])  # a chunk in a batch, too
    few = type(s)(*([x[i] for i in (0, 2, 3, 5)] for x in s))
    assert_equal(run(few, page_size, seed=1, **options), [found[i] for i in (0, 2, 3, 5)])


SHAPES = [((8, 1), (128, 128)), ((4, 4), (192, 128)), ((4, 2), (256, 256))]


@pytest.mark.parametrize("heads, headdims", sample_rows(SHAPES, SHAPES[0]))
def test_heads_and_headdims(heads, headdims):
    s = drawn([1, 40, 2], [150, 80, 30], heads, headdims)
    check(s, run(s, causal=True), causal=True)


def test_batch_mates_change_no_bit():
    """And where nothing is for one of the launches, it ends."""
    s = drawn()
    found = run(s, causal=True)
    turned = type(s)(*(x[::-1] for x in s))
    assert_equal(run(turned, seed=1, causal=True)[::-1], found)
    for places in ([1], [0, 3], [1, 4], [2]):
        part = type(s)(*([x[i] for i in places] for x in s))
        assert_equal(run(part, seed=2, longest=70, causal=True), [found[i] for i in places])


def test_many_sequences():
    """More than a warp looks at together."""
    queries = [1] * 33 + [40] + [1] * 33 + [35, 2]
    s = drawn(queries, [64 + i % 5 for i in range(len(queries))], (2, 2))
    found = run(s, causal=True)
    check(s, found, causal=True)


def test_it_writes_the_callers_out_and_no_other_rows():
    s = drawn()
    expected = run(s, causal=True)
    out = torch.full((sum(QUERIES) + 5, 4, 64), 7.0, dtype=BF16)
    found = run(s, causal=True, out=out)
    assert_equal(found, expected)
    assert (out[-5:] == 7).all()


def cached_of(heads=(32, 8), longest=0, kept=BF16):
    q, k = torch.empty(130, heads[0], 64, dtype=BF16), torch.empty(9, 16, heads[1], 64, dtype=kept)
    lengths = torch.ones(2, dtype=torch.int32), torch.tensor([0, 1, 130], dtype=torch.int32)
    table = torch.zeros(2, 4, dtype=torch.int32)
    asked = *(q, k, k, table, lengths), (None, None, None), (True, None, None, None, None), "bshd"
    return check_cached(*asked)._replace(longest=longest)


def test_which_sequences_are_chunks(monkeypatch):
    """A bound on lengths says whether there may be some, as a power of two."""
    monkeypatch.undo()
    assert [longest_of(n) for n in (None, 0, 1, 63, 64, 2048, 3000)] == [
        0,
        0,
        1,
        32,
        64,
        2048,
        2048,
    ]
    heads = (32, 8), (8, 1), (128, 128), (512, 8)
    assert [schedules.least_of(cached_of(x)) for x in heads] == [64, 256, 64, 16]
    out = torch.empty(130, 32, 64, dtype=BF16)
    assert schedules.why_in_pieces(cached_of(longest=64), out) is None
    assert "max_seqlen_q" in schedules.why_in_pieces(cached_of(longest=32), out)
    eight_bits = cached_of(longest=64, kept=torch.int8)
    assert schedules.why_in_pieces(eight_bits, out) is None


def test_addresses_are_in_the_places_of_their_arguments():
    """Of later launches, of which a chunk's arguments have another order than a step's."""
    s = drawn([40], [50])
    slopes, sinks = torch.ones(4), torch.ones(4)
    cached = check_cached(
        *(torch.stack(s.q), contiguous(s.k), contiguous(s.v), None),
        *((s.lengths, None), (slopes, sinks, None), (True, None, None, None, None), "bshd"),
    )
    out, lse = torch.empty(1, 40, 4, 64), torch.empty(1, 4, 40)
    program = program_of(cached, out, lse, schedules.launches_of)
    (launch,) = program.launches
    names = "q", "k", "v", "seqused_k", "alibi_slopes", "sinks", "out", "lse", "tile_counter"
    assert program.names == [*names] and program.takes_addresses
    fill = filler(launch.positional, program.names)
    *described, of_lse, _, optionals = fill(*range(1, 1 + len(program.names)))[:7]
    assert [x[0] for x in described] == [1, 2, 3, 7] and of_lse == 8
    optionals = Optionals(*optionals)
    assert (optionals.seqused_k, optionals.alibi_slopes, optionals.sinks) == (4, 5, 6)


def test_addresses_of_packed_chunks(monkeypatch):
    """They have a counter of their own, and slopes and sinks are no lengths."""
    cached = cached_of(longest=64)
    slopes, sinks = torch.ones(32), torch.ones(32)
    extras = cached.extras._replace(alibi_slopes=slopes, sinks=sinks)
    cached = cached._replace(extras=extras)
    out, lse = torch.empty(130, 32, 64, dtype=BF16), torch.empty(32, 130)
    launches = functools.partial(schedules.launches_of, chunk=64)
    program = program_of(cached, out, lse, launches)
    names = "q", "k", "v", "page_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks"
    names += "out", "lse", "acc_o", "m_i", "l_i", "tile_counters"
    assert program.names == [*names] and program.takes_addresses
    (shared,) = program.provided
    decodes, chunks = program.launches
    handed_out, by_tile = decodes.args["counters"]
    counter = chunks.args["queue"].counter
    assert handed_out is shared and by_tile.base == counter.base == shared.name
    assert (by_tile.encode(1000), counter.encode(1000)) == (1256, 1128)
    optionals, named = chunks.args["optionals"], ("alibi_slopes", "sinks", "seqused_k")
    assert [getattr(optionals, name).name for name in (*named, "cu_seqlens_q")] == [
        *named,
        "cu_seqlens_q",
    ]
    assert optionals.pages.page_table.name == "page_table"
