"""DTensors whose tokens are sharded over the ranks of a layout, alone and beside batch or heads."""

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run

import tilewise
import tilewise.distributed as td

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

BATCH, SEQLEN, NHEADS, NHEADS_K, HEADDIM, HEADDIM_V = 2, 48, 4, 2, 16, 24
TOKENS, HEADS = Shard(1), Shard(2)


def whole(**asked):
    """q, k, v, sinks and dO of all tokens, and what one process computes of them."""
    draw = torch.Generator().manual_seed(3)
    shapes = (NHEADS, HEADDIM), (NHEADS_K, HEADDIM), (NHEADS_K, HEADDIM_V), (NHEADS, HEADDIM_V)
    q, k, v, dout = (torch.randn(BATCH, SEQLEN, *x, generator=draw) for x in shapes)
    sinks = torch.randn(NHEADS, generator=draw)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, lse = tilewise.attention(*leaves[:3], sinks=sinks, return_lse=True, **asked)
    grads = torch.autograd.grad((out, lse), leaves, (dout, lse.detach()))
    return leaves, dout, out.detach(), lse.detach(), grads


def dealt(x, layout, mesh, placements):
    """A tensor of all tokens as a DTensor: in the order of the layout, so that each rank has its
    rows, and sharded as `placements` say.
    """
    parts = [layout.at(rank).shard(x.detach()) for rank in range(layout.ranks)]
    return distribute_tensor(torch.cat(parts, 1), mesh, placements)


def attends(mesh, dim, placements, method, causal=True, order="bshd"):
    """The call on DTensors is that of one process."""
    layout = td.zigzag(SEQLEN, mesh if mesh.ndim == 1 else mesh[dim])
    (q, k, v, sinks), dout, out, lse, grads = whole(causal=causal)
    shards = [dealt(x, layout, mesh, placements).requires_grad_() for x in (q, k, v)]
    learned = distribute_tensor(sinks.detach(), mesh, [Replicate()] * mesh.ndim).requires_grad_()
    asked = dict(causal=causal, sinks=learned, return_lse=True)
    given, dout = shards, dealt(dout, layout, mesh, placements)
    if order == "bhsd":
        given = [x.transpose(1, 2) for x in shards]
    with td.context_parallel(layout, method=method):
        found = tilewise.attention(*given, layout=order, **asked)
    of_lse = [{1: Shard(2), 2: Shard(1)}.get(getattr(x, "dim", 0), x) for x in placements]
    assert list(found[1].placements) == of_lse
    mine = found[0].transpose(1, 2) if order == "bhsd" else found[0]
    assert list(mine.placements) == placements and mine.shape == out.shape
    parts = [layout.at(rank).shard(out) for rank in range(layout.ranks)]
    assert torch.equal(mine.full_tensor(), torch.cat(parts, 1))
    parts = [layout.at(rank).shard(lse, 2) for rank in range(layout.ranks)]
    assert torch.equal(found[1].full_tensor(), torch.cat(parts, 2))
    weight = distribute_tensor(torch.cat(parts, 2), mesh, of_lse)
    dq, dk, dv, dsinks = torch.autograd.grad((mine, found[1]), [*shards, learned], (dout, weight))
    for x, expected in zip((dq, dk, dv), grads):
        back = list(x.full_tensor().split(layout.counts, 1))
        torch.testing.assert_close(layout.unshard(back), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dsinks.full_tensor(), grads[3], rtol=1e-4, atol=1e-5)


def one_dimension(rank):
    mesh = init_device_mesh("cpu", (2,))
    attends(mesh, None, [TOKENS], None)
    attends(mesh, None, [TOKENS], "stream", order="bhsd")
    refused(mesh)


def refused(mesh):
    layout = td.zigzag(SEQLEN, mesh)
    (q, k, v, _), *_ = whole()
    q, k, v = (dealt(x, layout, mesh, [TOKENS]) for x in (q, k, v))
    everywhere = distribute_tensor(torch.zeros(BATCH, SEQLEN, 2, 16), mesh, [Replicate()])
    summed = DTensor.from_local(torch.zeros(BATCH, 24, 2, 16), mesh, [Partial()])
    wide = distribute_tensor(torch.zeros(BATCH, 24, 2, 16), mesh, [Shard(3)])
    plain = q.to_local()
    for match, inputs in {
        "rank . has 24 tokens of 48": [everywhere] * 3,
        "Partial": [summed] * 3,
        "headdim": [wide] * 3,
        "are DTensors and others are not": (q, plain, plain),
        "one mesh and placements": (q, everywhere, everywhere),
    }.items():
        with pytest.raises((ValueError, NotImplementedError), match=match):
            td.attention(*inputs, layout=layout)
    alone = td.zigzag(SEQLEN, 1)
    with pytest.raises(ValueError, match="the layout's are"):
        td.attention(q, k, v, layout=alone)


def two_dimensions(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with pytest.raises(NotImplementedError, match="DeviceMesh of 2 dimensions.*mesh.name."):
        td.zigzag(SEQLEN, mesh)
    attends(mesh, "inner", [Shard(0), TOKENS], None)
    attends(mesh, "outer", [TOKENS, HEADS], "stream")
    attends(mesh, "inner", [Replicate(), TOKENS], "heads", causal=False)
    by_index(mesh)


def by_index(mesh):
    """What counts heads, or rows of the batch, in the whole."""
    layout = td.zigzag(SEQLEN, mesh["inner"])
    (q, k, v, _), *_ = whole()

    def of_head(b, h, i, j):
        return i >= j + h

    def of_row(b, h, i, j):
        return i >= j + b

    for placement, mask in ((HEADS, of_head), (Shard(0), of_row)):
        shards = [dealt(x, layout, mesh, [placement, TOKENS]) for x in (q, k, v)]
        with pytest.raises(NotImplementedError, match="counts"):
            td.attention(*shards, layout=layout, mask_mod=mask)
        with pytest.raises(NotImplementedError, match="dropout counts"):
            rng = torch.tensor([1, 2])
            td.attention(*shards, layout=layout, dropout_p=0.5, dropout_rng=rng)
        other = of_row if placement is HEADS else of_head
        out = td.attention(*shards, layout=layout, mask_mod=other)
        expected = tilewise.attention(q, k, v, mask_mod=other).detach()
        back = layout.unshard(list(out.full_tensor().split(layout.counts, 1)))
        assert torch.equal(back, expected)


def test_one_dimension():
    run(one_dimension, 2)


def test_two_dimensions():
    run(two_dimensions, 4)
