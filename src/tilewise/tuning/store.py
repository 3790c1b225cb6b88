"""The user's own rows on disk: read with care, as anything may lie there, and written so that no
reader sees half a file and no writer loses another's rows. Others may write the folder: every file
in it is opened by `_open`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import a_type, warn_slow
from .tables import TABLE, Config, Key

Table = dict[Key, Config]
PORTABLE = ("fwd", "bwd_dkdv", "bwd_dq", "bwd_delta")  # the kernels that `tilewise tune` times
MAX_SCORES_PER_WARP = 2048  # of a warp: more than 64 a thread spill
MAX_BYTES = 2**24  # of a file that is read
LOCK_SECONDS = 60  # until a lock that another process has is given up
CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither
REMEDY = "run `tilewise tune` again, which keeps a copy of the old file, or delete it"


class Stored(NamedTuple):
    """Rows by the name of a GPU, and what is wrong with the file, "" if nothing is."""

    tables: dict[str, Table]
    complaint: str


def cache_file() -> Path:
    """Where `tilewise tune` keeps its rows: $TILEWISE_CACHE, else the user's cache folder."""
    root = os.environ.get("TILEWISE_CACHE")
    folder = Path(root or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (folder if root else folder / "tilewise") / "tuning.json"


def rows_of(gpu: str) -> Table:
    """Rows measured on a GPU of this name. What is wrong with the file is warned of once, and costs
    the wrong rows alone.
    """
    path = cache_file()
    stored = read(path)
    if stored.complaint:
        warn_slow(f"{path}, the rows of `tilewise tune`, {stored.complaint}: {REMEDY}")
    return stored.tables.get(gpu, {})


def add(gpu: str, rows: Table) -> Path:
    """Adds rows to those of a GPU and returns the file's path; OSError where nothing can be
    written. A file with something wrong in it is kept as a copy, and a warning names it.
    """
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        tables, complaint = read(path)
        aside = _free_name(path)
        if complaint:
            path.replace(aside)
        tables[gpu] = {**tables.get(gpu, {}), **rows}
        stored = {
            name: [
                {"key": list(key), "config": list(config)} for key, config in sorted(table.items())
            ]
            for name, table in tables.items()
        }
        new = path.with_suffix(f".{secrets.token_hex(8)}.new")
        try:
            with _open(new, "xb") as file:
                file.write(json.dumps(stored, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    if complaint:  # said last: a caller may have made an error of it
        warn_slow(f"{path} {complaint}: it is kept as {aside}")
    return path


def read(path: Path) -> Stored:
    """The good rows of a file; without one there are none."""
    try:
        with _open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return Stored({}, f"has more than {MAX_BYTES >> 20} MiB")
        data: Any = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError):
        return Stored({}, "")
    except OSError as error:
        return Stored({}, f"cannot be read ({type(error).__name__}: {error.strerror})")
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's errors are ValueErrors
        return Stored({}, f"is no JSON ({type(error).__name__}: {error})")
    if not _is(data, dict):
        return Stored({}, f"holds {a_type(data)}, where GPUs' names and rows should be")
    tables: dict[str, Table] = {}
    wrong: list[Any] = []
    for gpu, rows in data.items():
        tables[gpu] = {}
        for row in rows if _is(rows, list) else [rows]:
            parsed = _row(row)
            if parsed is None:
                wrong.append(row)
            else:
                tables[gpu][parsed[0]] = parsed[1]
    if not wrong:
        return Stored(tables, "")
    first = json.dumps(wrong[0])[:100]
    return Stored(tables, f"has {len(wrong)} rows that no kernel can be launched with, as {first}")


def _row(row: Any) -> tuple[Key, Config] | None:
    """A row, if its fields are of their kinds and a kernel could be launched so."""
    if not _is(row, dict) or row.keys() != {"key", "config"}:
        return None
    if not _are(row["key"], (str, str, int, int, bool, bool), least=5):
        return None
    if not _are(row["config"], (int, int, int, int, bool), least=4):
        return None
    key = Key(**dict(zip(Key._fields, row["key"])))
    config = Config(**dict(zip(Config._fields, row["config"])))
    return (key, config) if _is_known(key) and _can_launch(key, config) else None


def _are(values: Any, kinds: tuple[type, ...], least: int) -> bool:
    """Whether a list holds exactly these kinds, of which the last ones may be left out."""
    return (
        _is(values, list)
        and least <= len(values) <= len(kinds)
        and all(type(x) is kind for x, kind in zip(values, kinds))
    )


def _is(value: Any, kind: type) -> bool:
    """isinstance, which leaves the value untyped: what JSON holds is known after all the checks."""
    return isinstance(value, kind)


def _is_known(key: Key) -> bool:
    is_kernel = key.kernel in PORTABLE or any(key.kernel == row.kernel for row in TABLE)
    is_size = _is_power(key.block_d, 16, most=512) or key in TABLE
    return is_kernel and is_size and key.bits in (16, 32)


def _can_launch(key: Key, config: Config) -> bool:
    if key.kernel not in PORTABLE:  # its tiles follow from its pipeline: those that were measured
        return any(key.kernel == x.kernel and config == measured for x, measured in TABLE.items())
    m, n, warps, stages, _ = config
    is_tile = _is_power(m, 16, most=1024) and _is_power(n, 16, 1024) and _is_power(warps, 1, 32)
    return is_tile and 1 <= stages <= 8 and m * n <= warps * MAX_SCORES_PER_WARP


def _is_power(n: int, least: int, most: int) -> bool:
    return least <= n <= most and n & (n - 1) == 0


def _free_name(path: Path) -> Path:
    aside, count = path.with_suffix(".broken"), 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_suffix(f".broken{count}")
    return aside


def _open(path: Path, mode: str) -> IO[bytes]:
    """Opens a file, or makes one: never what a link names, and without a wait for what is no file;
    OSError for either.
    """

    def descriptor(name: str, flags: int) -> int:
        number = os.open(name, flags | CAREFUL, 0o666)
        kind = os.fstat(number).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # of a folder `open` has its own error
            os.close(number)
            raise OSError(errno.EINVAL, "it is no file", name)
        return number

    if path.is_symlink():  # what comes to be one from here on is not followed, either
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    return open(path, mode, opener=descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """One process at a time: the system unlocks for one that dies; OSError where it is taken."""
    with _open(path, "ab") as file:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # tries for 10 s, then OSError
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end:
                        said = "another process keeps this lock"
                        raise BlockingIOError(error.errno, said, str(path)) from error
                    time.sleep(0.05)
            yield
