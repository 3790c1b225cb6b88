"""Triton's key of itself, a part of the names of all that it keeps on disk: a hash of 400 MB, which
each process computes before its first kernel. Where all kernels are kept already, that is 0.4 s of
the 0.9 s that a first call takes.

The key is kept beside the kernels with sizes and times of Triton's files, and Triton is told of it
where these are the same, as Triton 3.9 tells its own workers of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import cache

NAME = "tilewise-triton-key.json"


def remember() -> None:
    """Has Triton know its key: from disk, or as it computes it, and then it is written there."""
    path, stamp = Path(knobs.cache.dir) / NAME, stamp_of(Path(triton.__file__).parent)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = json.loads(path.read_text())
        if stored["stamp"] == stamp and stored["key"].startswith(triton.__version__):
            key = stored["key"]
            cache.triton_key = lambda: key
            return
    key = cache.triton_key()
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the first kernel meets and names it
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dict(stamp=stamp, key=key)))
        partial.replace(path)  # no process reads half of it


def stamp_of(folder: Path) -> str:
    """A hash of the names, sizes and times of a package's code."""
    stamp = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".so", ".pyd"):
            state = path.stat()
            item = str(path), state.st_size, state.st_mtime_ns
            stamp.update(repr(item).encode())
    return stamp.hexdigest()
