"""Where a kernel is, and what it calls a piece of memory: for messages and traces."""

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent)
_PYTHON = str(Path(linecache.__file__).parent)


def kernel_frames(frame: Any = None) -> list[Any]:
    """Frames of the kernel's code, innermost first, from a frame or from the caller."""
    frame = frame or sys._getframe(1)
    frames = []
    while frame:
        file = frame.f_code.co_filename
        if not (file.startswith(_OURS) or (file.startswith(_PYTHON) and "-packages" not in file)):
            frames.append(frame)
        frame = frame.f_back
    return frames


def line_of(frame: Any) -> str:
    """File, line and text of the line that a frame is at."""
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()
    return f"{Path(path).name}:{number}: {text}"


def name_of(allocation: Any, frames: list[Any]) -> str | None:
    """What the first of these frames that holds an allocation calls it."""
    for frame in frames:
        for name, value in frame.f_locals.items():
            for path, held in _paths(value, name):
                if getattr(held, "allocation", None) is allocation:
                    return path
    return None


def _paths(value: Any, name: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, tuple) and depth:
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _paths(item, f"{name}.{fields[i]}" if fields else f"{name}[{i}]", depth - 1)
