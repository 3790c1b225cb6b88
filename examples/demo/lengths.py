"""One layer's real Q, K and V, laid end to end to any length, through three attentions.

At each length: error against fp64 beside its bound, time, and the memory that a call takes beyond
its inputs. Standard attention stops where its score matrices would no longer fit.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from tilewise import attention
from tilewise.cli.tables import mark, table
from tilewise.testing.tolerance import judge

from .encoder import Layer
from .standard import standard_attention

Tensor = torch.Tensor
SAMPLED = 64  # queries a length that are held to fp64, against all keys
CALLS = 3  # of an attention at a long length: for its error, its time and its memory
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Point(NamedTuple):
    """One attention at one length."""

    seqlen: int
    provider: str
    ms: float
    peak_mib: float
    max_error: float
    bound: float
    ok: bool


class Grown(NamedTuple):
    """All points, and what is said of them."""

    points: list[Point]
    title: str

    def largest_common(self) -> dict[str, Point]:
        """The points of the largest length at which standard attention still ran."""
        last = max(point.seqlen for point in self.points if point.provider == "standard")
        return {point.provider: point for point in self.points if point.seqlen == last}


def run(screen, layer: Layer, device: str, quick: bool) -> Grown:
    """Doubles the length until the time is spent or the longest is reached."""
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    longest = (4096 if quick else 131072) if on_gpu else (1024 if quick else 16384)
    budget = 4.0 if quick else 30.0
    points: list[Point] = []
    seqlen, start, ahead = 256, time.perf_counter(), 0.0
    with screen.status("") as status:
        while seqlen <= longest and time.perf_counter() - start + ahead < budget:
            began = time.perf_counter()
            status.update(f"{seqlen} tokens")
            points += measure(layer, seqlen, dtype, device)
            # Twice the length takes four times as long, without standard attention perhaps less.
            ahead = 4 * (time.perf_counter() - began)
            if not fits(layer, 2 * seqlen, dtype, device):
                ahead = 4 * CALLS * sum(p.ms for p in points[-3:] if p.provider != "standard") / 1e3
            seqlen *= 2
    nheads, headdim = layer.q.shape[1:]
    what = f"{nheads} heads, headdim {headdim}, {str(dtype).removeprefix('torch.')}"
    show(screen, points)
    screen.print(f"{what}; {how_memory_is_measured(device)}", style="dim")
    if not on_gpu:
        screen.print("on the CPU such plain attention is torch's own fused kernel", style="dim")
    return Grown(points, f"Attention forward on MiniLM's own Q, K, V ({what})")


def measure(layer: Layer, seqlen: int, dtype: torch.dtype, device: str) -> list[Point]:
    """Every attention at one length; what takes long is timed once."""
    q, k, v = (grow(x, seqlen).to(device, dtype)[None] for x in layer)
    ours = cast(Attend, attention)  # without return_lse it is one tensor
    attends: dict[str, Attend] = {"tilewise": ours, "sdpa": sdpa}
    if fits(layer, seqlen, dtype, device):
        attends["standard"] = standard_attention
    with torch.no_grad():
        verdicts = errors(attends, q, k, v)
        calls = {name: (lambda f=f: f(q, k, v)) for name, f in attends.items()}
        times = {name: milliseconds(call, 1, device) for name, call in calls.items()}
        for _ in range(2 if max(map(sum, times.values())) < 500 else 0):
            for name, call in calls.items():
                times[name] += milliseconds(call, 3, device)
        peaks = {name: peak_mib(call, device) for name, call in calls.items()}
    return [
        Point(
            seqlen,
            name,
            statistics.median(times[name]),
            peaks[name],
            verdicts[name].max_error,
            verdicts[name].max_bound,
            verdicts[name].ok,
        )
        for name in attends
    ]


def grow(x: Tensor, seqlen: int) -> Tensor:
    """The first `seqlen` rows of the real ones laid end to end again and again."""
    return x.repeat(-(-seqlen // x.shape[0]), 1, 1)[:seqlen]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own choice of kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def fits(layer: Layer, seqlen: int, dtype: torch.dtype, device: str) -> bool:
    """Whether standard attention's scores and their softmax leave room for others here."""
    scores = 3 * layer.q.shape[1] * seqlen**2 * dtype.itemsize
    on_gpu = device.startswith("cuda")
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else min(free_memory(), 8 << 30)
    return scores < 0.5 * free


def errors(attends: dict[str, Attend], q: Tensor, k: Tensor, v: Tensor) -> dict:
    """Verdicts over sampled queries, against all keys in fp64."""
    rows = torch.linspace(0, q.shape[1] - 1, SAMPLED, device=q.device).long()
    exact = standard_attention(q[:, rows].double(), k.double(), v.double())
    plain = standard_attention(q[:, rows], k, v)
    return {name: judge(attend(q, k, v)[:, rows], exact, plain) for name, attend in attends.items()}


def milliseconds(call: Callable[[], object], calls: int, device: str) -> list[float]:
    """The time of each call, its end awaited."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def free_memory() -> int:
    """Bytes of host memory that can be had without swapping; 4 GiB where no file says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) << 10
    except (OSError, StopIteration):
        return 4 << 30


def peak_mib(call: Callable[[], object], device: str) -> float:
    """The most memory that a call holds at once beyond what there was, its result included."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it announces itself on stderr
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler: Any = profiled.profiler  # no stub has its events' sizes
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def how_memory_is_measured(device: str) -> str:
    """Said beside the figures."""
    if device.startswith("cuda"):
        return "memory is torch.cuda.max_memory_allocated beyond the inputs"
    return "memory is the peak of torch's CPU allocations in a call, as its profiler records them"


def show(screen, points: list[Point]) -> None:
    """One row for each length and attention."""
    rows = [
        (p.seqlen, p.provider, p.ms, p.peak_mib, p.max_error, p.bound, mark(p.ok)) for p in points
    ]
    numbers = ["ms", "MiB", "max error", "bound"]
    screen.print(table(["tokens", "attention", *numbers, ""], rows, ["tokens", *numbers]))
