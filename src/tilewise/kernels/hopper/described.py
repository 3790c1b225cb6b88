"""Tensors as the copy engine takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Tensor = torch.Tensor
ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
ASM = {"tanh.approx.f32 $0, $1;": torch.tanh}  # what the kernels' assembly means to the emulator


class Described(NamedTuple):
    """A tensor as the copy engine takes it: the fields of a TensorDescriptor, without its checks,
    which would take as long as the launch.
    """

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # Triton 3.8 and later ask


def by_head(x: Tensor, block: list[int], layout: Any) -> Described:
    """A (batch, rows, nheads, columns) tensor as (batch, nheads, rows, columns)."""
    batch, rows, heads, columns = x.shape
    by_batch, by_row, by_head, _ = x.stride()
    shape = [batch, heads, rows]
    strides = valid(shape, [by_batch, by_head, by_row])
    return Described(x, [*shape, columns], [*strides, 1], block, layout)


def valid(shape: list[int], strides: list[int]) -> list[int]:
    """Between elements of which there is one, any stride; the copy engine wants a multiple of 8."""
    return [stride if size > 1 else 16 for size, stride in zip(shape, strides)]


def checked(args: tuple) -> tuple:
    """The same arguments as Triton's front end takes them."""
    return tuple(TensorDescriptor(*x[:6]) if isinstance(x, Described) else x for x in args)
