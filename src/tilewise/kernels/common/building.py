"""The first launch of a kernel, which compiles it: errors about the machine get a remedy."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

from ...tile.mask import apply_mask
from . import triton_key

INTERPRETED = (
    "TRITON_INTERPRET=1 was set when Triton was imported, so every kernel of this process runs "
    "on CPU tensors alone: start the process without it; tilewise.testing.use_interpreter() "
    "needs no variable"
)
TURN = 1e-4  # seconds
NO_COMPILER = (
    "Triton needs ptxas, and a C compiler for its launchers: install gcc or clang and Python's "
    "headers, or set CC"
)


def is_interpreted() -> bool:
    """Whether Triton compiles nothing in this process."""
    return not isinstance(apply_mask, JITFunction)


@contextlib.contextmanager
def quick_turns() -> Iterator[None]:
    """Inside, threads alternate every 0.1 ms: one that wants Python's lock waits 5 ms for it
    otherwise, twice for each MB that is hashed, and for each thread that starts.
    """
    interval = sys.getswitchinterval()
    if interval > TURN:  # else another thread is inside
        sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        if interval > TURN:
            sys.setswitchinterval(interval)


def apart(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, of an extension module, by one thread at a time, which returns what the module has
    then. Launchers of Triton 3.6 are modules of one name: those of them that are loaded again are
    one module to Python, with the function of the last. So threads took each other's launchers.
    """
    turn = threading.Lock()

    def load_apart(name: str, path: str) -> SimpleNamespace:
        with turn:
            return SimpleNamespace(**vars(load(name, path)))

    return load_apart


with contextlib.suppress(AttributeError):  # a Triton whose kernels share one launcher
    build._load_module_from_path = apart(build._load_module_from_path)


def _prepare() -> None:
    """What Triton does once before its first kernel: it hashes itself, unless that is remembered,
    and compiles its driver's helper.
    """
    with contextlib.suppress(Exception), quick_turns():  # the first kernel meets and names it
        triton_key.remember()
        driver.active  # noqa: B018


_preparing = threading.Thread(target=_prepare)
# This module is imported by a first call, and many others after it: both take half a second
if torch.cuda.is_initialized() and not is_interpreted():
    _preparing.start()


def first_launch(
    kernel: Any, programs: int, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """The compiled kernel, launched. RuntimeError, from what Triton raised, where a folder cannot
    be written or a compiler is missing or fails.
    """
    if _preparing.is_alive():
        _preparing.join()
    try:
        return kernel[(programs,)](*args, **options)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        if not (remedy := _remedy(error)):
            raise
        raise RuntimeError(
            f"the kernels of tilewise cannot be compiled here ({type(error).__name__}: {error}): "
            f"{remedy}"
        ) from error


def side_by_side(compilations: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Compiles several kernels at once, and their launchers, which a C compiler makes: most of the
    time neither holds a lock of Python's. What one of them raises, its launch raises again.
    """

    def run(compilation: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception), on_device(device):  # a thread begins with the first
            _ = compilation().run

    if _preparing.is_alive():
        _preparing.join()
    with quick_turns(), ThreadPoolExecutor(len(compilations)) as threads:
        list(threads.map(run, compilations))


@functools.lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """The number of a GPU's SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` current where it is not."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _remedy(error: Exception) -> str:
    """What to do about it; "" where it is not about the machine."""
    folder = knobs.cache.dir
    is_folder = "cache dir" in str(error)
    if isinstance(error, OSError):
        # A compiler is called by its name, and folders are made from the root on
        name = str(error.filename or folder)
        is_folder = name.startswith(folder) or folder.startswith(name)
    elif not isinstance(error, subprocess.SubprocessError):
        if not is_folder and "C compiler" not in str(error):
            return ""
    if not is_folder:
        return NO_COMPILER
    return (
        f"Triton stores what it compiles in {folder}: set TRITON_CACHE_DIR (and TMPDIR) to a "
        "writable folder with free space"
    )
