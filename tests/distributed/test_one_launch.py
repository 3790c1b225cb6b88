"""One launch for all runs of a rank, whose keys arrive while it runs: in the emulator, on one
process that is every rank, and on two.
"""

import random

import pytest
import torch
import torch.distributed as dist
from helpers.call_specs import call_of, launch_runs
from helpers.device_arena import CPU, device_arena
from helpers.nodes import elsewhere
from helpers.processes import run
from helpers.tiers import sample, sample_rows

import tilewise
import tilewise.distributed as td
from gluon_emulator.hopper.arrivals import Arrivals
from gluon_emulator.hopper.machine import Deadlock, HopperError
from tilewise.distributed.layouts.work import Band
from tilewise.distributed.methods import one_launch, stream
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport import device_barrier
from tilewise.kernels.common.device_words import ARRIVED, FAILED, LATE, WORDS
from tilewise.kernels.hopper.fwd import runs_launch
from tilewise.problem import Scalars
from tilewise.testing import use_emulator

SEQLEN, RANKS, HEADS = 1100, 2, (4, 2)
CAUSAL = dict(causal=True)
DOCUMENTS = 0, 100, 101, 620, SEQLEN
CASES = {
    "causal": CAUSAL,
    "full": {},
    "window": dict(CAUSAL, window=(200, 0)),
    "both sides": dict(window=(150, 70)),
    "left": dict(window=(150, None)),
    "sinks": dict(CAUSAL, sinks=True, softcap=4.0),
    "alibi": dict(window=(None, 40), alibi=True),
    "documents": dict(CAUSAL, docs=DOCUMENTS),
    "documents, window": dict(docs=DOCUMENTS, window=(90, 20)),
    "headdim 128": dict(CAUSAL, headdim=128),
}
LAYOUTS = {
    "zigzag": lambda: td.zigzag(SEQLEN, RANKS),
    "contiguous": lambda: td.contiguous(SEQLEN, RANKS),
    "striped": lambda: td.striped(SEQLEN, RANKS, block=170),
}


class Here:
    """What a launch asks of an arena."""

    limit, nodes = 10**9, None

    def __init__(self):
        self.words = torch.zeros(WORDS, dtype=torch.int32)


class Whole:
    """Inputs of a case, and what one call makes of them."""

    def __init__(
        self,
        headdim=64,
        docs=None,
        sinks=False,
        alibi=False,
        seqlen=SEQLEN,
        heads=HEADS,
        **options,
    ):
        draw = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (
            torch.randn(1, seqlen, n, headdim, generator=draw).bfloat16()
            for n in (heads[0], heads[1], heads[1])
        )
        if sinks:
            options["sinks"] = torch.randn(heads[0], generator=draw)
        if alibi:
            options["alibi_slopes"] = torch.rand(heads[0], generator=draw) / 10
        self.options, self.docs = options, docs

    def one(self):
        given = self.q, self.k, self.v
        if self.docs is None:
            return tilewise.attention(*given, return_lse=True, **self.options)
        starts = torch.tensor(self.docs, dtype=torch.int32)
        lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
        out, lse = tilewise.attention(
            *(x[0] for x in given), return_lse=True, **lengths, **self.options
        )
        return out[None], lse[None]

    def deal(self, layout):
        return layout if self.docs is None else layout.packed(self.docs)


def grouped(x, groups):
    """(groups, seqlen, 1, heads, headdim) of all keys."""
    return x.transpose(0, 1).unflatten(2, (groups, -1)).movedim(2, 0).contiguous()


def launched(case, layout, groups, seed, arena=None, deliver=lambda pieces: pieces):
    """The launch on one rank, of keys that are not there but for its own."""
    arena = Here() if arena is None else arena
    q, *local = (layout.shard(x) for x in (case.q, case.k, case.v))
    spec = call_of(layout, q, *local, **case.options)
    whole = [grouped(x, groups) for x in (case.k, case.v)]
    found = [torch.zeros_like(x) for x in whole]
    for start, stop in layout.runs[layout.rank]:
        for x, y in zip(found, whole):
            x[:, start:stop] = y[:, start:stop]
    pieces = [
        [(x[group, start:stop], y[group, start:stop]) for x, y in zip(found, whole)]
        for group in range(groups)
        for _, _, start, stop in one_launch.remote_pulls(layout, spec.band)
    ]
    beside = {}
    if pieces:
        beside = dict(arrivals=Arrivals(arena.words[ARRIVED], deliver(pieces)))
    with use_emulator(seed):
        return launch_runs(arena, spec, q, *local, pulled=found, **beside)


PAIRS = [(name, kind) for name in CASES for kind in LAYOUTS]
FAST = ("both sides", "zigzag"), ("documents, window", "striped")


@pytest.mark.parametrize("name, kind", sample_rows(PAIRS, *FAST))
def test_the_bits_of_one_call_as_pieces_arrive_at_random(name, kind):
    case = Whole(**CASES[name])
    with use_emulator():
        out, lse = case.one()
    layout = case.deal(LAYOUTS[kind]())
    for rank in range(RANKS):
        mine = layout.at(rank)
        groups = 1 + (rank + len(name)) % 2
        found = launched(case, mine, groups, seed=rank + len(name))
        assert torch.equal(found[0], mine.shard(out)), f"out of rank {rank}"
        assert torch.equal(found[1], mine.shard(lse, 2)), f"lse of rank {rank}"


@pytest.fixture
def wrong_waits(monkeypatch):
    """Sets what blocks of keys wait for."""
    made = one_launch.walk_of

    def set_to(waits):
        one_launch._forward_of.cache_clear()

        def walk_of(*asked, **more):
            walk = made(*asked, **more)
            return walk._replace(waits=tuple(map(waits, walk.waits)))

        monkeypatch.setattr(one_launch, "walk_of", walk_of)

    yield set_to
    one_launch._forward_of.cache_clear()


@pytest.mark.parametrize("seed", sample(range(9), 1))
def test_every_mode_of_arrival(seed):
    """The emulator's modes: copies that land at once, late, or when all wait."""
    case = Whole(**CAUSAL)
    with use_emulator():
        out, _ = case.one()
    layout = td.zigzag(SEQLEN, RANKS).at(seed % 2)
    found = launched(case, layout, 2, seed)
    assert torch.equal(found[0], layout.shard(out))


def test_a_piece_that_is_not_waited_for_is_an_error(wrong_waits):
    wrong_waits(lambda piece: 0)
    with pytest.raises(HopperError, match="starts a copy of piece 1 of 2, and has waited for 0"):
        launched(Whole(**CAUSAL), td.zigzag(SEQLEN, RANKS), 2, 0)


@pytest.mark.parametrize("seed", sample(range(8), 1))
def test_random_layouts(seed):
    draw = random.Random(seed)
    seqlen, ranks = draw.randrange(2, 1300), draw.choice((2, 3, 4))
    docs = tuple(sorted((0, *(draw.randrange(seqlen + 1) for _ in range(3)), seqlen)))
    sides = [draw.choice((None, 0, draw.randrange(400))) for _ in range(2)]
    heads, groups = draw.choice((((4, 2), 1), ((2, 2), 2), ((6, 2), 2), ((8, 1), 1)))
    case = Whole(
        headdim=draw.choice((40, 64, 128)),
        docs=draw.choice((None, docs)),
        seqlen=seqlen,
        heads=heads,
        window=tuple(sides),
        sinks=draw.random() < 0.3,
    )
    made = draw.choice((td.zigzag, td.contiguous, td.striped))
    layout = case.deal(made(seqlen, ranks))
    with use_emulator():
        out, lse = case.one()
    for rank in range(ranks):
        mine = layout.at(rank)
        if mine.tokens:
            found = launched(case, mine, groups, seed=draw.randrange(9))
            assert torch.equal(found[0], mine.shard(out)), (layout, rank, case.options)
            assert torch.equal(found[1], mine.shard(lse, 2)), (layout, rank, case.options)


ENTRIES = [(1, 150, (1, 1, 0, 2, 0)), (2, None, (2, 2, 1, 0, 0))]


@pytest.mark.parametrize("rank, window, waits", sample_rows(ENTRIES, ENTRIES[0]))
def test_blocks_that_lie_in_two_entries(rank, window, waits):
    """The block from key 712 on, with keys that wait from 768 on, or before."""
    docs = 0, 200, 1152
    case = Whole(seqlen=1152, docs=docs, window=(None, window))
    layout = td.contiguous(1152, 3).at(rank).packed(docs)
    band = Band() if window is None else Band(right=window)
    assert one_launch.walk_of(layout, band, heads=2).waits == waits
    with use_emulator():
        out, _ = case.one()
    for seed in range(3):
        assert torch.equal(launched(case, layout, 1, seed)[0], layout.shard(out))


@pytest.mark.parametrize("mixed", sample([1, 3]))
def test_the_bits_where_few_heads_are_interleaved(mixed, monkeypatch):
    """As those of long sequences are."""
    monkeypatch.setattr(runs_launch, "heads_per_l2_group", lambda *_, **named: mixed)
    case = Whole(**CAUSAL, heads=(8, 4))
    with use_emulator():
        out, lse = case.one()
    layout = td.zigzag(SEQLEN, RANKS).at(1)
    found = launched(case, layout, 2, seed=mixed)
    assert torch.equal(found[0], layout.shard(out)) and torch.equal(found[1], layout.shard(lse, 2))


def test_one_piece_less_is_an_error(wrong_waits):
    """Where rows of the last piece are said to come with the one before."""
    wrong_waits(lambda piece: max(piece - 1, min(piece, 1)))
    layout = td.striped(SEQLEN, RANKS, block=300)
    with pytest.raises(HopperError, match="starts a copy of piece 2 of 2, and has waited for 1"):
        for seed in range(9):
            launched(Whole(), layout, 1, seed)


def test_pieces_that_never_come_are_named():
    with pytest.raises(Deadlock, match=r"load_partition waits for piece 2, of which 1 arrived"):
        launched(Whole(**CAUSAL), td.zigzag(SEQLEN, RANKS), 2, 1, deliver=lambda x: x[:1])


def test_a_wait_ends_and_leaves_what_did_not_come():
    arena = Here()
    arena.limit = 0
    layout = td.zigzag(SEQLEN, RANKS)
    launched(Whole(**CAUSAL), layout, 2, 0, arena, deliver=lambda x: x[:0])
    assert arena.words[FAILED] == 1 and arena.words[LATE] in (1, 2) and arena.words[ARRIVED] == 0


def test_orders_of_tiles():
    """The longest first; of the first group those that wait for nothing before them. Each order has
    each tile once.
    """
    layout = td.zigzag(4096, 2)
    walk, scalars = one_launch.walk_of(layout, Band(right=0), heads=1), Scalars(1.0, right=0)
    assert walk.waits == (0,) * 4 + (1,) * 8 + (0,) * 5 and walk.pieces == 1
    tiles = runs_launch.count_tiles(walk, 128)
    table = runs_launch.table_of(walk, scalars, 128, 2, CPU)
    head, table = (x.tolist() for x in table.split((5, 12 * tiles + 17)))
    assert head == [16, 1, 4096, 1, 2]
    orders, waits = table[: 12 * tiles], table[12 * tiles :]
    assert tuple(waits) == walk.waits and tiles == 16
    rows = [tuple(orders[6 * i : 6 * i + 6]) for i in range(2 * tiles)]
    first, later = rows[:tiles], rows[tiles:]
    assert len(set(first)) == tiles and set(first) == set(later)
    ends = [m_start + diagonal for m_start, *_, diagonal in later]
    assert ends == sorted(ends, reverse=True)
    assert [x[2] for x in first] == [0] * 8 + [1024] * 8  # the run at the front sees its own alone
    assert [x[0] for x in first] == [*range(896, -1, -128)] * 2


def test_groups_are_as_many_as_leave_few_copies():
    layout = td.zigzag(65536, 4)
    assert one_launch.groups_of(layout, 8, 65536 * 256) == 8
    assert one_launch.groups_of(layout, 6, 65536 * 256) == 6
    assert one_launch.groups_of(layout, 8, 1 << 22) == 2  # longer copies
    assert one_launch.groups_of(td.striped(65536, 4), 8, 65536 * 256) == 1
    assert all(one_launch.groups_of(layout.at(r), 8, 1 << 30) == 8 for r in range(4))


def both(rank):
    """What GPUs run but for streams: the pieces through the arena, in the emulator."""
    one_launch.LEAST_BYTES = 0
    group = dist.group.WORLD
    arena = arenas._arenas[group, CPU] = device_arena()
    counted, count = [], arena.count
    arena.count = lambda arrived: counted.append(arrived) or count(arrived)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    zigzag, contiguous = td.zigzag(SEQLEN, group), td.contiguous(SEQLEN, group)
    for asked, layout in (
        (CAUSAL, zigzag),
        (dict(CAUSAL, docs=DOCUMENTS, sinks=True), zigzag),
        (dict(window=(150, 40)), zigzag),
        (dict(CAUSAL, window=(150, 0)), contiguous),
    ):
        case = Whole(**asked)
        layout = case.deal(layout)
        with use_emulator(), torch.no_grad():
            out, lse = case.one()
            shards = (layout.shard(x) for x in (case.q, case.k, case.v))
            before, counted[:] = arena.pulled, [0]
            found = td.attention(
                *shards, layout=layout, method="stream", return_lse=True, **case.options
            )
        assert arena.words[ARRIVED] == counted[-1] and (counted[-1] or layout is not zigzag)
        assert torch.equal(found[0], layout.shard(out))
        assert torch.equal(found[1], layout.shard(lse, 2))
        spec = call_of(layout, *map(layout.shard, (case.q, case.k, case.v)), **case.options)
        pulled = sum(stop - start for *_, start, stop in one_launch.remote_pulls(layout, spec.band))
        row = case.k[0, 0].numel() * 2 * case.k.itemsize
        assert arena.pulled - before == pulled * row


@pytest.mark.slow
def test_two_ranks():
    run(both, 2)


def between_nodes(rank):
    """Each group of heads is a launch of its own, with the bits of one call."""
    stream.LEAST_ROWS = 1
    group, launched = dist.group.WORLD, []
    torch.use_deterministic_algorithms(True)
    zigzag, contiguous = td.zigzag(SEQLEN, group), td.contiguous(SEQLEN, group)
    with elsewhere((0, 1), rank):
        arena = device_arena()
        arena.count = None
        parts, striped = one_launch._parts, td.striped(SEQLEN, group, block=170)
        one_launch._parts = lambda *x, **named: launched.append(0) or parts(*x, **named)
        for asked, layout, is_in_place in (
            (dict(CAUSAL, sinks=True), zigzag, True),
            (dict(CAUSAL, docs=DOCUMENTS, headdim=40), zigzag, False),
            (dict(window=(150, 40), alibi=True), contiguous, False),
            (dict(CAUSAL, headdim=40), striped, False),
            (dict(headdim=40), contiguous, True),
        ):
            case = Whole(**asked, heads=(8, 4))
            layout, pull = case.deal(layout), arena.pull
            arena.pull = None if is_in_place else pull
            with use_emulator(), torch.no_grad():
                out, lse = case.one()
                shards = [layout.shard(x) for x in (case.q, case.k, case.v)]
                asked = dict(layout=layout, method="stream", return_lse=True, **case.options)
                for _ in range(2):
                    found = td.attention(*shards, **asked)
                    assert len(launched) == 4
                    launched.clear()
                    assert torch.equal(found[0], layout.shard(out))
                    assert torch.equal(found[1], layout.shard(lse, 2))
            arena.pull = pull


@pytest.mark.slow
def test_two_nodes():
    run(between_nodes, 2)


def late(rank):
    """Pieces that do not come within the time-out: NaN, and an error of the next call."""
    group = dist.group.WORLD
    arena = arenas._arenas[group, CPU] = device_arena()
    arena.limit, arena.count = 0, lambda arrived: None
    order = []
    for name in ("arrive", "settle"):
        given = getattr(arena, name)
        setattr(arena, name, lambda *x, name=name, given=given: order.append(name) or given(*x))
    case, layout = Whole(**CAUSAL), td.contiguous(SEQLEN, group)
    shards = [layout.shard(x) for x in (case.q, case.k, case.v)]

    def call():
        with use_emulator(), torch.no_grad():
            return td.attention(*shards, layout=layout, method="stream", causal=True)

    out = call()
    # The host learns what is late before anything waits for copies that may never end
    assert order == ["settle", "arrive"]
    if rank == 0:  # which sees its own keys alone
        assert out.isfinite().all()
        return
    assert out.isnan().all()
    device_barrier.synchronize = None  # which would wait for these copies
    arena.barrier.number += 1  # a host that is ahead has begun a call of another window
    arena.barrier.expect((1, 1))
    with pytest.raises(td.PullTimeout, match=r"piece 1 of 1 of the keys, of rank 0, did not"):
        call()
    with pytest.raises(td.RankLost, match="make a new process group"):
        call()


def test_pieces_that_are_late_are_an_error():
    run(late, 2)
