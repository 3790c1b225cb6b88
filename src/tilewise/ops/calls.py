"""The calls that are known, under their signatures.

A signature is all that checks, backends and compilers see of a call without reading a tensor's
values: of each tensor shape, strides, dtype, device, alignment and whether it requires a gradient,
and what else was asked for. A call that looks like an earlier one is neither checked nor planned
again, and is launched with nothing but its own addresses. No tensor is kept.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..emulator.switch import cpu_stand_ins
from ..problem import Call

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes; that of an address, modulo them, decides what is compiled for it
MOST = 4096
TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)}
WORDS = frozenset({bool, int, float, str, type(None)})


# `os.environ.get` encodes what it looks for and raises where it is not there: a fifth of all that
# is asked here
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_encode = getattr(os.environ, "encodekey", str)
_CHECK = _encode("TILEWISE_CHECK") if _environment is not os.environ else "TILEWISE_CHECK"


class Entry:
    """What is kept under a signature, once a call of it was checked: the call, or, of calls with a
    cache, what is called as `step(tensors)` to launch one.
    """

    __slots__ = ("call", "step")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.step: Callable[..., Any] | None = None


@functools.lru_cache(maxsize=MOST)
def _entry(*signature: Hashable) -> Entry:
    return Entry()


def find(tensors: Sequence[Tensor | None], words: tuple[Any, ...]) -> Entry | None:
    """The entry of a call as its caller writes it, q first among its tensors. None where values are
    read, casts come before, a number may change, or something else must see the call.
    """
    kinds = tuple(map(type, words))
    if (
        torch.compiler.is_compiling()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or not WORDS.issuperset(kinds)
    ):
        return None
    for x in tensors:
        if x is not None:
            if type(x) not in TENSORS or (x.dtype is torch.int32 and is_read(x)):
                return None
    if tensors[0] is None or _environment.get(_CHECK) in ("1", b"1"):
        return None
    return entry_of(tensors, words, kinds)


def is_read(x: Tensor) -> bool:
    """Whether checks read an integer tensor."""
    return x.is_cpu


def entry_of(tensors: Sequence[Tensor | None], *asked: Hashable) -> Entry | None:
    """The entry of a call of plain tensors; None of tensors without strides or memory."""
    try:
        return _entry(*signature(tensors), *asked)
    except RuntimeError:  # of sparse and nested tensors, and of those of torch's transforms
        return None


def signature(tensors: Sequence[Tensor | None]) -> list[Hashable]:
    """What is seen of tensors, q first, and of what decides how they are computed."""
    q = tensors[0]
    seen: list[Hashable] = [torch.is_grad_enabled()]
    if q is not None and q.is_cpu:
        seen.append(cpu_stand_ins())
    for x in tensors:
        if x is None:
            seen.append(None)
        else:
            address = x.data_ptr() % ALIGNMENT
            seen += (x.shape, x.stride(), x.dtype, x.device, address, x.requires_grad)
    return seen


def look_of(tensors: tuple[Tensor | None, ...]) -> tuple[Hashable, ...]:
    """What may differ between backwards of one forward: strides and alignment."""
    seen: list[Hashable] = []
    for x in tensors:
        if x is None:
            seen.append(None)
        else:
            seen += (x.stride(), x.data_ptr() % ALIGNMENT)
    return tuple(seen)
