"""Which layers of a transformers model will call tilewise, found from their code without a run.

transformers takes an attention function by name from a registry. A model with an attention of its
own never reads the registry and silently ignores the name; if it also adds masks that transformers
makes by that name, its forward is refused. So the code of each attention module is searched for the
registry: the methods of its class, and what they call in its package.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

OWN = "it has an attention of its own and never asks for one by name"
FAMILIES = f"{__package__}.families"  # classes that call tilewise without asking
REASONS = {
    "tilewise": "it calls the attention that its config names",
    "refused": f"{OWN}, and its model makes the mask by that name: the forward is refused",
    "own": f"{OWN}: the name is ignored",
    "unknown": "its code does not tell which attention runs",
}


class Layer(NamedTuple):
    """An attention module of a model."""

    name: str  # as in `named_modules`
    kind: str  # its class
    attention: str  # tilewise, refused, own, unknown, or the implementation that it was loaded with
    reason: str


class LayerReport(NamedTuple):
    """The attention modules of a model; as a string, one line for each kind."""

    layers: tuple[Layer, ...]

    def __str__(self) -> str:
        alike = Counter((layer.kind, layer.attention, layer.reason) for layer in self.layers)
        lines = [f"{n} {kind}: {by} ({reason})" for (kind, by, reason), n in alike.items()]
        return "\n".join(lines) or "no attention modules found"


def check_model(model: torch.nn.Module, is_ours: Callable[[str], bool]) -> LayerReport:
    """`is_ours`: whether that name of an implementation is tilewise's."""
    layers = []
    parents: list[tuple[str, torch.nn.Module]] = []  # from the model down to the module
    for name, module in model.named_modules():
        while parents and parents[-1][0] and not name.startswith(f"{parents[-1][0]}."):
            parents.pop()
        parents.append((name, module))
        above = [parent for _, parent in parents]
        if _is_attention(module):
            layers.append(_layer(name, module, above=above, is_ours=is_ours))
    return LayerReport(tuple(layers))


def _layer(name, module, above: list[torch.nn.Module], is_ours: Callable[[str], bool]) -> Layer:
    kind = type(module).__name__
    configs = [parent.config for parent in above if hasattr(parent, "config")]
    loaded = getattr(configs[-1], "_attn_implementation", None) if configs else None
    attention = _served_by(module, above)
    if loaded is not None and attention in ("tilewise", "refused") and not is_ours(loaded):
        return Layer(name, kind, loaded, f"loaded with attn_implementation={loaded!r}")
    return Layer(name, kind, attention=attention, reason=REASONS[attention])


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether it reads the registry, or is called attention and contains no other."""
    if _asks_registry(type(module)):
        return True
    inner = (child for child in module.modules() if child is not module)
    return _is_called_so(module) and not any(_is_called_so(child) for child in inner)


def _is_called_so(module: torch.nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _asks_registry(kind: type) -> bool:
    from transformers import AttentionInterface

    return any(isinstance(thing, AttentionInterface) for thing in _mentioned(kind))


def _served_by(module: torch.nn.Module, above: list[torch.nn.Module]) -> str:
    from transformers import PreTrainedModel

    if _asks_registry(type(module)) or type(module).__module__ == FAMILIES:
        return "tilewise"
    # A table of classes, a module without parameters: another may compute in its place.
    if "_attn_implementation" in _names(type(module)) or next(module.parameters(), None) is None:
        return "unknown"
    models = [parent for parent in above if isinstance(parent, PreTrainedModel)]
    return "refused" if models and _makes_masks(type(models[-1])) else "own"


def _makes_masks(kind: type) -> bool:
    modules = (getattr(thing, "__module__", "") for thing in _mentioned(kind))
    return any(module == "transformers.masking_utils" for module in modules)


def _mentioned(kind: type) -> list:
    """The global things that the methods of a class mention, and the functions that they call."""
    things = []
    for function in _functions(kind):
        scope = function.__globals__
        things += [scope[name] for name in _names_of(function.__code__) if name in scope]
    return things


def _names(kind: type) -> set[str]:
    return {name for function in _functions(kind) for name in _names_of(function.__code__)}


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The methods of a class, and whatever they call in the file that the class is in."""
    waiting = []
    for base in kind.__mro__:
        if base.__module__ == kind.__module__:
            waiting += [_plain(value) for value in vars(base).values()]
    visited = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function in visited:
            continue
        visited.add(function)
        yield function
        scope = function.__globals__
        called = [_plain(scope[name]) for name in _names_of(function.__code__) if name in scope]
        waiting += [f for f in called if getattr(f, "__module__", None) == kind.__module__]


def _plain(function):
    """The function under decorators and descriptors."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _names_of(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names, *(name for const in inner for name in _names_of(const))}
