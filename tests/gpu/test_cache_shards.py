"""A cache over several GPUs, as over processes: within the budget, and the same in every replay."""

import pytest
import torch
import torch.distributed as dist
from helpers.cache_shards import CASES, filled, made
from helpers.caches import contiguous
from helpers.gpu_ranks import RANKS, run

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


def test_pieces_are_refused():
    assert RANKS >= 2
    run(pieces)
