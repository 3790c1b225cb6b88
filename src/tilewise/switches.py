"""Switches: variables of the environment that are on or off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .errors import ArgumentError

ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

# `os.environ.get` encodes what it looks for and raises where it is not there: too slow for a call
environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
encode = getattr(os.environ, "encodekey", str) if environment is not os.environ else str


def is_on(name: str) -> bool:
    """Whether a variable is set to a word of ON, in any case; ArgumentError for one of neither."""
    if environment.get(encode(name)) is None:
        return False
    value = os.environ[name]
    if value.lower() in ON:
        return True
    if value.lower() in OFF:
        return False
    raise ArgumentError(
        f"{name}={value!r} in the environment: it must be 1, true, yes, on, 0, false, no or off"
    )
