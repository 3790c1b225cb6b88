"""Copies by bytes: of all ranks in one process, in layouts at random."""

import math
import random

import pytest
import torch

import tilewise.distributed as td
from tilewise.distributed.methods import launch_copies, one_launch
from tilewise.distributed.methods.shard_call import ShardCall
from tilewise.distributed.transport import copies as transport_copies
from tilewise.distributed.transport.copies import (
    ALIGN,
    Blocks,
    bytes_at,
    copy_one_by_one,
    in_rows,
    kind_of,
    places_of,
)
from tilewise.distributed.transport.copy_lists import heads_to_rows, rows_to_heads

RANKS = 3


def layouts(seed):
    """Of a length that RANKS does not divide; some ranks may have no tokens."""
    draw = random.Random(seed)
    seqlen = (97, 50, 97, 2)[seed % 4]
    whole = td.striped(seqlen, RANKS, block=7), td.zigzag(seqlen, RANKS)
    return draw.choice((*whole, td.contiguous(seqlen, RANKS)))


def pulled(pieces, rooms, targets):
    for rank, start, target, at, nbytes, rows, pitch, step, _ in pieces:
        into = bytes_at(targets[target], at, pitch=step, rows=rows, width=nbytes)
        into.copy_(bytes_at(rooms[rank], start, pitch=pitch, rows=rows, width=nbytes))


def room(nbytes):
    return torch.full((max(nbytes, 1),), 255, dtype=torch.uint8)


def exchanged(all_copies, rooms):
    """Makes copies of all ranks, each with its sources and targets."""
    for copies, sources, targets, half in all_copies:
        copy_one_by_one(copies.rows, sources, [half, *targets])
    for copies, _, targets, half in all_copies:
        pulled([x for pieces in copies.pieces for x in pieces], rooms, targets or [half])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("headdim_v", [16, 24])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("most_pitch", [None, 0, transport_copies.MOST_PITCH])
def test_keys_in_groups_of_heads(seed, headdim_v, in_place, most_pitch, monkeypatch):
    """Side by side where K and V are as wide; in the arena, or in memory of their own; each group
    by itself, or in batches, unless these lie too far apart.
    """
    monkeypatch.setattr(launch_copies, "MOST_PITCH", most_pitch)
    layout, count = layouts(seed), (1, 2, 4)[seed % 3]
    shape = 1, layout.seqlen, 4
    whole = torch.randn(*shape, 16), torch.randn(*shape, headdim_v)
    buffers = 1 if headdim_v == 16 else 2
    widths = [32] if buffers == 1 else [16, headdim_v]
    shapes = [(count, layout.seqlen, 4 // count * n) for n in widths]
    all_copies, rooms, all_found = [], [], []
    for rank in range(RANKS):
        mine = layout.at(rank)
        # Rows of a larger tensor, as of q, k and v that are projected together
        given = [torch.cat((mine.shard(x), mine.shard(x)), 2)[:, :, 4:] for x in whole]
        assert all(in_rows(x) is x for x in given)
        copies = one_launch.copies_of(
            ShardCall(mine), *given, count=count, is_in_place=in_place, nodes=None
        )
        lists, lengths = count, [len(x) for x in copies.pieces]
        if most_pitch is not None:
            copies, lists = launch_copies.in_batches(copies, tensors=buffers), 1
            batches = {1: 1, 2: 2, 4: 3}[count] if most_pitch else count
            told = [x.arrived for x in copies.pieces[0] if x.arrived]
            assert len(copies.pieces[0]) == batches * lengths[0] and told == sorted(set(told))
            assert max(told, default=0) == count * lengths[0] // buffers
        rooms.append(room(copies.nbytes))
        if in_place:
            starts = [0, -(-whole[0].numel() * 4 // ALIGN) * ALIGN]
            found = [
                rooms[-1][start:][: math.prod(x) * 4].view(torch.float32).view(x)
                for start, x in zip(starts, shapes)
            ]
        else:
            found = [torch.full(x, torch.nan) for x in shapes]
        if mine.tokens:  # else it sees no keys
            all_copies.append((copies, given, [] if in_place else found, rooms[-1]))
            all_found.append(found)
    exchanged(all_copies, rooms)
    for (copies, *_), found in zip(all_copies, all_found):
        pieces = [x for part in copies.pieces for x in part]
        assert len(copies.pieces) == lists and len(pieces) % (lists * len(found)) == 0
        ranks = [x.rank for x in pieces]
        assert ranks[:: len(found)] == ranks[len(found) - 1 :: len(found)]
        if len(found) == 1:
            found = found[0].unflatten(2, (2, -1)).unbind(2)
        for x, y in zip(found, whole):
            x = x.unflatten(2, (4 // count, -1)).movedim(0, 1).flatten(1, 2)
            assert torch.equal(x, y[0])


@pytest.mark.parametrize("seed", range(8))
def test_rows_to_heads_and_back(seed):
    layout, batch, each = layouts(seed), 1 + seed % 2, 2 + seed % 3
    groups = range(1), range(1, each)
    seqlen, heads = layout.seqlen, each * RANKS
    k = torch.randn(batch, seqlen, heads, 8)
    q = torch.randn(batch, seqlen, 2 * heads, 8).double()
    lse = torch.randn(batch, 2 * heads, seqlen)
    kinds = (
        kind_of(k)._replace(heads=each),
        kind_of(q)._replace(heads=2 * each),
        kind_of(lse)._replace(heads=2 * each),
    )
    there, made, rooms = [], [], []
    for rank in range(RANKS):
        mine = layout.at(rank)
        given = mine.shard(k), mine.shard(q), mine.shard(lse, 2).contiguous()
        copies = rows_to_heads(mine, kinds, sources=places_of(given), batch=batch, groups=groups)
        whole = Blocks(kinds, groups, batch=batch, tokens=seqlen)
        found = [torch.empty(n // x.itemsize, dtype=x.dtype) for n, x in zip(whole.sizes, given)]
        rooms.append(room(copies.nbytes))
        made.append((copies, given, found, rooms[-1]))
        there.append(found)
    exchanged(made, rooms)
    by_heads = [[] for _ in groups]  # of each rank what each group's attention would return
    for rank, found in enumerate(there):
        for number, group in enumerate(groups):
            for kind, (x, y) in enumerate(zip(found, (k, q, lse))):
                width = whole.width(kind, group)
                first = rank * kinds[kind].heads + whole.first(kind, group)
                start = whole.place(kind, group).start // x.itemsize
                dim = 1 if kind == 2 else 2
                expected = y.narrow(dim, first, width)
                view = x[start : start + expected.numel()].view(expected.shape)
                assert torch.equal(view, expected), (rank, number, kind)
                by_heads[number].append(view)
    results = [
        [
            torch.full_like(layout.at(rank).shard(x, dim), torch.nan)
            for x, dim in ((k, 1), (q, 1), (lse, 2))
        ]
        for rank in range(RANKS)
    ]
    for number, group in enumerate(groups):
        back, rooms = [], []
        for rank in range(RANKS):
            mine = layout.at(rank)
            copies = heads_to_rows(mine, kinds, batch=batch, groups=groups, group=group)
            rooms.append(room(copies.nbytes))
            mine = by_heads[number][3 * rank : 3 * rank + 3]
            copy_one_by_one(copies.rows, mine, [rooms[-1], *results[rank]])
            back.append(copies)
        for rank, copies in enumerate(back):
            memory = room(copies.placed_nbytes)
            pulled(copies.pieces[0], rooms, [memory])
            copy_one_by_one(copies.placed, [memory], results[rank])
    for rank in range(RANKS):
        mine = layout.at(rank)
        assert torch.equal(results[rank][0], mine.shard(k))
        assert torch.equal(results[rank][1], mine.shard(q))
        assert torch.equal(results[rank][2], mine.shard(lse, 2))
