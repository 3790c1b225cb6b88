"""What lesson 10 measures and draws, and the processes that it starts."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import tilewise

from . import DEVICE, ON_GPU, show
from . import listing as listing
from .rank_10 import program as program

NAMES = ["attention to a shard", "fold"]
LIMIT = 120.0  # seconds for all processes


def tiles(found):
    """Prints and draws the tiles of each rank, by layout; returns the counts."""
    counts = {kind: [len(x) for x in of_ranks] for kind, of_ranks in found.items()}
    fig, axes = plt.subplots(1, len(found), figsize=(8, 3.6), sharey=True)
    for ax, (kind, of_ranks) in zip(axes, found.items()):
        print(f"{kind:10}: tiles of each rank {counts[kind]}")
        side = 1 + max(m_block for x in of_ranks for m_block, _ in x)
        picture = torch.full((side, side), float("nan"))
        for rank, pairs in enumerate(of_ranks):
            for m_block, n_block in pairs:
                picture[m_block, n_block] = rank
        ax.imshow(picture.numpy(), cmap="viridis")
        ax.set(xlabel="block of keys", title=f"{kind}: {counts[kind]}")
    axes[0].set_ylabel("block of queries")
    fig.suptitle("Tiles under a causal mask; the color is the rank", y=1.02)
    show(fig, "10_tiles")
    return counts


def on_ranks(ranks, inputs, how):
    """Runs `program` in processes of their own; what each returned, by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((inputs, how), folder / "inputs.pt")
        command = [
            sys.executable,
            str(Path(__file__).with_name("rank_10.py")),
            name,
        ]
        env = os.environ | dict(
            WORLD_SIZE=str(ranks), PYTHONPATH=os.pathsep.join(sys.path)
        )
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        started = [
            subprocess.Popen(
                command, env=env | dict(RANK=str(rank)), stderr=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        try:
            said = [
                process.communicate(timeout=LIMIT)[1].decode()
                for process in started
            ]
        finally:
            for process in started:
                process.kill()
        failed = [
            text for process, text in zip(started, said) if process.returncode
        ]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def calls(fold, seqlen=4096):
    """Attention of queries to one shard, and a fold of what it gives."""
    q, k, v = torch.randn(3, 1, seqlen, 16, 128, device=DEVICE).bfloat16().unbind(0)
    state, part = (
        (
            torch.randn(16 * seqlen, 128, device=DEVICE),
            torch.randn(16 * seqlen, device=DEVICE),
        )
        for _ in range(2)
    )
    run = (lambda: tilewise.attention(q, k, v)), (lambda: fold(state, part))
    return dict(zip(NAMES, run))


def times(figures, fold):
    """Times both, and prints them."""
    shape = dict(batch=1, seqlen=4096, nheads=16, headdim=128)
    found = figures.times(shape, calls(fold) if ON_GPU else dict.fromkeys(NAMES))
    for name, ms in found.items():
        print(f"{name:22}{ms * 1e3:8.1f} us")
    print(f"times: {figures.machine}")
