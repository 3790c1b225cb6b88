"""wgmma: matrix products that run by themselves until they are waited for.

The tensor cores read shared operands at any time between issue and wait: here at one of the two,
drawn at random, so that a tile overwritten early or used before it landed shows. Register operands
are taken at issue. The accumulator in flight has no value before its wait.

Of 8-bit floats an instruction adds 32 products to the accumulator, and cuts each of them to SHORT
bits after the leading one of the largest: a large sum loses what is added to it (DeepSeek-V3, arXiv
2412.19437, section 3.5.2). SHORT is what errors on an H200 say: an average of n values around 1 is
1.0 % off for 1Ki of them, 5 % for 4Ki.
"""

from typing import Any

import torch
import triton.language as tl

from .machine import HopperError, running
from .memory import SmemView
from .values import TORCH, Value

SHORT = 13
STEP = 32  # products


class Matmul:
    """One matrix product in flight."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.dtype = acc.dtype
        self.shape = acc.matmul.shape if isinstance(acc, InFlight) else acc.shape
        self.rows: Any = None
        self.columns: Any = None
        self.result: Value | None = None

    def read(self) -> None:
        """Reads the operands, once."""
        if self.rows is None:
            self.rows = _matrix(self.a, self.dtype)
            self.columns = _matrix(self.b, self.dtype)

    def retire(self) -> None:
        """Be done; those issued before are."""
        self.read()
        before = None
        if self.use_acc:
            accumulator: Any = (
                self.acc.matmul.result if isinstance(self.acc, InFlight) else self.acc
            )
            before = accumulator.data
        if self.a.dtype.is_fp8():
            result = _short_sum(self.rows, self.columns, before)
        else:
            result = _product(self.rows, self.columns)
            result = result if before is None else result + before
        self.result = Value(result, self.dtype)


class InFlight:
    """The accumulator of an asynchronous matmul: no value to be read before its wait."""

    __slots__ = ("matmul",)

    def __init__(self, matmul: Matmul) -> None:
        self.matmul = matmul

    @property
    def dtype(self) -> Any:
        return self.matmul.dtype

    def __getattr__(self, name: str) -> Any:
        raise HopperError(
            f"{running()} uses the result of an asynchronous matmul (.{name}) that it has not"
            " waited for: take it from warpgroup_mma_wait"
        )

    def _refuse(self, *_: Any) -> Any:
        return self.__getattr__("value")

    for _name in "add sub mul truediv floordiv mod".split():
        locals()[f"__{_name}__"] = locals()[f"__r{_name}__"] = _refuse
    for _name in "lt le gt ge neg getitem bool float int index".split():
        locals()[f"__{_name}__"] = _refuse


def warpgroup_mma(
    a: Any,
    b: Any,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    """Start acc = a @ b (+ acc)."""
    partition = running()
    if not isinstance(b, SmemView):
        raise HopperError("the right operand of warpgroup_mma must lie in shared memory")
    use_acc = bool(use_acc)
    matmul = Matmul(a, b, acc, use_acc)
    _check_shapes(a, b, acc)
    partition.log("wgmma", lambda: f"{_words(a)} @ {_words(b)}")
    partition.matmuls.append(matmul)
    if partition.machine.random.random() < 0.5:
        matmul.read()
    partition.pause()
    token = InFlight(matmul)
    return token if is_async else warpgroup_mma_wait(0, [token])


def warpgroup_mma_init(value: Any) -> Any:
    return value


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Wait until at most `num_outstanding` matmuls are in flight, and return `deps`."""
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    partition = running()
    partition.pause()
    while len(partition.matmuls) > int(num_outstanding):
        partition.matmuls.pop(0).retire()
    partition.log("wgmma wait", lambda: f"{len(partition.matmuls)} in flight")
    results = tuple(_resolve(dep) for dep in deps)
    return results[0] if len(results) == 1 else results


def _resolve(dep: Any) -> Any:
    """A finished accumulator's value; one still in flight stays so, to be waited for again."""
    if isinstance(dep, InFlight) and dep.matmul.result is not None:
        return dep.matmul.result
    return dep


def _matrix(operand: Any, dtype: Any) -> torch.Tensor:
    """An operand as the tensor cores take it, in the accumulator's type, or a wider one."""
    tensor = operand.fenced if isinstance(operand, SmemView) else operand.data
    if tensor.dtype == torch.float32 and dtype == tl.float32:
        # tf32: the low 13 bits of the mantissa are not read.
        return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return tensor.to(TORCH[dtype] if dtype != tl.float16 else torch.float32)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Summed in float64 and rounded once: a row's bits do not depend on its place, as they do with
    some BLAS of a CPU and do not on tensor cores.
    """
    return (a.double() @ b.double()).to(a.dtype) if a.dtype == torch.float32 else a @ b


def _short_sum(a: Any, b: Any, before: torch.Tensor | None) -> torch.Tensor:
    """What the instructions add up, to `before` if that is there."""
    total = torch.zeros(a.shape[0], b.shape[1]) if before is None else before
    for left, right in zip(a.mT.split(STEP), b.split(STEP)):
        products = left[:, :, None] * right[:, None]
        largest = torch.maximum(total.abs(), products.abs().amax(0))
        is_finite = largest.isfinite()
        whole = None if is_finite.all() else total + products.sum(0)
        # Of the bits of a number, its power of two
        power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
        unit = power.clamp_(2.0**-100) * 2.0**-SHORT
        # Conversions to integers truncate, in a tenth of the time of `trunc`
        units = products.mul_(1 / unit).int().sum(0, dtype=torch.int32)
        total = ((total * (1 / unit)).int() + units) * unit
        total = total if whole is None else torch.where(is_finite, total, whole)
    return total


def _check_shapes(a: Any, b: Any, acc: Any) -> None:
    shape = acc.matmul.shape if isinstance(acc, InFlight) else acc.shape
    if [*a.shape[:1], *b.shape[1:]] != shape or a.shape[1:] != b.shape[:1]:
        raise ValueError(f"a matmul of {a.shape} by {b.shape} into {shape}")
    if a.dtype != b.dtype:
        raise ValueError(f"a matmul of {a.dtype} by {b.dtype}")


def _words(operand: Any) -> str:
    return operand.allocation.name() if isinstance(operand, SmemView) else "registers"
