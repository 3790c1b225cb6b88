"""One measurement, one line of JSON: what was run, where, how fast, how exact.

Rows only ever grow: a file under benchmarks/results is appended to, never edited. Two rows may be
compared if they share `run`, because then they were timed in interleaved rounds on one machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import shlex
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewise.cli.machine import commit, cpu_name, driver_version, triton_version

from .timer import Spread

if TYPE_CHECKING:
    from .check import Verdict

ARGUMENTS = "benchmarks.arguments"  # where a command's context holds what it was given
KINDS = {"str": str, "float": (int, float), "float | None": (int, float, type(None)), "dict": dict}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A provider's time for one shape. Times are milliseconds.

    `median_ms` to `tflops` are of calls with the cache flushed before each and pauses between, and
    `sustained_ms` of calls back to back; `ways` says which of them a figure is of.
    """

    date: str
    run: str  # shared by the rows of interleaved rounds
    suite: str
    shape: dict  # Shape's fields
    provider: str
    median_ms: float  # median over rounds of the round's median
    p20_ms: float
    p80_ms: float
    rounds_ms: list  # a median a round; equal places of one run were timed side by side
    tflops: float
    max_error: float | None  # against fp64, over out or the gradients; None: not checked
    bound: float | None
    device: str
    torch: str
    triton: str
    cuda: str
    driver: str
    tilewise: str
    commit: str
    extra: dict = dataclasses.field(default_factory=dict)  # a suite's own numbers, by name
    sustained_ms: list = dataclasses.field(default_factory=list)  # a round each; []: not timed so
    joules: float | None = None  # a call's energy back to back; None: not measured
    command: str = ""  # the arguments of `python -m benchmarks`; older rows have none

    @classmethod
    def of(
        cls,
        common: Stamp,
        shape: Any,
        provider: str,
        times: Sequence[float],
        verdict: Verdict | None,
        *,
        flops: float = 0.0,
        **more: Any,
    ) -> Row:
        """A row from its rounds' times; `shape` is a NamedTuple. Without FLOPs there is no rate."""
        spread = Spread.of(times)
        return cls(
            **common,
            shape=shape._asdict(),
            provider=provider,
            median_ms=spread.median,
            p20_ms=spread.p20,
            p80_ms=spread.p80,
            rounds_ms=list(times),
            tflops=flops / spread.median / 1e9 if flops else 0.0,
            max_error=verdict.max_error if verdict else None,
            bound=verdict.bound if verdict else None,
            **more,
        )


class Stamp(dict):
    """The fields of a Row that describe a run and not a shape."""


def stamp(suite: str, device: str) -> Stamp:
    """What every row of one run shares."""
    import torch

    from tilewise import __version__

    on_gpu = device.startswith("cuda")
    return Stamp(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=uuid.uuid4().hex[:12],
        suite=suite,
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        torch=torch.__version__,
        triton=triton_version(),
        cuda=torch.version.cuda or "none",
        driver=driver_version() if on_gpu else "none",
        tilewise=__version__,
        commit=commit(),
        command=command(),
    )


def command() -> str:
    """The arguments of `python -m benchmarks` that this run was given, without where to save."""
    context = click.get_current_context(silent=True)
    words = list(context.meta.get(ARGUMENTS, ())) if context else []
    for option in ("--save", "--png"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join(words)


def append(path: str | Path, rows: Iterable[Row]) -> None:
    """Adds rows to a JSONL file, each checked against the schema."""
    lines = "".join(json.dumps(validate(dataclasses.asdict(row))) + "\n" for row in rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)


def load(path: str | Path) -> list[Row]:
    """The rows of a JSONL file; ValueError names the line that is not one."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row(**validate(json.loads(line))))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def validate(record: dict) -> dict:
    """The record itself if it is a Row's, else ValueError with the field at fault."""
    if not isinstance(record, dict):
        raise ValueError(f"a row is a JSON object, not {type(record).__name__}")
    fields = {field.name: field for field in dataclasses.fields(Row)}
    if unknown := sorted(record.keys() - fields.keys()):
        raise ValueError(f"unknown field {unknown[0]!r}")
    for name, field in fields.items():
        if name not in record:
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"field {name!r} is missing")
            continue
        kind = KINDS.get(str(field.type), list)
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise ValueError(f"field {name!r} is {record[name]!r}: it must be {field.type}")
    if not record["rounds_ms"]:
        raise ValueError("field 'rounds_ms' is empty: a row holds at least one round")
    for name in ("rounds_ms", "sustained_ms"):
        if wrong := [time for time in record.get(name, ()) if type(time) not in (int, float)]:
            raise ValueError(f"field {name!r} holds {wrong[0]!r}: times are numbers")
    if wrong := [time for time in record.get("sustained_ms", ()) if not 0 < time < math.inf]:
        raise ValueError(f"field 'sustained_ms' holds {wrong[0]!r}: a call takes time")
    return record
