"""Which configuration a launch uses: an override, else the user's own measurement, else the shipped
table, else the default rule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path
from typing import Protocol, cast

import torch

from .store import add, rows_of
from .tables import TABLE, Config, Key, default

overrides: dict[str, Config] = {}  # forced now, so that nothing kept from before may be used


class Properties(Protocol):
    """torch's properties of a GPU, for which it has no type."""

    major: int
    minor: int
    gcnArchName: str  # of AMD


def select(key: Key, device: torch.device) -> Config:
    """The configuration of a launch on `device`."""
    return overrides[key.kernel] if key.kernel in overrides else _measured(key, device)


@functools.lru_cache(maxsize=1024)
def _measured(key: Key, device: torch.device) -> Config:
    any_length = key._replace(is_short=False)
    for table in (user_table(device), TABLE):
        for candidate in (key, any_length, any_length._replace(is_causal=not key.is_causal)):
            if candidate in table:
                return table[candidate]
    return default(key)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The tables' name for it: "sm90", "gfx942", ...; "interpreter" for the CPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = cast(Properties, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


@contextlib.contextmanager
def override(**configs: Config) -> Generator[None]:
    """Forces configurations by kernel name.

    with override(fwd=Config(64, 32, 4, 2)): ...
    """
    saved = dict(overrides)
    overrides.update(configs)
    try:
        yield
    finally:
        overrides.clear()
        overrides.update(saved)


def user_table(device: torch.device) -> dict[Key, Config]:
    """Rows measured on a GPU of this name."""
    return rows_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}


def add_measured(device: torch.device, rows: dict[Key, Config]) -> Path:
    """Adds rows to the user's cache and returns its path."""
    path = add(torch.cuda.get_device_name(device), rows)
    _measured.cache_clear()
    return path
