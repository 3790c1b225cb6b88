"""Option types that commands share: `1k,4k` lists, dtypes by short name, the exit codes."""

from __future__ import annotations

from enum import IntEnum

import click


class Exit(IntEnum):
    """What the exit code of a command says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_GPU = 3


class IntList(click.ParamType):
    """`64,128` or `1k,16k` (k is 1024), none less than `least`."""

    name = "list"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value, param, ctx) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(_number(part, self.least) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 64,128 or 1k,16k", param, ctx)


class OneInt(click.ParamType):
    """`512` or `4k`."""

    name = "number"

    def __init__(self, least: int = 1) -> None:
        self.list = IntList(least)

    def convert(self, value, param, ctx) -> int:
        if isinstance(value, int):
            return value
        found = self.list.convert(value, param, ctx)
        if len(found) != 1:
            self.fail(f"{value!r} is not one number such as 512 or 4k", param, ctx)
        return found[0]


class NameList(click.ParamType):
    """`flash,cudnn`."""

    name = "names"

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())


DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}
SHORT = {name: short for short, name in DTYPES.items()}
DTYPES |= {name: name for name in DTYPES.values()}


def _number(text: str, least: int) -> int:
    text = text.strip().lower()
    value = int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
    if value < least:
        raise ValueError(text)
    return value


def need_gpu(device: str) -> None:
    """Exit code 3 where a GPU is asked for and there is none."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        click.echo("no CUDA GPU is usable here: see `tilewise info`", err=True)
        raise SystemExit(Exit.NO_GPU)


def default_device() -> str:
    """The GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
