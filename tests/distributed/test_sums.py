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

import tilewise.distributed as td
from tilewise.distributed import halves, stream_backward, sums
from tilewise.distributed.arena import arena_of
from tilewise.distributed.exchange import ALIGN
from tilewise.distributed.work import keys_of

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


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.kind)
@pytest.mark.parametrize("each", [1, 5, 10000])
def test_slices_have_each_row_once(layout, each):
    for rank in range(layout.ranks):
        mine = layout.at(rank)
        slices, positions = sums.slices_of(mine, each), sums.positions_of(mine, each, CPU)
        assert len(slices) == len(positions)
        assert [x.rows for x in slices] == [len(x) for x in positions]
        assert all(x.rows <= each * layout.ranks for x in slices)
        found = [index[x.place : x.place + x.stop - x.first] for x, index in zip(slices, positions)]
        order = [torch.arange(a, b) for a, b in layout.runs[rank]]
        assert torch.equal(torch.cat(found), torch.cat([*order, torch.arange(0)]))
        assert torch.cat(positions).sort().values.equal(torch.arange(layout.seqlen))


@pytest.mark.parametrize("row_bytes", [[512, 512], [512, 96], [4, 12], [0, 0]])
@pytest.mark.parametrize("room", [100, 4096, 65536])
def test_slices_fit_the_room(row_bytes, room):
    def nbytes(each):
        return sum(-(-each * 4 * n // ALIGN) * ALIGN for n in row_bytes)

    each = sums.most_rows(room, row_bytes, 4)
    assert nbytes(each) <= room or each == 1
    if not any(n % ALIGN for n in row_bytes) and sum(row_bytes):
        assert nbytes(each + 1) > room  # and no smaller than need be: 2 N of 16 bits


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.kind)
@pytest.mark.parametrize("sides", [(-1, 0), (20, 0), (5, 9)])
def test_ranks_that_have_a_part(layout, sides):
    places = torch.cat([torch.arange(a, b) for a, b in (*layout.runs[0], (0, 0))]).tolist()
    ranges, bits = sums.parts_of(layout, *sides), sums.ranks_of(layout, *sides, CPU)
    for rank in range(layout.ranks):
        seen = keys_of(layout.at(rank).spans, *sides)
        expected = [any(a <= x < b for a, b in seen) for x in places]
        assert [bool(x >> rank & 1) for x in bits.tolist()] == expected
        rows = [x for a, b in ranges[rank] for x in range(a, b)]
        assert rows == [row for row, x in enumerate(expected) if x]


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
    halves.LEAST = sums.LEAST = 1
    arena = arena_of(group, CPU)
    arena.room = 0
    counted = []
    made = sums.slices_of

    def slices_of(*asked):
        counted.append(len(made(*asked)))
        return made(*asked)

    sums.slices_of = slices_of
    found = gradients(td.zigzag(case.seqlen, group), case, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(found, whole))
    assert counted == [2]  # of what is twice as long as K and V of a shard
    stream_backward.MOST_BYTES = 1
    most_rows = sums.most_rows
    sums.most_rows = lambda *asked: min(20, most_rows(*asked))  # of one head all would fit
    layouts = deals(case.seqlen, group)
    for name in ("causal", "sinks", "alibi", "lse and sinks", "documents", "mask_mod", "bf16"):
        case = Case(4, 2, **FEATURES[name])
        arena.room = 0
        counted.clear()
        compare(case, next(layouts), name, method="stream")
        assert len(counted) == 2 and min(counted) > 1, name


def test_slices_and_heads():
    run(sliced, 2, timeout=60.0)


def freed(rank):
    """Parts of one group of heads are gone before those of the next are computed."""
    stream_backward.MOST_BYTES = 1
    made, given = [], stream_backward._gradients

    def gradients_of(*asked):
        assert not any(x() is not None for x in made)
        found = given(*asked)
        made.extend(weakref.ref(x) for x in (found.dk, found.dv))
        return found

    stream_backward._gradients = gradients_of
    case = Case(4, 2, causal=True)
    gradients(td.zigzag(case.seqlen), case, causal=True)
    assert len(made) == 2 * 2


def test_parts_of_one_group_at_a_time():
    run(freed, 2, timeout=60.0)


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def bounded(rank):
    """The peak of a backward: K and V of the sequence, and not more than 16 S D g bytes of parts in
    fp32, with g = 1 key heads at a time; in an arena that does not grow.
    """
    seqlen, nheads, headdim = 16384, 8, 64
    stream_backward.MOST_BYTES = 1
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
    assert arena.room == room == 2 * of_shard


def test_the_peak_of_the_backward():
    run(bounded, 2, timeout=60.0)
