"""Bytes by the hardware's own counters: Nsight Compute watches a child process make one call.

    python -m benchmarks.counters '{"shape": [...], "provider": "tilewise"}'    # the child

The child warms up unwatched, so that compiling and filling caches is not counted. Caches stay as
calls leave them: nothing is flushed between the kernels of a call.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import tilewise
from tilewise.explain.shapes import Shape

READ, WRITTEN = METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
PLACES = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
NO_RIGHT = "ERR_NVGPUCTRPERM"
SECONDS = 300


class Unavailable(Exception):
    """Why counters tell nothing here."""


class Counted(NamedTuple):
    """Bytes that a call read from the GPU's memory and wrote to it, over so many kernels."""

    read: float
    written: float
    kernels: int


def find_ncu() -> str:
    """The path of Nsight Compute; Unavailable where there is none."""
    if found := shutil.which("ncu"):
        return found
    for place in PLACES:
        if found := sorted(Path("/").glob(place)):
            return str(found[-1])
    raise Unavailable("Nsight Compute (ncu) is not installed: it comes with the CUDA toolkit")


def count(shape: Shape, provider: str, device: str = "cuda") -> Counted:
    """What one call of a provider moves; Unavailable where the counters cannot be read."""
    if not device.startswith("cuda"):
        raise Unavailable("hardware counters of memory are read on CUDA GPUs only")
    spec = json.dumps({"shape": list(shape), "provider": provider, "device": device})
    command = [find_ncu(), "--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    command += ["--profile-from-start", "off", "--target-processes", "all"]
    command += ["--cache-control", "none", "--clock-control", "none"]
    command += [sys.executable, "-m", __name__, spec]
    here = [str(Path(file).resolve().parents[1]) for file in (__file__, tilewise.__file__)]
    path = os.pathsep.join(filter(None, (*here, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Nsight Compute did not run: {error}"[:200]) from error
    return parse(done.stdout + "\n" + done.stderr)


def parse(output: str) -> Counted:
    """The sums over all kernels of what `ncu --csv` prints; Unavailable with what it says else."""
    lines = output.splitlines()
    if NO_RIGHT in output:
        raise Unavailable(
            f"the driver keeps its counters for administrators ({NO_RIGHT}): run as root, or load "
            "the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    head = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        said = [line for line in lines if "==ERROR==" in line or "==WARNING==" in line]
        said += [line for line in lines if line.strip()][-1:]
        why = said[0] if said else "no output"
        raise Unavailable(f"Nsight Compute counted nothing: {why[:200]}")
    table = [line for line in lines[head:] if line.startswith('"')]
    sums, kernels = dict.fromkeys(METRICS, 0.0), set()
    for record in csv.DictReader(io.StringIO("\n".join(table))):
        if record["Metric Name"] in sums:
            sums[record["Metric Name"]] += float(record["Metric Value"].replace(",", ""))
            kernels.add(record["ID"])
    if not kernels:
        raise Unavailable("Nsight Compute saw no kernel of the call")
    return Counted(sums[READ], sums[WRITTEN], len(kernels))


def profile_once(spec: str) -> None:
    """Runs in the child process: one call between the profiler's start and stop."""
    import torch

    from .bench.check import make_inputs
    from .bench.providers import provider
    from .bench.run import call_of

    asked = json.loads(spec)
    shape, device = Shape(*asked["shape"]), asked["device"]
    one = provider(asked["provider"])
    inputs = make_inputs(shape, device, one.layout)
    call = call_of(shape, one.prepare(shape, device), inputs)
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    profile_once(sys.argv[1])
