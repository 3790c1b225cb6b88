"""While `enable_sdpa` holds: shards of heads are attended to by tilewise's own rules, and inside of
torch's context_parallel each step of torch's ring is our kernel.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run

import tilewise
from tilewise.ops import attention as ops

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no distributed or no gloo here", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

experimental = pytest.importorskip("torch.distributed.tensor.experimental")
if not hasattr(experimental, "context_parallel"):
    pytest.skip("this torch has no context_parallel", allow_module_level=True)

WORLD = 2
SHAPE = 2, 4, 32, 16  # batch, nheads, seqlen, headdim


@pytest.mark.slow
def test_two_ranks():
    run(_main, WORLD)


def _main(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    by_heads(mesh), by_sequence(mesh), inside_ours_is_refused(mesh)


def whole():
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(4, *SHAPE, generator=generator, dtype=torch.float64).float()
    return [x.clone() for x in made.unbind(0)]


def expected(q, k, v, dout):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double()))]


def by_heads(mesh):
    *leaves, dout = (distribute_tensor(x, mesh, [Shard(1)]) for x in whole())
    leaves = [x.requires_grad_() for x in leaves]
    taken = []
    real, ops.run_forward = (
        ops.run_forward,
        lambda *a, **named: (taken.append(1), real(*a, **named))[1],
    )
    with tilewise.enable_sdpa():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    ops.run_forward = real
    assert taken == [1] and out.placements == (Shard(1),)
    found = [x.full_tensor() for x in (out.detach(), *grads)]
    torch.testing.assert_close(found, expected(*whole()), rtol=1e-5, atol=1e-5)


def by_sequence(mesh):
    """torch's F.scaled_dot_product_attention has no way to its ring on the CPU: its flash operator
    is called as it does on a GPU.
    """
    unshard = experimental._attention.context_parallel_unshard
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    q, k, v, dout = parts = whole()
    want = expected(*parts)
    taken = []
    real, ops.run_forward = (
        ops.run_forward,
        lambda *a, **named: (taken.append(1), real(*a, **named))[1],
    )
    buffers = dict(buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4)
    with tilewise.enable_sdpa(), experimental.context_parallel(mesh, **buffers):
        of_rank = (DTensor.from_local(x, mesh, [Shard(2)]) for x in (q, k, v, dout))
        *leaves, dout = of_rank
        leaves = [x.requires_grad_() for x in leaves]
        out = flash(*leaves, 0.0, True)[0]
        grads = torch.autograd.grad(out, leaves, dout)
        found = [x.to_local().detach() for x in (out, *grads)]
        found = unshard(mesh, found, [2] * 4)
    ops.run_forward = real
    assert len(taken) == WORLD  # one for each step of the ring
    torch.testing.assert_close(list(found), want, rtol=1e-5, atol=1e-5)


def inside_ours_is_refused(mesh):
    """A call of ours on plain shards, enabled or not."""
    q = whole()[0]
    with (
        tilewise.enable_sdpa(),
        experimental.context_parallel(mesh, buffers=[q.clone()], buffer_seq_dims=[2]),
    ):
        with pytest.raises(NotImplementedError, match="call torch.nn.functional"):
            tilewise.scaled_dot_product_attention(q, q, q)
