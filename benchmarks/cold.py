"""`python -m benchmarks cold`: how long the first call of a process takes, with an empty kernel
cache and with a warm one.

Each round is a process of its own. The clock starts when torch is imported, the device and autograd
are awake and the inputs are there, and stops when the results are: importing tilewise and Triton is
in it. On a CPU nothing is compiled, so there is no cache to fill. The processes import the tilewise
of the folder that TILEWISE_SOURCE names, if it does: an older one, for rows of before and after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

import tilewise
from tilewise.cli.options import Exit
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, digits, table
from tilewise.explain.shapes import Shape

from .bench.providers import provider
from .bench.row import Row, append, stamp
from .bench.run import Outcome, Stage
from .bench.shapes import square
from .options import output_options, print_rows, progress
from .pictures import bars

PASSES = {"train": ("fwd", "bwd"), "decode": ("decode",)}
CHILD = """
import json, sys, time, torch
call, device, dtype, *shape = json.loads(sys.argv[1])
q, k, v = (
    torch.randn(shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    for _ in range(3)
)
wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
used = torch.full((shape[0],), shape[1], dtype=torch.int32, device=device)
x = torch.ones(8, device=device, requires_grad=True) + 1
torch.autograd.grad(x, x, x)  # torch imports sympy the first time that it gets a gradient
wait()
times = [time.perf_counter()]
import tilewise
if call == "decode":
    with torch.no_grad():
        tilewise.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=used, causal=True)
    wait()
    times.append(time.perf_counter())
else:
    out = tilewise.attention(q, k, v, causal=True)
    wait()
    times.append(time.perf_counter())
    torch.autograd.grad(out, (q, k, v), out)
    wait()
    times.append(time.perf_counter())
print(json.dumps([(b - a) * 1e3 for a, b in zip(times, times[1:])]))
"""


class ChildFailed(RuntimeError):
    """A process ended without its times; the text is the end of what it said."""


def passes_of(shape: Shape) -> tuple[str, ...]:
    """What is timed of a shape."""
    return PASSES["decode" if shape.seqlen_q == 1 else "train"]


def shape_for(device: str) -> Shape:
    """Causal self-attention of 1024 tokens; of 2 heads on a CPU."""
    if device.startswith("cuda"):
        return square("fwd+bwd", 1024, 128, True, tokens=1024)
    return square("fwd+bwd", 1024, 64, True, tokens=1024, hidden=128, dtype="float32")


def first_calls(shape: Shape, device: str, cache: str | None) -> list[float]:
    """Milliseconds of each of `passes_of`, the first of a new process."""
    here = os.environ.get("TILEWISE_SOURCE") or str(Path(tilewise.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    environment |= {} if cache is None else {"TRITON_CACHE_DIR": cache}
    sizes = shape.batch, shape.seqlen_k, shape.nheads, shape.headdim
    call = "decode" if shape.seqlen_q == 1 else "train"
    asked = json.dumps([call, device, shape.dtype, *sizes])
    command = [sys.executable, "-c", CHILD, asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildFailed(f"the process ended with {done.returncode}: {done.stderr[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds_of(shape: Shape, device: str, rounds: int) -> Iterator[tuple[str, list[float]]]:
    """For each process the state of its cache, and its times."""
    for _ in range(rounds):
        if not device.startswith("cuda"):
            yield "none", first_calls(shape, device, None)
            continue
        with tempfile.TemporaryDirectory() as cache:
            yield "empty", first_calls(shape, device, cache)
            yield "warm", first_calls(shape, device, cache)


def run_cold(
    *,
    device: str = "cpu",
    rounds: int = 3,
    call: str = "train",
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Row] | Outcome:
    """A row a pass and state of the cache, or the outcome of a call that is not right."""
    shape, common = shape_for(device), stamp("cold", device)
    tried = Stage(shape, device).ready(provider("tilewise"))
    if isinstance(tried, Outcome):
        return tried
    if call == "decode":
        shape = shape._replace(seqlen_q=1)
    passes = passes_of(shape)
    times: dict[str, list[list[float]]] = {}
    for cache, found in rounds_of(shape, device, rounds):
        show(f"{cache} cache: " + ", ".join(f"{d} {ms:.0f} ms" for d, ms in zip(passes, found)))
        times.setdefault(cache, []).append(found)
    rows = [
        Row.of(
            *(common, shape._replace(direction=direction), "tilewise", own, tried.verdict),
            extra={"cache": cache},
        )
        for cache, each in times.items()
        for direction, own in zip(passes, zip(*each))
    ]
    if save is not None:
        append(save, rows)
    return rows


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--call", type=click.Choice(list(PASSES)), default="train", show_default=True)
@output_options
def cold(rounds, call, device, save, as_json, png) -> None:
    """How long the first forward and the first backward of a process take, or its first decode.

    Each round starts a process with an empty kernel cache and one that finds it filled; on a CPU,
    where nothing is compiled, one process. Importing tilewise and Triton is in the first forward;
    torch, the device and autograd are awake before the clock starts.
    """
    screen = console(as_json)
    try:
        options = dict(device=device, rounds=rounds, call=call, save=save)
        found = run_cold(**options, show=progress(screen))
    except ChildFailed as error:
        raise click.ClickException(str(error)) from error
    if isinstance(found, Outcome):
        screen.print(f"not timed: {found.wrong or found.refused}")
        raise SystemExit(Exit.FAILED)
    print_rows(found, as_json)
    rows = [
        (row.extra["cache"], row.shape["direction"], *map(digits, seconds(row))) for row in found
    ]
    columns = ["cache", "first", "s", "p20", "p80"]
    screen.print(table(columns, rows, numbers=columns[2:]))
    if png:
        draw(png, found)


def seconds(row) -> tuple[float, float, float]:
    """Median, p20 and p80."""
    return row.median_ms / 1e3, row.p20_ms / 1e3, row.p80_ms / 1e3


def draw(path: str, rows: list) -> None:
    """A bar a pass for each state of the cache."""
    caches = list(dict.fromkeys(row.extra["cache"] for row in rows))
    series = {
        f"first {direction}": [seconds(r)[0] for r in rows if r.shape["direction"] == direction]
        for direction in dict.fromkeys(row.shape["direction"] for row in rows)
    }
    bars(path, Axes("First call of a process", "kernel cache", "seconds"), caches, series)
