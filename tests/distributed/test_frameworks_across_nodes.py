"""Training by other libraries where each rank is a node: what tests of one node hold, and FSDP2 in
torchtitan's shape.
"""

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.nodes import elsewhere
from helpers.processes import run
from helpers.tiers import sample_rows

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

RANKS = 2


def module_of(name):
    """A module of tests beside this one."""
    return importlib.import_module(f"{__name__.rpartition('.')[0]}.{name}".strip("."))


def sharded(rank, losses, weights):
    """Each layer's weights are sharded over the ranks that share the sequence, and its attention
    enters the context by a plan of `parallelize_module`.
    """
    accelerate = module_of("test_accelerate")
    setup, SEQLEN = accelerate.setup, accelerate.SEQLEN
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
    model, _, batches = setup()
    layout = td.zigzag(SEQLEN, mesh["cp"])
    parallelize_module(model, mesh["cp"], {"layers.*": td.ContextParallel(layout)})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for ids in batches:
        labels = layout.shard(layout.shifted(ids))
        logits = model(layout.shard(ids), layout.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (ids.numel() - len(ids))  # this rank's part of the mean
        (loss * RANKS).backward()  # FSDP averages gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        found.append(total)
    torch.testing.assert_close(torch.stack(found), losses, rtol=1e-5, atol=0)
    for weight, expected in zip(model.parameters(), weights):
        torch.testing.assert_close(weight.detach().full_tensor(), expected, rtol=1e-4, atol=1e-6)


def across(rank, module, name, args):
    with elsewhere(range(RANKS), rank):
        getattr(module_of(module), name)(rank, *args)
        found = [x.nodes for x in arenas._arenas.values()]
    assert found and all(len(nodes.members) == RANKS for nodes in found)


HERE = __name__.rpartition(".")[2]
FRAMEWORKS = [
    ("accelerate", "test_accelerate", "accelerated"),
    ("transformers", "test_transformers", "two"),
    ("torch", "test_style", "styled"),
    ("accelerate", HERE, "sharded"),
]


@pytest.mark.parametrize("library, module, name", sample_rows(FRAMEWORKS, FRAMEWORKS[3]))
def test_over_two_nodes(library, module, name):
    pytest.importorskip(library)
    of_one = module_of("test_accelerate").alone if library == "accelerate" else tuple
    run(across, RANKS, module, name, of_one())
