"""A cache over several GPUs, as over processes: within the budget, and the same in every replay."""

import pytest
import torch
import torch.distributed as dist
from helpers.cache_shards import CASES, filled, made
from helpers.caches import contiguous
from helpers.gpu_ranks import RANKS, run
from helpers.waits import SHORT

import tilewise
import tilewise.distributed as td
from tilewise.testing.tolerance import judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def decode(rank, names, device="cuda"):
    """Cases in one process a rank: what is wrong is said at the end, so that none waits."""
    faults = []
    for name in names:
        s, q, asked, piece = made(name, device)
        shards = td.CacheShards(piece)
        k_cache, v_cache, table = filled(shards, s)
        where = dict(seqused_k=s.lengths.to(device), return_lse=True, **asked)

        def attend(q=q, caches=(k_cache, v_cache), table=table, where=where, shards=shards):
            return shards.attention(q, *caches, page_table=table, **where)

        outs = attend()
        whole = [contiguous(x, fill=0.0) for x in (s.k, s.v)]
        plain = tilewise.attention_reference(q, *whole, **where, upcast=False)
        oracle = tilewise.attention_reference(*(x.double() for x in (q, *whole)), **where)
        verdicts = [judge(x, y, z.to(x.dtype)) for x, y, z in zip(outs, oracle, plain)]
        faults += [f"{name}: {x}" for x in verdicts if not x.ok]
        parts = [torch.empty_like(outs[0]) for _ in range(shards.ranks)]
        dist.all_gather(parts, outs[0])
        if not all(torch.equal(x, outs[0]) for x in parts):
            faults.append(f"{name}: ranks have other bits")
        if device == "cuda" and not replays_equal(attend, outs):
            faults.append(f"{name}: a replay has other bits")
    assert not faults, "\n".join(faults)


def replays_equal(attend, outs):
    """Whether a graph of the call gives what the call gave, each time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = attend()
    are_equal = True
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        are_equal &= all(map(torch.equal, captured, outs))
    return are_equal


def test_every_case():
    run(decode, tuple(CASES))


def pieces(rank):
    """Asks for pieces."""
    s, q, _, piece = made("one query", "cuda")
    shards = td.CacheShards(piece)
    k_cache, v_cache, table = filled(shards, s)
    where = dict(seqused_k=s.lengths.cuda(), page_table=table)
    with pytest.raises(NotImplementedError, match="leave split_size out"):
        shards.attention(q, k_cache, v_cache, split_size=piece, **where)


def differing(rank, device="cuda"):
    """The first call of a kind is compared, and an error of one rank is named on the others."""
    s, q, asked, piece = made("one query", device)
    shards, mine = td.CacheShards(piece), rank == 1
    k_cache, v_cache, table = filled(shards, s)
    where = dict(asked, seqused_k=s.lengths.to(device), page_table=table)
    first = shards.attention(q, k_cache, v_cache, **where)
    wide = q.expand(-1, 2 if mine else 3, -1, -1)
    of_window = dict(window=(8 if mine else 9, 0))
    for queries, more, match in ((wide, {}, r"q \(4, 2, "), (q, of_window, r".*window=\(8, 0\)")):
        with pytest.raises(td.RankMismatch, match=f"rank 1 called .*{match}"):
            shards.attention(queries, k_cache, v_cache, **where, **more)
    wrong = dict(where, page_table=table.long()) if mine else where
    raised = tilewise.ArgumentError if mine else td.RankMismatch
    with pytest.raises(raised, match="int32" if mine else "rank 1 raised ArgumentError"):
        shards.attention(q, k_cache, v_cache, window=(7, 0), **wrong)
    assert torch.equal(shards.attention(q, k_cache, v_cache, **where), first)


def test_ranks_that_disagree():
    run(differing, timeout=10 * SHORT)


def test_pieces_are_refused():
    assert RANKS >= 2
    run(pieces)
