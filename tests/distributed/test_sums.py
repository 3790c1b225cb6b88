"""The parts of the gradients of keys are exchanged in slices, in the room that K and V have had,
and computed for some heads at a time where all would take much memory.
"""

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from helpers.shards import FEATURES, Case, compare, deals
from helpers.tiers import pairwise

import tilewise.distributed as td
from tilewise.distributed.layouts.work import Band, KeyRun, keys_of
from tilewise.distributed.methods import stream, sum_tables, sums
from tilewise.distributed.transport import halves
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.exchange import ALIGN

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

CPU = torch.device("cpu")
LAYOUTS = (
    td.zigzag(1000, 4),
    td.contiguous(37, 5),
    td.striped(500, 3, block=16),
    td.from_positions([torch.arange(7, 9), torch.arange(7), torch.arange(0)], 3),
    td.documents([0, 700, 700, 3000], 2),
)


BANDS = [Band(right=0), Band(20, 0), Band(5, 9), Band()]


@pytest.mark.parametrize("layout, band, each", pairwise(LAYOUTS, BANDS, [1, 5, 10000]))
def test_each_row_is_added_once(layout, band, each):
    """As shared or as private; the places are those of the same positions on all ranks."""
    half = layout.seqlen // 2
    runs = KeyRun(0, 0, half), KeyRun(half, 0, layout.seqlen)
    found = [
        sum_tables.tables_of(layout.at(rank), band, slice_rows=each, runs=runs, device=CPU)
        for rank in range(layout.ranks)
    ]
    for rank, of in enumerate(found):
        mine = layout.at(rank)
        positions = [torch.arange(a, b) for a, b in (*mine.runs[rank], (0, 0))]
        places = sum_tables.places_of(runs, layout.seqlen)[torch.cat(positions)]
        assert torch.cat([of.shared[:, 1], of.private]).sort().values.tolist() == [
            *range(mine.tokens)
        ]
        assert torch.equal(of.private_places, places[of.private.long()])
        assert [x.rows for x in of.slices] == [len(x) for x in of.places]
        assert all(x.rows <= each * layout.ranks for x in of.slices)
        assert all(map(torch.equal, of.places, found[0].places))
        ours = [x[y.place :][: y.stop - y.first] for x, y in zip(of.places, of.slices)]
        assert torch.equal(torch.cat([*ours, places[:0]]), places[of.shared[:, 1].long()])
        ends = [0, *[x.stop for x in of.slices]]
        assert [x.first for x in of.slices] == ends[:-1] and ends[-1] == len(of.shared)


@pytest.mark.parametrize("counts", [(4, 8), (1, 0, 9), (100, 100), (7,), (0, 0)])
@pytest.mark.parametrize("each", [1, 2, 3, 50])
def test_few_slices(counts, each):
    """As few as fit, and of all owners the same share."""
    most = each * len(counts)
    slices = [sum_tables.slices_of(counts, rank, slice_rows=each) for rank in range(len(counts))]
    assert all(len(x) == -(-sum(counts) // most) for x in slices)
    for pieces in zip(*slices):
        sizes = [x.stop - x.first for x in pieces]
        assert {x.rows for x in pieces} == {sum(sizes)} and 0 < sum(sizes) <= most
        assert [x.place for x in pieces] == [sum(sizes[:r]) for r in range(len(sizes))]
        assert all(abs(n - m / len(slices[0])) < 2 for n, m in zip(sizes, counts))
    for count, mine in zip(counts, slices):
        ends = [0, *[x.stop for x in mine]]
        assert [x.first for x in mine] == ends[:-1] and ends[-1] == (count if mine else 0)


@pytest.mark.parametrize("row_bytes", [1024, 608, 16, 0])
@pytest.mark.parametrize("room", [128, 4096, 65536])
def test_slices_fit_the_room(row_bytes, room):
    """The arena's rooms are multiples of ALIGN."""

    def nbytes(each):
        return -(-each * 4 * row_bytes // ALIGN) * ALIGN

    each = sum_tables.most_rows(room, row_bytes, ranks=4)
    assert nbytes(each) <= room or each == 1
    if row_bytes:
        assert nbytes(each + 1) > room  # and no smaller than need be: 2 N of 16 bits


def test_more_ranks_than_a_word_has_bits():
    """Parts of all are added, by runs of rows."""
    layout, runs = td.contiguous(120, 40), (KeyRun(0, 0, 120),)
    of = sum_tables.tables_of(layout.at(3), Band(right=0), slice_rows=2, runs=runs, device=CPU)
    rows = [(x.first, x.stop) for x in of.slices]
    assert len(rows) > 1 and rows[-1][1] == 3
    for x in of.slices:
        count = x.stop - x.first
        assert list(x.parts) == [((0, count),) if rank >= 3 and count else () for rank in range(40)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.kind)
@pytest.mark.parametrize("band", BANDS)
def test_ranks_that_have_a_part(layout, band):
    """A row is shared if a rank sees it that does not have it, and is added of all that see it."""
    positions = torch.cat([torch.arange(a, b) for a, b in (*layout.runs[0], (0, 0))]).tolist()
    runs = (KeyRun(0, 0, layout.seqlen),)
    of = sum_tables.tables_of(layout.at(0), band, slice_rows=7, runs=runs, device=CPU)
    seen = [keys_of(layout.at(rank).spans, band) for rank in range(layout.ranks)]
    ranks = [
        [r for r, keys in enumerate(seen) if any(a <= x < b for a, b in keys)] for x in positions
    ]
    assert of.shared[:, 1].tolist() == [i for i, found in enumerate(ranks) if set(found) - {0}]
    bits = [[r for r in range(layout.ranks) if x >> r & 1] for x in of.shared[:, 0].tolist()]
    assert bits == [ranks[i] for i in of.shared[:, 1].tolist()]
    for x in of.slices:
        found = [(r, i) for r, runs in enumerate(x.parts) for a, b in runs for i in range(a, b)]
        expected = [(rank, i) for i, y in enumerate(bits[x.first : x.stop]) for rank in y]
        assert found == sorted(expected)


def gradients(layout, case, **more):
    q, k, v = (layout.shard(x).requires_grad_() for x in (case.q, case.k, case.v))
    out = td.attention(q, k, v, layout=layout, method="stream", **more)
    return torch.autograd.grad(out, (q, k, v), layout.shard(case.dout))


def sliced(rank):
    """The same bits in one slice and in many; within the budget by one head at a time."""
    group = dist.group.WORLD
    case = Case(4, 2, causal=True)
    whole = gradients(td.zigzag(case.seqlen, group), case, causal=True)
    assert arena_of(group, CPU).room == halves.LEAST  # one slice
    halves.LEAST = halves.Arena.slice_bytes = 1
    arena = arena_of(group, CPU)
    arena.room = 0
    counted = []
    finish = sums.Sums.finish

    def counting(self):
        counted.append(len(self.tables.slices))
        return finish(self)

    sums.Sums.finish = counting
    found = gradients(td.zigzag(case.seqlen, group), case, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(found, whole))
    assert counted == [2]  # of what is twice as long as K and V of a shard
    stream.MOST_BYTES = 1
    most_rows = sums.most_rows
    sums.most_rows = lambda *x, **y: min(20, most_rows(*x, **y))  # of one head all would fit
    layouts = deals(case.seqlen, group)
    for name in ("causal", "sinks", "alibi", "lse and sinks", "documents", "mask_mod", "bf16"):
        case = Case(4, 2, **FEATURES[name])
        arena.room = 0
        counted.clear()
        compare(case, next(layouts), name, method="stream")
        least = 1 if name == "documents" else 2  # few keys of other ranks' are seen
        assert len(counted) == 2 and min(counted) >= least, name


def test_slices_and_heads():
    run(sliced, 2)


def freed(rank):
    """Parts of one group of heads are gone before those of the next are given."""
    stream.MOST_BYTES = 1
    made, begin = [], sums.Sums.begin

    def counting(self, dk, dv, runs=()):
        assert not any(x() is not None for x in made)
        made.extend(map(weakref.ref, (dk, dv)))
        begin(self, dk, dv, runs=runs)

    sums.Sums.begin = counting
    case = Case(4, 2, causal=True)
    gradients(td.zigzag(case.seqlen), case, causal=True)
    assert len(made) == 2 * 2


def test_parts_of_one_group_at_a_time():
    run(freed, 2)


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def bounded(rank):
    """The peak of a backward: K and V of the sequence, and not more than 16 S D g bytes of parts in
    fp32, with g = 1 key heads at a time; in an arena that does not grow.
    """
    seqlen, nheads, headdim = 16384, 8, 64
    stream.MOST_BYTES = 1
    layout = td.zigzag(seqlen)
    draw = torch.Generator().manual_seed(1)
    shape = 1, layout.tokens, nheads, headdim
    q, k, v, dout = (torch.randn(shape, generator=draw) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    asked = dict(layout=layout, causal=True, window=(63, 0), method="stream", bitwise=False)
    out = td.attention(*leaves, **asked)
    torch.autograd.grad(out, leaves, dout)  # what libraries keep is there
    out = td.attention(*leaves, **asked)
    arena = arena_of(layout.group, CPU)
    room = arena.room
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    torch.autograd.grad(out, leaves, dout)
    grown = peak() - before
    of_keys = 2 * seqlen * nheads * headdim * 4
    of_shard = q.numel() * 4
    parts = 16 * seqlen * headdim
    # dq, dk, dv and once more while they are joined, dO's copy, and a few blocks of the kernels
    allowed = of_keys + parts + 7 * of_shard + (8 << 20)
    assert grown < allowed, (grown >> 20, allowed >> 20)
    assert arena.room == room < of_shard // 8  # few keys are seen by others


@pytest.mark.slow
def test_the_peak_of_the_backward():
    run(bounded, 2)
