"""Accelerate's training steps on shards of one sequence: the losses and weights of one process."""

import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import run
from torch.utils.checkpoint import checkpoint

import tilewise.distributed as td

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_sequence.py"
SEQLEN, STEPS = 64, 4


def train(accelerator, model, optimizer, batches):
    model, optimizer = accelerator.prepare(model, optimizer)  # no loader: ranks share each batch
    losses = []
    for ids in batches:
        layout = td.zigzag(ids.shape[1])
        labels = layout.shard(layout.shifted(ids))
        with td.context_parallel(layout):
            logits = model(layout.shard(ids), layout.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (ids.numel() - len(ids))  # this rank's part of the mean
        accelerator.backward(loss * accelerator.num_processes)  # DDP averages gradients
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "sum"))
    return losses


def setup():
    """A model, its optimizer and batches, the same in every process."""
    torch.manual_seed(0)
    model = runpy.run_path(str(EXAMPLE))["Model"](SEQLEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.randint(32, (STEPS, 1, SEQLEN)).repeat(1, 2, 1)


def alone():
    """The losses of the whole sequence in one process, and the weights after the last step."""
    model, optimizer, batches = setup()
    losses = []
    for ids in batches:
        logits = model(ids, torch.arange(SEQLEN))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), [x.detach() for x in model.parameters()]


def accelerator_of(rank):
    ranks = dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    names |= dict(MASTER_ADDR="localhost", MASTER_PORT=0)  # of a group that is there already
    os.environ.update({name: str(x) for name, x in names.items()})
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == ranks and accelerator.process_index == rank
    return accelerator


def accelerated(rank, losses, weights):
    accelerator = accelerator_of(rank)
    model, optimizer, batches = setup()
    found = torch.stack(train(accelerator, model, optimizer, batches))
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    for weight, expected in zip(model.parameters(), weights):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-6)


def test_losses_and_weights_are_those_of_one_process():
    losses, weights = alone()
    initial = setup()[0].parameters()
    assert max((x - y).abs().max() for x, y in zip(weights, initial)) > 1e-2
    run(accelerated, 2, losses, weights)


class Recomputed(torch.nn.Module):
    """A layer that keeps its input alone, and computes the rest again in the backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def summed_squares(model, ids, positions):
    return model(ids, positions).square().sum()


def recomputed(rank, expected):
    accelerator, (model, _, batches) = accelerator_of(rank), setup()
    model.layers = torch.nn.Sequential(*map(Recomputed, model.layers))
    prepared, layout = accelerator.prepare(model), td.zigzag(SEQLEN)
    with td.context_parallel(layout):
        loss = summed_squares(prepared, layout.shard(batches[0]), layout.positions)
        accelerator.backward(loss * accelerator.num_processes)
    for weight, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_checkpointed_model_inside_of_the_context():
    model, _, batches = setup()
    loss = summed_squares(model, batches[0], torch.arange(SEQLEN))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert min(x.abs().max() for x in expected) > 1e-2
    run(recomputed, 2, expected)
