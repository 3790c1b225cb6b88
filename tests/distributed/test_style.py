"""`ContextParallel` under `parallelize_module`."""

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from torch.utils.checkpoint import checkpoint

import tilewise
import tilewise.distributed as td
from tilewise.errors import ArgumentError
from tilewise.ops.context_parallel import is_sharded

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

SEQLEN, WIDTH = 40, 32


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        return tilewise.attention(q, k, v, causal=True).flatten(-2)


class Model(torch.nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Attends() for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return x


def gradients(model, x):
    out = model(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters()))


def styled(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(1, SEQLEN, WIDTH, generator=torch.Generator().manual_seed(1))
    out, grads = gradients(Model(), x)
    layout = td.zigzag(SEQLEN, mesh)
    for recomputes in (False, True):
        for given in (layout, lambda: layout):
            model = parallelize_module(
                Model(recomputes), mesh, {"layers.*": td.ContextParallel(given, method="stream")}
            )
            mine, found = gradients(model, layout.shard(x))
            assert not is_sharded()
            torch.testing.assert_close(mine, layout.shard(out), rtol=1e-5, atol=1e-6)
            for part, whole in zip(found, grads, strict=True):
                dist.all_reduce(part)
                torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)
            assert list(model.state_dict()) == list(Model().state_dict())
    with pytest.raises((ArgumentError, td.RankMismatch), match="rank . has 20 tokens of 40"):
        model(x)
    assert not is_sharded()  # after an error, too
    graph = torch.compile(model.layers[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(graph(layout.shard(x)), model.layers[0](layout.shard(x)))
    refused(mesh)


def refused(mesh):
    with pytest.raises(ArgumentError, match="the mesh has ranks .0, 1. and the layout's are"):
        parallelize_module(Attends(), mesh, td.ContextParallel(td.zigzag(SEQLEN, 1)))
    wide = init_device_mesh("cpu", (1, 2))
    with pytest.raises(NotImplementedError, match="DeviceMesh of 2 dimensions"):
        td.ContextParallel(td.zigzag(SEQLEN))._apply(Attends(), wide)
    late = parallelize_module(Attends(), mesh, td.ContextParallel(lambda: "zigzag"))
    with pytest.raises(ArgumentError, match="layout is a str"):
        late(torch.zeros(1, 20, WIDTH))
    assert not is_sharded()


def test_two_ranks():
    run(styled, 2)
