"""Facts about this machine and this source that several commands state."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple


class Answer(NamedTuple):
    """Whether something is usable; if not, why and what to do."""

    usable: bool
    reason: str = ""
    remedy: str = ""


def typical(dtype, **asked):
    """A Problem as transformers ask it: grouped heads of 64."""
    import torch

    from ..problem import Extras, Scalars, describe

    q, k = torch.empty(0, 0, 8, 64, dtype=dtype), torch.empty(0, 0, 2, 64, dtype=dtype)
    scalars = Scalars(0.125, **asked)
    return describe(q, k, k, Extras(), scalars, "bottom_right", False)


def describe_machine(device: str) -> str:
    """One line: what runs this, on what."""
    import torch

    from .. import __version__, dispatch

    try:
        backend = dispatch.choose(typical(torch.float32), torch.device(device)).NAME
    except NotImplementedError:
        backend = "none"
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    versions = f"tilewise {__version__}, torch {torch.__version__}, triton {triton_version()}"
    return f"{name} | backend: {backend} | {versions}"


def c_compiler() -> Answer:
    """Triton compiles a small launcher in C at the first launch on a GPU."""
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")):
        if path := shutil.which(name):
            return Answer(True, path)
    return Answer(False, "none found", "install gcc or clang, or set CC")


def python_headers() -> Answer:
    """Python.h, for the same launcher."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Answer(True, str(header))
    remedy = "install this Python's development package (python3-dev), or use a standalone Python"
    return Answer(False, f"{header} is missing", remedy)


def gpu() -> Answer:
    """The GPU, or why torch has none."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        size = properties.total_memory / 2**30
        arch = f"sm{properties.major}{properties.minor}"
        if torch.version.hip:
            arch = properties.gcnArchName
        return Answer(True, f"{properties.name}, {arch}, {size:.0f} GiB")
    if torch.version.cuda is None and torch.version.hip is None:
        if driver_version() != "unknown":
            return Answer(
                False,
                "there is one, but this torch is a CPU build",
                "install the CUDA build of torch: `pip install torch`",
            )
        return Answer(False, "none; this torch is a CPU build", "nothing to do: the CPU serves")
    reason = "torch sees none"
    return Answer(False, reason, "check nvidia-smi and CUDA_VISIBLE_DEVICES; the CPU serves")


def folder_size(path: Path) -> int:
    """Bytes of all files under `path`."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # a cache changes while it is read
            continue
    return total


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
