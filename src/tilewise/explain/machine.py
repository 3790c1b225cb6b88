"""Facts about this machine and this source: the CPU, the driver, Triton's version, the commit."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The commit of the source that runs, '+' where the tree differs, 'unknown' outside git."""
    if stated := os.environ.get("TILEWISE_COMMIT"):
        return stated
    library = Path(__file__).resolve().parents[1]
    head = _output("git", "-C", str(library), "rev-parse", "--short=10", "HEAD")
    changed = _output("git", "-C", str(library), "status", "--porcelain", "--", str(library))
    return f"{head}{'+' if changed else ''}" if head else "unknown"


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version."""
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else "unknown"


def triton_version() -> str:
    """The version of the Triton that would be imported, without importing it: its installer's
    records may be another's, where PYTHONPATH names a newer one.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "none"
    match = re.search(r"__version__\s*=\s*['\"](.+?)['\"]", Path(spec.origin).read_text())
    return match[1] if match else "unknown"


@functools.cache
def cpu_name() -> str:
    """The CPU's model and how many threads torch uses on it."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'' if threads == 1 else 's'}"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
