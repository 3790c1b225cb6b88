"""Trains a small language model on one sequence that is dealt over processes.

    python examples/long_sequence.py                                    # one process
    torchrun --nproc-per-node 2 examples/long_sequence.py               # two, of a CPU
    torchrun --nproc-per-node 2 examples/long_sequence.py --method stream
    torchrun --nproc-per-node 4 examples/long_sequence.py --nnodes 2    # of one machine, as of two

Of two machines, on each, with its own rank and the address of the first:

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST examples/long_sequence.py

The sequence repeats itself after a while, and the model learns to look back for what came next. The
losses are those of one process to 1e-6 of each, whatever the number of processes and the method.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import tilewise
import tilewise.distributed as td

VOCABULARY, WIDTH, HEADS, HEADDIM = 32, 64, 4, 16


class Layer(torch.nn.Module):
    """Attention and a perceptron. Nothing in it knows of other processes."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * HEADS * HEADDIM)
        self.out = torch.nn.Linear(HEADS * HEADDIM, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 128), torch.nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEADDIM)).unbind(-3)
        x = x + self.out(tilewise.attention(q, k, v, causal=True).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """Tokens and their positions to logits."""

    def __init__(self, seqlen: int):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(seqlen, WIDTH)
        self.layers = torch.nn.Sequential(Layer(), Layer())
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(ids) + self.places(positions)))


def train(layout: td.Layout, steps: int, method: str | None) -> list[float]:
    """The loss of each step, of the whole sequence."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = Model(layout.seqlen)
    # Gradients are sums in another order on several ranks. Adam divides by their size, and without
    # a larger eps makes a step of the rounding of those that are almost 0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    ids = torch.randint(VOCABULARY, (1, layout.seqlen // 4)).repeat(1, 4)
    labels = layout.shard(layout.shifted(ids))  # shifted before they are dealt
    ids, losses = layout.shard(ids), []
    for _ in range(steps):
        with td.context_parallel(layout, method=method, bitwise=method != "ring"):
            logits = model(ids, layout.positions)
        # In fp32 a loss of 1e-4 is a difference of two numbers near 10, whose last bits are 1e-6
        loss = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (layout.seqlen - 1)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if layout.group is not None:  # each rank has a part of the loss and of all gradients
            dist.all_reduce(total, group=layout.group)
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=layout.group)
        optimizer.step()
        losses.append(total.item())
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """The losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seqlen", type=int, default=200)
    parser.add_argument("--method", choices=["stream", "heads", "ring"])
    parser.add_argument("--nnodes", type=int, help="found, unless it is given")
    asked = parser.parse_args(arguments)
    if "RANK" in os.environ and not dist.is_initialized():  # by torchrun
        dist.init_process_group("gloo")
    group: Any = None if dist.is_initialized() else 1
    if asked.nnodes is not None:
        per_node = dist.get_world_size() // asked.nnodes
        group = init_device_mesh("cpu", (asked.nnodes, per_node), mesh_dim_names=("node", "rank"))
    layout = td.zigzag(asked.seqlen, group)
    losses = train(layout, asked.steps, asked.method)
    if layout.rank == 0:
        print(layout.explain())
        for step in range(0, asked.steps, max(1, asked.steps // 5)):
            print(f"step {step:3}  loss {losses[step]:.6f}")
        print(f"step {asked.steps - 1:3}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
