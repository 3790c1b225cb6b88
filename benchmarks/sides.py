"""The sides of a comparison: the rows of a file, or of one commit or run in it, as FILE@WHICH."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .bench.row import Row, load

SHORTEST = 7  # digits that git leaves of a commit


class Side(NamedTuple):
    """One side of a comparison: as it was asked for, and its rows."""

    source: str
    rows: Sequence[Row]


def read(source: str) -> Side:
    """The rows of FILE, or of FILE@WHICH those of one commit or run, by the beginning of its name.

    OSError or ValueError, which names file and line, where there are none.
    """
    path, which = source, None
    if "@" in source and not Path(source).exists():
        path, _, which = source.rpartition("@")
    try:
        rows = load(path)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: it is not UTF-8") from error
    if which is not None:
        rows = chosen(rows, which, path)
    if not rows:
        raise ValueError(f"{path}: it holds no row")
    return Side(source, rows)


def chosen(rows: Sequence[Row], which: str, path: str) -> list[Row]:
    """The rows of the one commit or run whose name begins so; ValueError where that is not one.

    A name may be longer than a row's commit, which is often cut. A commit with '+' differs from the
    one without: it is meant only where `which` ends so.
    """
    commits = list(dict.fromkeys(row.commit for row in rows if is_commit(row.commit, which)))
    runs = list(dict.fromkeys(row.run for row in rows if which and row.run.startswith(which)))
    longest = max(commits, key=len, default="")
    if len(runs) + bool(commits) == 1 and all(is_commit(longest, name) for name in commits):
        return [row for row in rows if row.commit in commits or row.run in runs]
    if commits or runs:
        found = [*(f"commit {name}" for name in commits), *(f"run {name}" for name in runs)]
        raise ValueError(f"{path}: {which!r} is more than one: {', '.join(found)}")
    has = ", ".join(dict.fromkeys(row.commit for row in rows))
    raise ValueError(f"{path}: no commit or run begins with {which!r}; commits: {has}")


def is_commit(name: str, which: str) -> bool:
    """Whether one of the two begins with the other, both of a changed tree or neither."""
    if name.endswith("+") != which.endswith("+"):
        return False
    name, which = name.removesuffix("+"), which.removesuffix("+")
    is_cut = len(name) >= SHORTEST and which.startswith(name)
    return bool(which) and (name.startswith(which) or is_cut)
