"""A cache over several GPUs, as over processes: within the budget, and the same in every replay. A
graph has no sends of gloo, by which ranks exchange that share a GPU.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.cache_shards import CASES, filled, made
from helpers.caches import contiguous, sequences
from helpers.gpu_ranks import SHARES_GPU, needs_ranks, run
from helpers.waits import SHORT

import tilewise
import tilewise.distributed as td
from tilewise.testing.tolerance import judge

pytestmark = [pytest.mark.gpu, needs_ranks]


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
        if device == "cuda" and not SHARES_GPU and not replays_equal(attend, outs):
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


PIECES = {
    "one query": dict(causal=True),
    "several": dict(causal=True, queries=4, sinks=True),
    "a window": dict(window=(3000, 0), queries=3),
    "a chunk": dict(causal=True, queries=200, heads=(8, 2)),
    "headdim 64": dict(causal=True, queries=2, headdims=(64, 64), softcap=20.0),
    "headdim 256": dict(causal=True, queries=2, headdims=(256, 256)),
    "fp16": dict(causal=True, dtype=torch.float16),
    "int8": dict(causal=True, queries=2, dtype=torch.int8),
    "fp32": dict(causal=True, queries=2, dtype=torch.float32),
    "one piece of many": dict(causal=True, size=64),
}


def pieces(rank, names, device="cuda", lengths=(33333, 5, 0, 9000), piece=1024):
    """With pieces asked for, the bits are those of one GPU's call, and of a graph's."""
    faults = []
    for name in names:
        asked = dict(PIECES[name])
        heads, headdims = asked.pop("heads", (32, 8)), asked.pop("headdims", (128, 128))
        queries, dtype = asked.pop("queries", 1), asked.pop("dtype", torch.bfloat16)
        size = asked.pop("size", 512)
        if asked.get("sinks"):
            asked["sinks"] = torch.linspace(-2, 2, heads[0], device=device)
        kept = dtype if dtype.is_floating_point else torch.bfloat16
        s = sequences([queries] * len(lengths), lengths, heads, headdims, kept)
        s = s._make([x.to(device) for x in part] for part in s)
        q, used = torch.stack(s.q), s.lengths.to(device)
        shards, alone = td.CacheShards(piece), td.CacheShards(piece, 1)
        *mine, table = filled(shards, s)
        *whole, all_pages = filled(alone, s)
        if dtype == torch.int8:
            mine, whole = ([(30 * x).nan_to_num().to(dtype) for x in y] for y in (mine, whole))
            scales = torch.tensor([0.03, 0.02, 0.01, 0.04] * 2, device=device)
            asked |= dict(k_descale=scales, v_descale=scales.flip(0))
        call = dict(asked, seqused_k=used, return_lse=True)

        def attend(call=call, table=table, mine=mine, q=q, shards=shards, size=size):
            return shards.attention(q, *mine, page_table=table, split_size=size, **call)

        outs = attend()
        expected = tilewise.attention(q, *whole, page_table=all_pages, split_size=size, **call)
        pairs = zip(outs, expected)
        faults += [
            f"{name}: {i} has other bits" for i, x in enumerate(pairs) if not torch.equal(*x)
        ]
        if size == 512 and heads[0] == 4 * heads[1]:
            with tilewise.batch_invariant():
                if not torch.equal(
                    shards.attention(q, *mine, page_table=table, **call)[0], outs[0]
                ):
                    faults.append(f"{name}: batch_invariant has other bits")
        if device == "cuda" and not SHARES_GPU and not replays_equal(attend, outs):
            faults.append(f"{name}: a replay has other bits")
    assert not faults, "\n".join(faults)


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


def test_pieces_have_the_bits_of_one_gpu():
    run(pieces, tuple(PIECES))
