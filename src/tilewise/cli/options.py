"""What commands share of click: `1k,4k` lists, dtypes by short name, --device, the exit codes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from enum import IntEnum
from pathlib import Path
from typing import Any

import click

from ..dispatch import BACKENDS


class Exit(IntEnum):
    """What the exit code of a command says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_GPU = 3


DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
SHORT = {name: short for short, name in DTYPES.items()}
FP8 = {"fp8": "float8_e4m3fn"}  # where q, k and v may be of 8 bits
DTYPES |= {name: name for name in DTYPES.values()}
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")


class Listed(click.ParamType):
    """Values with commas between them, as a tuple; `such` says in an error what they are."""

    name = "list"
    such = ""

    def read(self, text: str) -> Any:
        """One of the values; ValueError where the text is none."""
        raise NotImplementedError

    def convert(self, value, param, ctx) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.read(part.strip()) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list {self.such}", param, ctx)


class IntList(Listed):
    """`64,128` or `1k,16k` (k is 1024), none less than `least`."""

    such = "of numbers such as 64,128 or 1k,16k"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def read(self, text: str) -> int:
        text = text.lower()
        value = int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
        if value < self.least:
            raise ValueError(text)
        return value


class OneInt(IntList):
    """`512` or `4k`."""

    name = "number"

    def convert(self, value, param, ctx) -> int:
        if isinstance(value, int):
            return value
        try:
            return self.read(value)
        except ValueError:
            self.fail(f"{value!r} is not one number such as 512 or 4k", param, ctx)


class Known(click.ParamType):
    """Text that `check` takes: the message of its KeyError or ValueError says why it does not."""

    name = "text"

    def __init__(self, check: Callable[[str], object]) -> None:
        self.check = check

    def convert(self, value, param, ctx) -> str:
        try:
            self.check(value)
        except (KeyError, ValueError) as error:
            self.fail(str(error.args[0]), param, ctx)
        return value


class NameList(click.ParamType):
    """`flash,cudnn`; of the names in `known`, where it is given, which is asked for late, or of
    those that `each` takes.
    """

    name = "names"

    def __init__(
        self,
        known: Callable[[], Collection[str]] | None = None,
        may_be_empty: bool = True,
        each: Known | None = None,
    ) -> None:
        self.known, self.may_be_empty, self.each = known, may_be_empty, each

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        parts = tuple(part.strip() for part in value.split(",") if part.strip())
        allowed = self.known() if self.known else parts
        if unknown := [part for part in parts if part not in allowed]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(allowed)}", param, ctx)
        if not parts and not self.may_be_empty:
            self.fail(f"there is none of {', '.join(allowed)}", param, ctx)
        if self.each:
            for part in parts:
                self.each.convert(part, param, ctx)
        return parts


class Finite(click.FloatRange):
    """A number of the range that is neither infinite nor NaN."""

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class NewFile(click.Path):
    """A file, or with `file_okay=False` a folder, that can be written where it is named; folders
    above it may be missing. Said before anything is measured, not after.
    """

    def convert(self, value, param, ctx) -> Any:
        path = super().convert(value, param, ctx)
        whole = Path(os.fsdecode(path)).absolute()
        there = next(x for x in (whole, *whole.parents) if os.path.lexists(x))
        if there != whole and not there.is_dir():
            self.fail(f"{there} is no folder", param, ctx)
        if not os.access(there, os.W_OK):
            self.fail(f"{there} cannot be written", param, ctx)
        return path


def together(*options: Callable) -> Callable:
    """Options that several commands have, as one decorator."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def usable(ctx: click.Context, param: click.Parameter, device: str | None) -> str:
    """The device that is asked for, else the GPU if there is one; exit code 3 where it is none."""
    import torch

    has_gpu = torch.cuda.is_available()
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", device or "cpu")
    if match is None or (has_gpu and match[1] and int(match[1]) >= torch.cuda.device_count()):
        raise click.BadParameter(f"{device!r} is neither cuda, a GPU of this machine, nor cpu")
    if device and device.startswith("cuda") and not has_gpu:
        click.echo("no CUDA GPU is usable here: see `tilewise info`", err=True)
        raise SystemExit(Exit.NO_GPU)
    return device or ("cuda" if has_gpu else "cpu")


backend_option = click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    help="Force a backend; on the CPU, portable is interpreted and hopper emulated.",
)
device_option = click.option(
    "--device", callback=usable, help="cuda or cpu.  [default: the GPU, if there is one]"
)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print results as JSON; the rest goes to stderr."
)
