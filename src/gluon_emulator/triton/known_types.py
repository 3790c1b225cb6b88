"""Types of Triton's interpreter, made once each.

Each operation creates a tensor and its type: as shipped, a quarter of a kernel's time goes into
their shapes, names and numpy's dtypes, which are those of the operation before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as triton_interpreter


def patches() -> Iterator[tuple[Any, str, Any]]:
    """What to replace while kernels are interpreted: the owner, the name, the value."""
    yield triton_interpreter, "_get_np_dtype", _dtypes(triton_interpreter._get_np_dtype)
    yield tl.block_type, "__init__", _blocks(tl.block_type.__init__)
    yield tl.tensor, "__init__", _tensors(tl.tensor.__init__)


def _dtypes(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    made_by_name: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in made_by_name:
            made_by_name[name] = make(kind)
        return made_by_name[name]

    return dtype_of


def _blocks(make: Callable[..., None]) -> Callable[..., None]:
    attributes: dict[tuple, dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(x, "value", x) for x in shape)
        if key in attributes:
            self.__dict__.update(attributes[key])
            self.element_ty = element_ty
        else:
            make(self, element_ty, shape)
            attributes[key] = dict(self.__dict__)

    return __init__


def _tensors(make: Callable[..., None]) -> Callable[..., None]:
    shapes: dict[str, tuple] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            make(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    return __init__
