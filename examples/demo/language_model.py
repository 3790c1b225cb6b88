"""A causal language model over bytes, small enough to learn in seconds: 2 layers, 4 query heads on
2 key heads of 32, trained through tilewise on the standard library's own source.

Then the same weights read text they have not seen, once with eager attention and once with
tilewise: the perplexities must agree in every printed digit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from tilewise import attention
from tilewise.cli.tables import mark, table

from . import texts
from .standard import standard_attention

Tensor = torch.Tensor
WIDTH, HEADS, KEY_HEADS, HEADDIM, LAYERS, CONTEXT = 128, 4, 2, 32, 2, 256
BATCH, RATE = 4, 5e-3
SAME = 1e-6  # of a perplexity: less than its last printed digit
Attend = Callable[..., Tensor]
OURS = cast(Attend, attention)  # without return_lse it is one tensor


class Block(nn.Module):
    """Attention over grouped heads, then an MLP, each on a normalised copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEADDIM, bias=False)
        self.out = nn.Linear(HEADS * HEADDIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEADDIM))
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)  # views, read in place
        x = x + self.out(attend(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        for table_of in (self.tokens, self.positions):  # small: the first gives the logits, too
            nn.init.normal_(table_of.weight, std=0.02)

    def forward(self, ids: Tensor, attend: Attend = OURS) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, attend)
        return F.linear(self.norm(x), self.tokens.weight)


def run(screen, device: str, quick: bool) -> dict:
    """Trains, reads, compares."""
    data = torch.frombuffer(bytearray(texts.source_bytes(700_000)), dtype=torch.uint8).long()
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    seconds = 2.0 if quick else 10.0
    torch.manual_seed(0)
    model = ByteModel().to(device)
    losses = fit(screen, model, train, seconds, device)
    windows = held_out[: 16 * (CONTEXT + 1)].view(16, -1).to(device)
    with torch.no_grad():
        logits = {
            "tilewise": model(windows[:, :-1], attention),
            "eager": model(windows[:, :-1], standard_attention),
        }
    target = windows[:, 1:].flatten()
    perplexity = {
        name: F.cross_entropy(one.flatten(0, 1).double(), target).exp().item()
        for name, one in logits.items()
    }
    difference = (logits["tilewise"] - logits["eager"]).abs().max().item()
    results = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": sum(losses[-5:]) / len(losses[-5:]),
        "perplexity": perplexity,
        "max_logit_difference": difference,
        "sample": sample(model, b"    def ", 90, device),
        "ok": abs(perplexity["tilewise"] - perplexity["eager"]) < SAME * perplexity["eager"],
    }
    show(screen, results, len(train))
    return results


def fit(screen, model: ByteModel, data: Tensor, seconds: float, device: str) -> list[float]:
    """Steps of AdamW until the time is up; forward and backward attention are tilewise's."""
    from rich.progress import BarColumn, Progress, TextColumn

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    places = torch.Generator().manual_seed(0)
    losses: list[float] = []
    with screen.status("first step: a GPU compiles its kernels here"):
        first = data[: BATCH * CONTEXT].view(BATCH, CONTEXT).to(device)
        model(first).sum().backward()
    start = time.perf_counter()
    columns = [TextColumn("training"), BarColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=seconds)
        while (spent := time.perf_counter() - start) < seconds or len(losses) < 3:
            rows = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=places)
            for group in optimizer.param_groups:  # up in ten steps, down to nothing in time
                group["lr"] = RATE * min((len(losses) + 1) / 10, max(1 - spent / seconds, 0.05))
            batch = data[rows + torch.arange(CONTEXT + 1)].to(device)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.update(task, completed=spent, description=f"loss {losses[-1]:.2f}")
    return losses


@torch.no_grad()
def sample(model: ByteModel, prompt: bytes, count: int, device: str) -> str:
    """Likely bytes after a prompt."""
    ids = torch.tensor([list(prompt)], device=device)
    model(ids)  # compiles, on a GPU
    start = time.perf_counter()
    while len(ids[0]) < count and time.perf_counter() - start < 5:
        chances = (model(ids)[:, -1] / 0.6).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
    return bytes(ids[0].tolist()).decode("utf-8", errors="replace")


def show(screen, results: dict, trained_on: int) -> None:
    """What was learned and whether both attentions read it alike."""
    screen.print(
        f"{results['parameters']:,} parameters, {results['steps']} steps over {trained_on:,} bytes "
        f"of Python's library: loss {results['first_loss']:.2f} to {results['last_loss']:.2f}"
    )
    same = mark(results["ok"])
    rows = [(name, f"{value:.4f}", same) for name, value in results["perplexity"].items()]
    screen.print(table(["attention", "perplexity a byte", ""], rows, ["perplexity a byte"]))
    screen.print(
        f"logits differ by at most {results['max_logit_difference']:.2g}; "
        f"it writes: {results['sample']!r}"
    )
