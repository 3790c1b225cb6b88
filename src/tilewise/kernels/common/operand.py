"""Tensors of a call by their names, as launches are planned with them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .alignment import ALIGNMENT

Tensor = torch.Tensor
CAPTURED = "captured"  # the last name of a call's tensors: all that follow


class Gap:
    """An argument that differs from call to call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Provided(Gap):
    """A tensor that the program gets itself at every call, such as the counter of a stream's tiles.
    `get` takes the device, its index, None of a CPU, and the stream.
    """

    __slots__ = ("get",)

    def __init__(self, name: str, get: Callable[..., Tensor]) -> None:
        super().__init__(name)
        self.get = get


class Encoded(Gap):
    """What a kernel takes in the place of the address of the tensor `base`."""

    __slots__ = ("base", "encode")

    def __init__(self, name: str, base: str, encode: Callable[[int], Any]) -> None:
        super().__init__(name)
        self.base, self.encode = base, encode


class Within(Encoded):
    """The tensor that begins some elements of 4 bytes into another."""

    __slots__ = ("dtype", "start")

    def __init__(self, name: str, base: str, start: int, dtype: torch.dtype = torch.int32) -> None:
        super().__init__(name, base, functools.partial(operator.add, 4 * start))
        self.start, self.dtype = start, dtype

    @property
    def in_map(self) -> Callable[[int], int]:
        """Its address as `packed` takes it."""
        return self.encode


class Operand(Gap):
    """A tensor without its memory: what all calls of one signature have in common. Planning reads
    an operand as it would read the tensor, so that a plan keeps no tensor alive.
    """

    __slots__ = ("address", "device", "dtype", "is_cleared", "is_copied", "shape", "strides")

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        strides: tuple[int, ...] | None = None,
        address: int = 0,
        is_copied: bool = False,
        is_cleared: bool = False,
    ) -> None:
        super().__init__(name)
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        if strides is None:
            strides = torch.empty(self.shape, device="meta").stride()
        self.strides = strides
        self.address = address  # modulo ALIGNMENT
        self.is_copied = is_copied  # whether each call makes it contiguous before the launches
        self.is_cleared = is_cleared  # whether the program makes it of zeros

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a GPU."""
        return self.device.type == "cuda"

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def stride(self, dim: int | None = None) -> Any:
        """All strides in elements, or that of one dimension."""
        return self.strides if dim is None else self.strides[dim]

    def data_ptr(self) -> int:
        """The address modulo ALIGNMENT, which is all that planning may depend on."""
        return self.address

    def view(self, dtype: torch.dtype) -> Operand:
        """A view of dense rows as elements of another dtype."""
        shape, strides = list(self.shape), list(self.strides)
        if dtype.itemsize != self.itemsize:
            times = dtype.itemsize // self.itemsize
            shape[-1] //= times
            strides[:-1] = [step // times for step in strides[:-1]]
        return self._view(shape, tuple(strides), dtype)

    def transpose(self, one: int, other: int) -> Operand:
        """A view with two dimensions exchanged."""
        order = list(range(self.dim()))
        order[one], order[other] = order[other], order[one]
        strides = tuple(self.strides[n] for n in order)
        return self.as_strided([self.shape[n] for n in order], strides)

    def unsqueeze(self, dim: int) -> Operand:
        """A view with a dimension of one element before this one."""
        shape, strides = list(self.shape), list(self.strides)
        step = shape[dim] * strides[dim] if dim < len(shape) else 1
        return self.as_strided(
            [*shape[:dim], 1, *shape[dim:]], [*strides[:dim], step, *strides[dim:]]
        )

    def as_strided(self, shape: Sequence[int], strides: Sequence[int]) -> Operand:
        """A view from the same address on, which is all that kernels take of it."""
        return self._view(shape, tuple(strides), self.dtype)

    def _view(self, shape: Sequence[int], strides: tuple[int, ...], dtype: torch.dtype) -> Operand:
        place: dict[str, Any] = dict(strides=strides, address=self.address)
        return Operand(self.name, shape, dtype, self.device, is_copied=self.is_copied, **place)

    def is_contiguous(self) -> bool:
        """Whether its elements lie in order without gaps."""
        return self.new("meta").is_contiguous()

    def contiguous(self) -> Operand:
        """Itself, or its copy, which the program makes at every call."""
        if self.is_contiguous():
            return self
        return Operand(self.name, self.shape, self.dtype, self.device, is_copied=True)

    def new(self, device: torch.device | str | None = None) -> Tensor:
        """A new tensor like it; by default on its device."""
        where = self.device if device is None else device
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=where)
        return tensor.zero_() if self.is_cleared else tensor


def operand_of(
    name: str, x: Tensor | None, device: torch.device | None = None, is_cleared: bool = False
) -> Operand | None:
    """A tensor as plans have it; on `device` if that is given."""
    if x is None:
        return None
    address, where = x.data_ptr() % ALIGNMENT, device or x.device
    place: dict[str, Any] = dict(strides=x.stride(), address=address, is_cleared=is_cleared)
    return Operand(name, x.shape, x.dtype, where, **place)


def names_of(fields: Sequence[str], count: int) -> tuple[str, ...]:
    """The names of so many tensors: the fields, of which CAPTURED stands for all that are left."""
    if fields[-1] != CAPTURED:
        return tuple(fields)
    captured = range(count - len(fields) + 1)
    return *fields[:-1], *(f"{CAPTURED}[{n}]" for n in captured)


def operands_of(fields: Sequence[str], tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    """The operands of a call's tensors by the fields, CAPTURED as a tuple of its own."""
    operands = list(map(operand_of, names_of(fields, len(tensors)), tensors))
    if fields[-1] != CAPTURED:
        return dict(zip(fields, operands))
    first = len(fields) - 1
    return dict(zip(fields, operands[:first])) | {CAPTURED: tuple(operands[first:])}


def as_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A view as elements of another dtype."""
    if dtype.itemsize != x.itemsize:
        # Along a dimension of one element a stride may be odd, of which torch makes no pairs
        strides = [step if n > 1 else 0 for n, step in zip(x.shape[:-1], x.stride())]
        x = x.as_strided(x.shape, (*strides, 1))
    return x.view(dtype)


def gaps_in(item: Any) -> Iterator[Any]:
    """The gaps of nested arguments."""
    if isinstance(item, Gap):
        yield item
    elif isinstance(item, tuple):
        for x in item:
            yield from gaps_in(x)


def filled(item: Any, values: Mapping[str, Any]) -> Any:
    """Nested arguments with values in their gaps."""
    if isinstance(item, Within):
        return values[item.base][item.start :]
    if isinstance(item, Gap):
        value = values[item.name]
        is_other = isinstance(item, Operand) and value.dtype != item.dtype  # viewed as bits
        return as_bits(value, item.dtype) if is_other else value
    if isinstance(item, tuple) and any(gaps_in(item)):  # constants stay the objects they are
        parts = [filled(x, values) for x in item]
        return type(item)._make(parts) if hasattr(item, "_fields") else tuple(parts)
    return item
