"""The kernels of Hopper give a run of rows the bits that it has in a call on all rows: in the
emulator, on one process that is every rank in turn.
"""

import itertools

import pytest
import torch
from helpers.call_specs import call_of
from helpers.parts import Parts
from helpers.tiers import sample_rows

import tilewise
import tilewise.distributed as td
from tilewise.distributed.methods import packed_runs, rows, run_calls
from tilewise.distributed.methods.shard_call import ShardCall
from tilewise.distributed.methods.stream import by_runs
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.memory import Files
from tilewise.problem import Saved, Scalars
from tilewise.testing import use_emulator

SEQLEN, RANKS = 600, 2
CAUSAL = dict(causal=True)
DOCUMENTS = 0, 100, 101, 420, SEQLEN
CASES = {
    "causal": CAUSAL,
    "full": {},
    "window": dict(CAUSAL, window=(200, 0)),
    "both sides": dict(window=(150, 70)),
    "left": dict(window=(150, None)),
    "sinks": dict(CAUSAL, sinks=True, softcap=4.0),
    "alibi": dict(CAUSAL, alibi=True),
    "documents": dict(CAUSAL, docs=True),
    "documents, window": dict(CAUSAL, docs=True, window=(90, 0)),
    "headdim 128": dict(CAUSAL, headdim=128),
}


LOOPS = "both sides", "left"  # where the diagonal of each run lies elsewhere


class Here:
    """A barrier of one process."""

    rank, ranks = 0, 1


def made(headdim=64, docs=False, sinks=False, alibi=False, **options):
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, SEQLEN, heads, headdim, generator=draw).bfloat16() for heads in (2, 1, 1, 2)
    )
    if sinks:
        options["sinks"] = torch.randn(2, generator=draw)
    if alibi:
        options["alibi_slopes"] = torch.tensor([0.1, 0.3])
    return q, k, v, dout, options, DOCUMENTS if docs else None


PAIRS = list(itertools.product(CASES, ("zigzag", "striped")))


# Every other case, dealt in one way
@pytest.mark.parametrize("name, kind", sample_rows(PAIRS, *PAIRS[0::7]))
def test_the_bits_of_a_run(name, kind):
    q, k, v, dout, options, docs = made(**CASES[name])
    layout = td.zigzag(SEQLEN, RANKS) if kind == "zigzag" else td.striped(SEQLEN, RANKS, block=70)
    layout = layout if docs is None else layout.packed(docs)
    with use_emulator():
        if docs is None:
            out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
        else:
            starts = torch.tensor(docs, dtype=torch.int32)
            lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
            given = (x[0] for x in (q, k, v))
            out, lse = (
                x[None] for x in tilewise.attention(*given, return_lse=True, **lengths, **options)
            )
        arena = Arena(Here(), Files())
        total = [torch.zeros(k.shape), torch.zeros(v.shape)]
        for rank in range(RANKS):
            mine = layout.at(rank)
            local = [mine.shard(x) for x in (q, k, v, dout)]
            spec = call_of(mine, *local[:3], **options)
            keys = rows.PulledKeys(k, v, arena, marks=(None,) * len(mine.spans))
            backend = rows.backend_of_runs(spec, *local[:3])
            assert backend == "hopper"
            way = by_runs(spec, local[0])
            if name != "full":  # of which as many keys may be copied as are too many
                assert (way is packed_runs) == (len(mine.spans) > 2 and name not in LOOPS)
            found = way.attend(spec._replace(backend=backend), local[0], keys)
            assert torch.equal(found[0], mine.shard(out)), f"out of rank {rank}"
            assert torch.equal(found[1], mine.shard(lse, 2)), f"lse of rank {rank}"
            if name in ("causal", "window", "documents", "full"):
                saved = Saved(local[3], None, local[0], k, v, *found)
                parts = Parts()
                way.gradients(spec, saved, keys, add_key_grads=parts)
                assert all(x.dtype == torch.float32 for x in parts.given)
                for whole, part in zip(total, parts.whole(SEQLEN)):
                    whole += part
    if total[0].any():
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        mask = docs if docs is not None else (0, SEQLEN)
        parts = [
            tilewise.attention_reference(*(x[:, a:b] for x in leaves), **options)
            for a, b in itertools.pairwise(mask)
        ]
        exact = torch.autograd.grad(torch.cat(parts, 1), leaves, dout.double())
        for x, y in zip(total, exact[1:]):
            assert (x - y).norm() / y.norm() < 0.006


def test_cpus_promise_no_bits_of_runs():
    q, k, v, _, options, _ = made()
    layout = td.zigzag(SEQLEN, RANKS)
    spec = call_of(layout, *map(layout.shard, (q, k, v)), **options)
    assert rows.backend_of_runs(spec, q, k, v) is None


def test_pieces_begin_at_a_block_of_the_sequence():
    layout = td.from_positions([torch.arange(500, 900), torch.arange(500)], RANKS).packed(
        (0, 37, 900)
    )
    spec = ShardCall(layout, scalars=Scalars(1.0, left=100, right=0))
    (span,) = layout.spans
    piece = run_calls.run_call(spec, span)
    assert (piece.keys.start - 37) % run_calls.BLOCK == 0
    assert 400 - run_calls.BLOCK < piece.keys.start <= 400 and piece.keys.stop == 900
