"""The cache of calls, keyed by signature.

A signature is all of a call that checks, backends and compilers depend on, but the tensors' values:
of each tensor its shape, strides, dtype, device, alignment and whether it requires a gradient, and
the other arguments. A call with a cached signature is neither checked nor planned again, and only
its addresses are passed to the launch. No tensor is cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..emulation import cpu_modes
from ..kernels.common.alignment import ALIGNMENT
from ..switches import encode, environment, is_on
from .guards import known_guards, remember

Tensor = torch.Tensor
MAX_ENTRIES = 4096
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)}
NOT_FOUND = None, None
UNGUARDED = frozenset({"cpu"})  # devices whose calls depend on more modes than guards know
KEY_TYPES = frozenset({bool, int, float, str, type(None)})
CHECK = encode("TILEWISE_CHECK")


class Entry:
    """The cache entry of a signature: a checked call, or what launches a decode step or an append
    again. The key, which begins with a function's name, says which.
    """

    __slots__ = ("__weakref__", "call")

    def __init__(self) -> None:
        self.call: Any = None


@functools.lru_cache(maxsize=MAX_ENTRIES)
def _entry(*signature: Hashable) -> Entry:
    return Entry()


def find(
    tensors: Sequence[Any],
    *,
    plain: tuple[Any, ...],
    window: Any = None,
    checks_values: bool = False,
) -> tuple[Entry | None, list[int] | None]:
    """The entry of a call's arguments, q, k and v first among its tensors, and, where they were
    read for that, the addresses of those that are not None. `plain` are the other arguments, as
    many in every call of a function, whose name is the first. No entry where autocast is on, a
    number may change, the call needs the dispatcher, or lengths on a CPU are to be read, unless the
    caller `checks_values` of a call that is found.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or forward_ad._current_level >= 0
        or (environment.get(CHECK) is not None and is_on("TILEWISE_CHECK"))
    ):
        return NOT_FOUND
    kinds = tuple(map(type, plain))
    if type(window) is tuple:  # nested, so that no side stands for an argument
        plain, kinds = (plain, window), (kinds, tuple(map(type, window)))
        are_plain = KEY_TYPES.issuperset(kinds[0]) and KEY_TYPES.issuperset(kinds[1])
    else:
        plain, kinds = (*plain, window), (*kinds, type(window))
        are_plain = KEY_TYPES.issuperset(kinds)
    key = None
    try:
        key = tensors[0].numel(), tensors[1].numel(), torch.is_grad_enabled()
        key = *key, kinds, tuple(map(type, tensors)), plain
        recall = known_guards.get(key)
        if recall is not None and (recalled := recall(tensors)) is not None:
            return recalled
    except (AttributeError, RuntimeError, TypeError):  # None, nested, a list
        key = None
    if (
        torch.compiler.is_compiling()
        or peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or not are_plain
        or tensors[0] is None
    ):
        return NOT_FOUND
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN_TENSORS or x.is_neg():
                return NOT_FOUND
            if not checks_values and x.dtype is torch.int32 and is_read(x):
                return NOT_FOUND
    entry = entry_of(tensors, (plain, kinds))
    if entry is not None and key is not None and tensors[0].device.type not in UNGUARDED:
        remember(key, tensors, entry=entry)
    return entry, None


def needs_dispatcher(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call must go through torch's dispatcher: for a compiler, a dispatch mode, or a
    tensor subclass.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN_TENSORS.issuperset(map(type, tensors))


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def has_lazy(tensors: Iterable[Tensor | None]) -> bool:
    """Whether torch has yet to negate one of the tensors, such as `z.conj().imag`: its memory has
    the opposite numbers. Complex tensors it conjugates likewise, which no call takes.
    """
    for x in tensors:
        if x is not None and x.is_neg():
            return True
    return False


def resolved(tensors: Iterable[Tensor | None]) -> list[Any]:
    """The tensors as their memory says. A tensor is a differentiable function of its own."""
    return [x.resolve_neg() if isinstance(x, Tensor) else x for x in tensors]


def is_read(x: Tensor) -> bool:
    """Whether checks read an integer tensor."""
    return x.is_cpu


def entry_of(tensors: Sequence[Tensor | None], key: Hashable) -> Entry | None:
    """The entry of a call of plain tensors; None of tensors without strides or memory."""
    try:
        return _entry(tuple(signature(tensors)), key)
    except RuntimeError:  # of sparse and nested tensors, and of those of torch's transforms
        return None


def signature(tensors: Sequence[Tensor | None]) -> list[Hashable]:
    """The signature of tensors, q first, and of the flags that select a backend."""
    q = tensors[0]
    signature_parts: list[Hashable] = [torch.is_grad_enabled()]
    if q is not None and q.is_cpu:
        signature_parts.append(cpu_modes())
    for x in tensors:
        if x is None:
            signature_parts.append(None)
        else:
            address = x.data_ptr() % ALIGNMENT
            signature_parts += (x.shape, x.stride(), x.dtype, x.device, address, x.requires_grad)
    return signature_parts


def layout_key(tensors: tuple[Tensor | None, ...]) -> tuple[Hashable, ...]:
    """The cache key of a backward: strides and alignment, which may differ between backwards of one
    forward.
    """
    key_parts: list[Hashable] = []
    for x in tensors:
        if x is None:
            key_parts.append(None)
        else:
            key_parts += (x.stride(), x.data_ptr() % ALIGNMENT)
    return tuple(key_parts)


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does for functorch, whose transforms no known call is in."""
    above: Any = super(torch.autograd.Function, function)
    return above.apply
