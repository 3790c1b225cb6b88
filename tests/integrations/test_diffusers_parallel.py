"""diffusers' context parallelism through tilewise: the whole sequence's outputs and gradients."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("diffusers")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch as dispatch
from helpers.processes import run

from tilewise.integrations import diffusers as integration

WORLD = 2
BATCH, SEQLEN, NHEADS, HEADDIM = 2, 24, 4, 16
SPLIT = SEQLEN // WORLD


def tensors():
    """query, key and value of the whole sequence, and the gradient of out."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, BATCH, SEQLEN, NHEADS, HEADDIM)
    return torch.randn(shape, generator=generator).unbind(0)


def padding():
    seen = torch.ones(BATCH, SEQLEN, dtype=torch.bool)
    seen[0, 4:15] = seen[1, 20:] = False
    return seen


def expected(mask):
    *inputs, dout = tensors()
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = integration.attention_forward(*inputs, mask, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)


def shards(rank, ring, ulysses):
    """This rank's inputs, the call on them, and what cuts its part of a whole result."""
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    config.setup(rank, WORLD, torch.device("cpu"), mesh)
    mine = slice(rank * SPLIT, (rank + 1) * SPLIT)
    *inputs, dout = (x[:, mine].clone() for x in tensors())
    call = functools.partial(
        dispatch.dispatch_attention_fn,
        *(x.requires_grad_() for x in inputs),
        backend=dispatch.AttentionBackendName("tilewise"),
        parallel_config=SimpleNamespace(context_parallel_config=config),
    )
    return inputs, dout, call, lambda x: x[:, mine]


def sharded(rank, ring, ulysses, mask):
    inputs, dout, call, part = shards(rank, ring, ulysses)
    asked = {} if mask is None else {"attn_mask": part(mask)}
    whole = [part(x) for x in expected(mask)]
    with torch.no_grad():
        found = call(**asked, attention_kwargs=dict(return_lse=True))
    torch.testing.assert_close(found, tuple(whole[:2]), atol=2e-6, rtol=1e-5)
    out = call(**asked)
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=1e-5)
    grads = torch.autograd.grad(out, inputs, dout)
    torch.testing.assert_close(grads, tuple(whole[2:]), atol=5e-6, rtol=1e-4)


def under_autocast(rank, ring, ulysses):
    """fp32 inputs are computed with in bf16, and get their gradients in fp32."""
    inputs, dout, call, part = shards(rank, ring, ulysses)
    with torch.autocast("cpu", torch.bfloat16):
        out = call()
    grads = torch.autograd.grad(out, inputs, dout.to(out.dtype))
    whole = expected(None)
    for found, wanted in zip((out, *grads), (whole[0], *whole[2:]), strict=True):
        torch.testing.assert_close(found.float(), part(wanted), atol=4e-2, rtol=4e-2)
    assert {x.dtype for x in grads} == {torch.float32}


def refused(rank, ring, ulysses):
    _, _, call, part = shards(rank, ring, ulysses)
    mask = part(padding())
    asked = {
        "dropout_p": dict(dropout_p=0.5),
        "is_causal": dict(is_causal=True),
        "return_lse with gradients": dict(attention_kwargs=dict(return_lse=True)),
        "differs by query or head": dict(attn_mask=mask[:, None, None].expand(-1, NHEADS, 1, -1)),
    }
    if ring > 1:
        asked["with a ring"] = dict(attn_mask=mask)
    else:
        asked["with a gradient"] = dict(attn_mask=torch.zeros(mask.shape, requires_grad=True))
    for match, options in asked.items():
        with pytest.raises(NotImplementedError, match=match):
            call(**options)


def everything(rank):
    integration.register()
    ways = [(1, WORLD), (WORLD, 1)]
    for ring, ulysses in ways:
        sharded(rank, ring, ulysses, None)
        under_autocast(rank, ring, ulysses)
        refused(rank, ring, ulysses)
    sharded(rank, 1, WORLD, padding())
    sharded(rank, 1, WORLD, torch.zeros(BATCH, SEQLEN).masked_fill(~padding(), -torch.inf))


@pytest.mark.slow
def test_shards_give_what_the_whole_sequence_gives():
    run(everything, WORLD)
