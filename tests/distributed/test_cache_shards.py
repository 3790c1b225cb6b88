"""A cache over the ranks of a group: appended by the owner of a position, and read by all of them,
with the bits of one process where pieces are asked for, else within the error budget.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.cache_shards import CASES, PAGE, PIECE, filled, made
from helpers.caches import INT32, contiguous, sequences
from helpers.processes import run
from helpers.tiers import sample

import tilewise
import tilewise.distributed as td
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.tolerance import assert_within

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


def without_pages(rank):
    """All keys on the first rank, none at all, and no sequence."""
    shards = td.CacheShards(PIECE)
    for lengths in ([9], [0], []):
        q, new = torch.randn(len(lengths), 1, 4, 16), torch.randn(len(lengths), 9, 2, 16)
        used = torch.tensor(lengths, dtype=INT32)
        pages = 2 * (rank == 0 and len(lengths))
        cache = torch.zeros(pages, PAGE, 2, 16)
        table = torch.arange(pages, dtype=INT32).expand(len(lengths), pages)
        where = dict(seqused_k=used, page_table=table)
        if lengths != [0]:
            shards.append(cache, cache.clone(), new, new, **where)
        for options in (dict(split_size=PIECE), {}):
            out = shards.attention(q, cache, cache, **where, **options)
            expected = tilewise.attention(q, new, new, seqused_k=used, split_size=PIECE)
            torch.testing.assert_close(out, expected)


def wrong_on_one(rank):
    """What is wrong for one rank's pages raises there; the next call is not paired with it."""
    shards, used = td.CacheShards(PIECE), torch.tensor([40], dtype=INT32)
    q, new = torch.randn(1, 1, 4, 16), torch.randn(1, 40, 2, 16)
    table = torch.arange(6, dtype=INT32).view(1, 6)
    cache = torch.zeros(6, PAGE, 2, 16)
    shards.append(cache, cache.clone(), new, new, seqused_k=used, page_table=table)
    narrow = table[:, :1] if rank == 0 else table
    if rank == 0:
        with pytest.raises(tilewise.ArgumentError):
            shards.attention(q, cache, cache, seqused_k=used, page_table=narrow)
    else:
        out = shards.attention(q, cache, cache, seqused_k=used, page_table=narrow)
        assert out.isnan().all()
    where = dict(seqused_k=used, page_table=table)
    expected = tilewise.attention(q, new, new, seqused_k=used)
    torch.testing.assert_close(shards.attention(q, cache, cache, **where), expected)
    # What ranks must pass alike is compared, and an error of one is named on the others
    wide, sinks = torch.randn(1, 2, 4, 16), torch.full((4,), float(rank == 1))
    mine = rank == 1
    for given, asked, match in (
        (wide if mine else q, {}, r"q \(1, 2, 4, 16\)"),
        (q, dict(sinks=sinks), r"sinks \(4,\) of values"),
        (q, dict(window=(8 if mine else 9, 0)), r"window=\(8, 0\)"),
        (q, dict(seqused_k=used - int(mine)), "seqused_k"),
    ):
        with pytest.raises(td.RankMismatch, match=f"rank 1 called .*{match}"):
            shards.attention(given, cache, cache, **where | asked)
    raised = tilewise.ArgumentError if mine else td.RankMismatch
    for asked in (dict(page_table=table.long()), dict(page_table=table[:, :1], split_size=PIECE)):
        wrong = asked if mine else asked | dict(page_table=table)
        with pytest.raises(raised, match="" if mine else "rank 1 raised ArgumentError"):
            shards.attention(q, cache, cache, **where | wrong)
    torch.testing.assert_close(shards.attention(q, cache, cache, **where), expected)


def compare(rank, names):
    if len(names) > 1:
        without_pages(rank)
        if dist.get_world_size() > 1:
            wrong_on_one(rank)
    for name in names:
        s, q, asked, piece = made(name)
        shards = td.CacheShards(piece)
        k_cache, v_cache, table = filled(shards, s)
        whole = [contiguous(x, fill=0.0) for x in (s.k, s.v)]
        plain = dict(seqused_k=s.lengths, return_lse=True, **asked)
        here = dict(plain, page_table=table)
        for size in (piece, piece // 2, piece - 3):
            if piece % size:
                with pytest.raises(tilewise.ArgumentError, match="whole pieces"):
                    shards.attention(q, k_cache, v_cache, split_size=size, **here)
                continue
            expected = tilewise.attention(q, *whole, split_size=size, **plain)
            found = shards.attention(q, k_cache, v_cache, split_size=size, **here)
            for x, y in zip(found, expected):
                assert torch.equal(x, y), f"{name}: other bits with pieces of {size}"
        found = shards.attention(q, k_cache, v_cache, **here)
        again = shards.attention(q, k_cache, v_cache, **here)
        for x, y in zip(found, again):
            assert torch.equal(x, y), f"{name}: other bits in another run"
        plainly = tilewise.attention_reference(q, *whole, **plain, upcast=False)
        exact = [x.double() for x in (q, *whole)]
        oracle = tilewise.attention_reference(*exact, **plain)
        for x, y, z in zip(found, oracle, plainly):
            assert_within(x, y, z.to(x.dtype), name)


@pytest.mark.parametrize("ranks, names", [(3, ("several queries", "sinks", "a window"))])
def test_attention_is_that_of_one_process(ranks, names):
    run(compare, ranks, names)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case(ranks):
    run(compare, ranks, tuple(CASES))


def test_lengths_are_those_of_whole_pieces():
    lengths = torch.tensor([0, 1, 16, 17, 40, 100], dtype=INT32)
    by_rank = [td.CacheShards(16, 3).lengths(lengths, rank) for rank in range(3)]
    for rank, found in enumerate(by_rank):
        owned = [sum(i // 16 % 3 == rank for i in range(n)) for n in lengths.tolist()]
        assert found.tolist() == owned and found.dtype == INT32


def test_what_is_wrong_is_named():
    shards = td.CacheShards(16, 1)
    q, k = torch.randn(1, 2, 2, 8), torch.randn(2, 8, 2, 8)
    used, table = torch.tensor([9], dtype=INT32), torch.tensor([[1]], dtype=INT32)
    where = dict(seqused_k=used - 1, page_table=table)
    with pytest.raises(tilewise.ArgumentError, match="pages of 12 keys"):
        shards.attention(q, torch.randn(2, 12, 2, 8), k, **where)
    with pytest.raises(tilewise.ArgumentError, match="'top_left'"):
        shards.attention(q, k, k, **where, causal="top_left")
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        shards.attention(q, k, k, **where, alibi_slopes=torch.ones(2))
    with pytest.raises(tilewise.ArgumentError, match="processes"):
        td.CacheShards(16, 2).attention(q, k, k, **where)
    with tilewise.batch_invariant(), pytest.raises(tilewise.ArgumentError, match="split_size=512"):
        shards.attention(q, k, k, **where)
    new = torch.randn(1, 2, 2, 8)
    shards.append(k, k.clone(), new[:, 1:], new[:, 1:], **where)
    assert torch.equal(k[1, 7], new[0, 1])
    beyond = r"lengths\(seqused_k\)=\[9\]: .* page_table has 1 pages of 8 keys"
    with pytest.raises(tilewise.ArgumentError, match=beyond):
        shards.append(k, k.clone(), new, new, seqused_k=used, page_table=table)
    with pytest.raises(tilewise.ArgumentError, match=r"page_table\[0, 0\] is 2"):
        shards.append(k, k.clone(), new, new, seqused_k=used - 1, page_table=table + 1)
    with pytest.raises(tilewise.ArgumentError, match="piece"):
        td.CacheShards(0, 1)
    with pytest.raises(tilewise.ArgumentError, match="sinks has shape"):
        shards.attention(q, k, k, **where, sinks=torch.zeros(3))
    asked = (
        dict(where, seqused_k=-used),
        dict(where, seqused_k=used.long()),
        dict(where, seqused_k=torch.cat((used, used))),
        dict(where, seqused_k=None),
        dict(where, page_table=None),
        dict(where, page_table=table[0]),
    )
    for wrong in asked:
        for call in (shards.attention, lambda *x, **y: shards.append(*x[1:], new, new, **y)):
            with pytest.raises(tilewise.ArgumentError, match="seqused_k|page_table"):
                call(q, k, k, **wrong)
    with pytest.raises(tilewise.ArgumentError, match="pages of 12 keys"):
        shards.append(torch.randn(2, 12, 2, 8), k, new, new, **where)


def cached_in_eight_bits(rank):
    """Scales of tensors, heads and sequences, and those that each new row gets."""
    s = sequences([2, 2], [40, 9], (4, 2), (16, 16), torch.bfloat16)
    shards, q = td.CacheShards(PIECE), torch.stack(s.q)
    k, v = contiguous(s.k, fill=0.0), contiguous(s.v, fill=0.0)
    heads = torch.rand(2) + 0.01, torch.rand(2, 2) + 0.01
    table = torch.tensor([[3, 0, 5, 1, 2, 4], [9, 8, 7, 6, 11, 10]], dtype=INT32)
    for descales in (heads, (torch.zeros(12, PAGE, 2), torch.zeros(12, PAGE, 2))):
        outs = []
        for cache in (td.CacheShards(PIECE, 1), shards):
            k_cache, v_cache = torch.zeros(2, 12, PAGE, 2, 16, dtype=torch.int8)
            scales = dict(zip(("k_descale", "v_descale"), (x.clone() for x in descales)))
            where = dict(page_table=table, **scales)
            full = torch.tensor([40, 40], dtype=INT32)
            cache.append(k_cache, v_cache, k, v, seqused_k=full, **where)
            options = dict(where, seqused_k=s.lengths, causal=True, split_size=PIECE)
            outs.append(cache.attention(q, k_cache, v_cache, **options))
        assert torch.equal(*outs)


STATES = {
    "one query": dict(causal=True),
    "several queries": dict(queries=3, causal=True),
    "a window and sinks": dict(queries=3, window=(150, 0), sinks=True),
    "a group of 16 heads": dict(queries=2, causal=True, heads=(16, 1)),
    "headdim 256": dict(queries=5, causal=True, headdims=(256, 192)),
}


def by_gpu_kernels(rank, backend, names, lengths=(523, 7, 300), sizes=(64, 128)):
    """GPUs' kernels on CPU tensors: ranks' states, folded, have the bits of one rank's call."""
    for name in names:
        asked = dict(STATES[name])
        queries = asked.pop("queries", 1)
        heads, headdims = asked.pop("heads", (4, 2)), asked.pop("headdims", (128, 128))
        s = sequences([queries] * len(lengths), lengths, heads, headdims, torch.bfloat16)
        if asked.get("sinks"):
            asked["sinks"] = torch.linspace(-1, 2, heads[0]).bfloat16()
        q, shards, alone = torch.stack(s.q), td.CacheShards(128), td.CacheShards(128, 1)
        call = dict(asked, seqused_k=s.lengths, return_lse=True, backend=backend)
        for size in sizes:
            outs = []
            for cache in (alone, shards):
                *pages, table = filled(cache, s)
                with use_interpreter() if backend == "portable" else use_emulator(rank):
                    outs.append(
                        cache.attention(q, *pages, page_table=table, split_size=size, **call)
                    )
            for x, y in zip(*outs):
                assert torch.equal(x, y), f"{name}: other bits with pieces of {size}"


@pytest.mark.parametrize("backend", sample(("hopper", "portable"), "hopper"))
def test_kernels_of_gpus(backend):
    run(by_gpu_kernels, 2, backend, ("a window and sinks",), (267, 7), (64,))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_kernels_of_gpus_in_every_case(backend):
    run(by_gpu_kernels, 3, backend, tuple(STATES))


@pytest.mark.slow
def test_caches_of_eight_bits():
    run(cached_in_eight_bits, 2)
