"""Gradients of runs of rows, of one call each: sums of parts that are of some keys."""

import itertools
import weakref

import pytest
import torch
from helpers.call_specs import call_of
from helpers.parts import Parts

import tilewise
import tilewise.distributed as td
from tilewise.distributed.methods import rows
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.memory import Files
from tilewise.problem import Saved

SEQLEN, RANKS, BATCH = 96, 2, 2


class Here:
    """A barrier of one process."""

    rank, ranks = 0, 1


def given(layout, **options):
    """A rank's call, what its backward takes, and all keys."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(BATCH, SEQLEN, 2, 16, dtype=torch.float64) for _ in range(4))
    each = [
        tilewise.attention(*(x[:, a:b] for x in (q, k, v)), return_lse=True, **options)
        for a, b in itertools.pairwise(layout.cu_seqlens or (0, SEQLEN))
    ]
    out, lse = torch.cat([x[0] for x in each], 1), torch.cat([x[1] for x in each], 2)
    local = [layout.shard(x) for x in (q, k, v, dout, out)]
    spec = call_of(layout, *local[:3], **options)
    saved = Saved(local[3], None, local[0], k, v, local[4], layout.shard(lse, 2))
    marks = (None,) * len(layout.spans)
    return spec, saved, rows.PulledKeys(k, v, Arena(Here(), Files()), marks=marks)


LAYOUTS = {
    "zigzag": td.zigzag(SEQLEN, RANKS),
    "striped": td.striped(SEQLEN, RANKS, block=4),
    "backwards": td.from_positions([torch.arange(95, 47, -1), torch.arange(48)], RANKS),
    "documents": td.striped(SEQLEN, RANKS, block=8).packed([0, 10, 50, SEQLEN]),
}


@pytest.mark.parametrize("options", [dict(causal=True), dict(causal=True, window=(5, 0)), {}])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sums_of_runs(layout, options):
    def parts_of(layout):
        spec, saved, keys = given(layout, **options)
        parts = Parts()
        rows.gradients(spec, saved, keys, add_key_grads=parts)
        return parts.whole(SEQLEN)

    found = [parts_of(layout.at(rank)) for rank in range(RANKS)]
    alone = td.contiguous(SEQLEN, 1)
    alone = alone.packed(layout.cu_seqlens) if layout.cu_seqlens else alone
    for *parts, whole in zip(*found, parts_of(alone)):
        assert torch.allclose(sum(parts), whole, atol=1e-12)


def test_parts_of_many_runs_are_not_there_at_a_time(monkeypatch):
    """Each has the keys that its run sees: together they are six times the sequence."""
    parts, most, made = [], [], rows.gradients_of

    def noted(*args, **more):
        most.append(sum(x() is not None for x in parts))
        found = made(*args, **more)
        parts.append(weakref.ref(found.dk.untyped_storage()))
        return found

    monkeypatch.setattr(rows, "gradients_of", noted)
    spec, saved, keys = given(td.striped(SEQLEN, RANKS, block=4), causal=True)
    rows.gradients(spec, saved, keys, add_key_grads=Parts())
    assert len(most) == 12 and max(most) <= 1
