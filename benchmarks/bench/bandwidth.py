"""What a device's memory gives here and now: gigabytes a second of a copy and of a sum."""

from __future__ import annotations

import torch

from .timer import Spread, clock_for, time_interleaved

BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # of a tensor: more than any cache holds


def bandwidth(device: str, rounds: int = 5, round_ms: float = 30.0) -> dict[str, float]:
    """10^9 bytes a second by name: `copy` reads and writes each byte, `read` adds them up."""
    size = BYTES["cuda" if device.startswith("cuda") else "cpu"]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "read": source.sum}
    moved = {"copy": 2 * size, "read": size}
    times = time_interleaved(calls, clock=clock_for(device), rounds=rounds, round_ms=round_ms)
    return {name: moved[name] / Spread.of(ms).median * 1e-6 for name, ms in times.items()}
