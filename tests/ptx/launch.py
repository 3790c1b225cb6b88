"""Launches: a Triton or Gluon kernel compiled for sm_90, and its PTX run on CPU tensors."""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tilewise.testing import build

from .copies import TensorMap
from .errors import PtxError
from .machine import Machine
from .memory import PARAMETERS, SHARED, GlobalMemory
from .parse import Kernel, parse
from .program import Program
from .registers import LANES, WIDTH

SWIZZLES = (0, 32, 64, 128)  # by CUtensorMapSwizzle


class execute:
    """Launches a kernel as `execute(kernel)[grid](*args, **meta)`, as `emulate` and `interpret` do.

    It is compiled for sm_90 by Triton, from these arguments as a real launch has them, and its PTX
    is executed.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` kernel.
        seed: None: warps take turns in order and copies complete as late as they can. A number:
            at random.
        options: of a launch, such as num_warps, where the caller's launch lacks them.
        resident: how many CTAs run at a time.

    Raises:
        PtxError: see errors.py.
    """

    def __init__(
        self,
        kernel: Any,
        seed: int | None = None,
        *,
        options: dict[str, Any] | None = None,
        resident: int = 8,
        **ignored: Any,
    ) -> None:
        self.kernel, self.seed, self.options, self.resident = kernel, seed, options or {}, resident

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **meta: self._launch(grid, args, {**self.options, **meta})

    def _launch(self, grid: tuple[int, ...], args: tuple, meta: dict[str, Any]) -> None:
        compiled = build(self.kernel, *args, on="sm90", **meta)
        names = [x.name for x in self.kernel.params]
        given = dict(zip(names, args)) | {k: v for k, v in meta.items() if k in names}
        nx, ny, nz = (*grid, 1, 1)[:3]
        machine = machine_of(compiled, [given[x] for x in names], (nx, ny, nz), self)
        machine.run()


def machine_of(compiled: Any, args: list[Any], grid: tuple[int, int, int], how: execute) -> Machine:
    """A machine that is about to run a compiled kernel."""
    kernel, program = _decoded(compiled.asm["ptx"])
    flat, tensors, tensor_maps = _flatten(compiled, args)
    scratch = [0] * (len(kernel.parameters) - len(flat))  # none is needed
    parameters, maps, given = {}, {}, iter([*flat, *scratch])
    for number, parameter in enumerate(kernel.parameters):
        value = next(given)
        if isinstance(value, TensorMap):
            maps[PARAMETERS + 1024 * number] = value
        else:
            parameters[parameter.name] = _bytes_of(value, parameter.type)
    assert len(maps) == len(tensor_maps)
    machine = Machine(
        program,
        grid,
        GlobalMemory(tensors),
        parameters,
        warps=_warps(compiled),
        shared=compiled.metadata.shared,
        seed=how.seed,
        resident=how.resident,
    )
    machine.tensor_maps = maps
    return machine


@lru_cache(maxsize=16)
def _decoded(ptx: str) -> tuple[Kernel, Program]:
    kernel = parse(ptx)
    addresses = {"global_smem": SHARED}
    for number, parameter in enumerate(kernel.parameters):
        addresses[parameter.name] = PARAMETERS + 1024 * number
    return kernel, Program(kernel, addresses)


def _warps(compiled: Any) -> int:
    """Those of warp-specialised partitions, too: what .reqntid says."""
    text = compiled.asm["ptx"]
    return int(text.split(".reqntid")[1].split()[0].rstrip(",")) // LANES


def _flatten(compiled: Any, args: list[Any]) -> tuple[list[Any], list[torch.Tensor], list[Any]]:
    """Values of the parameters, by the signature that was compiled, as Triton's launcher does."""
    signature = list(compiled.src.signature.values())
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    flat: list[Any] = []
    tensors: list[torch.Tensor] = []
    maps: list[TensorMap] = []

    def walk(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for one_kind, one in zip(kind, value, strict=True):
                walk(one_kind, one)
        elif kind.startswith("tensordesc"):
            meta = next(described)
            if meta is None:
                raise PtxError("a descriptor that was not made a tensor map")
            maps.append(_tensor_map(value, meta))
            tensors.append(value.base)
            flat.extend([maps[-1], *value.shape, *value.strides])
        elif kind.startswith("*"):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            flat.append(value.data_ptr())
        elif kind != "constexpr":
            flat.append(value)

    for kind, value in zip(signature, args, strict=True):
        walk(kind, value)
    return flat, tensors, maps


def _tensor_map(value: Any, meta: dict[str, Any]) -> TensorMap:
    """As Triton's driver fills it."""
    element = meta["elem_size"]
    found = TensorMap(
        value.base.data_ptr(),
        tuple(map(int, value.shape[::-1])),
        tuple(int(x) * element for x in value.strides[-2::-1]),
        tuple(meta["block_size"][::-1]),
        element,
        SWIZZLES[meta["swizzle"]],
        (b"\0" if value.padding == "zero" else b"\xff") * element,
    )
    found.check()
    return found


def _bytes_of(value: Any, type_: str) -> bytes:
    width = WIDTH[type_]
    if type_[0] == "f":
        return np.array(value, {16: np.float16, 32: np.float32, 64: np.float64}[width]).tobytes()
    return (int(value) % 2**width).to_bytes(width // 8, "little")


@contextlib.contextmanager
def executing(patch: Any, **how: Any) -> Iterator[None]:
    """Within this block launches of `interpret` and `emulate` are executions of PTX; `patch` is
    pytest's monkeypatch.
    """
    from tilewise.emulator import hopper
    from tilewise.emulator.triton import interpreter

    def launch(kernel: Any, *_: Any, **__: Any) -> execute:
        return execute(kernel, **how)

    with patch.context() as patched:
        patched.setattr(hopper, "emulate", launch)
        patched.setattr(interpreter, "interpret", launch)
        yield
