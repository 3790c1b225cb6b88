"""Launches: a Triton or Gluon kernel compiled for sm_90, and its PTX run on CPU tensors."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
        seed: None: warps are scheduled round-robin, and copies complete as late as they can. A
            number: at random.
        options: of a launch, such as num_warps, where the caller's launch lacks them.
        resident: how many CTAs run at a time.
        strict: whether what cp.async writes needs a proxy fence before wgmma reads it, as the ISA
            says; the loops that Triton pipelines have none.
        reached: tensors beside the arguments, that the kernel has addresses of.
        edit: changes the PTX, to plant a bug.

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
        strict: bool = False,
        reached: Sequence[torch.Tensor] = (),
        edit: Callable[[str], str] | None = None,
    ) -> None:
        self.kernel, self.seed, self.resident, self.strict = kernel, seed, resident, strict
        self.options, self.reached, self.edit = options or {}, reached, edit or str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **meta: self.machine(grid, *args, **meta).run()

    def machine(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> Machine:
        """What is about to run it."""
        meta = {**self.options, **meta}
        compiled = build(self.kernel, *args, on="sm90", **meta)
        names = [x.name for x in self.kernel.params]
        given = dict(zip(names, args)) | {k: v for k, v in meta.items() if k in names}
        values, tensors = _flatten(compiled, [given[x] for x in names])
        nx, ny, nz = (*grid, 1, 1)[:3]
        return machine_of(
            self.edit(compiled.asm["ptx"]),
            values,
            (nx, ny, nz),
            GlobalMemory([*tensors, *self.reached]),
            shared=compiled.metadata.shared,
            seed=self.seed,
            resident=self.resident,
            strict=self.strict,
        )


def machine_of(
    ptx: str, values: list[Any], grid: tuple[int, int, int], memory: GlobalMemory, **how: Any
) -> Machine:
    """What is about to run an entry with these values of its first parameters; others are 0, such
    as the scratch memory that no kernel here has.
    """
    kernel, program = _decoded(ptx)
    machine = Machine(program, grid, memory, {}, warps=kernel.threads // LANES, **how)
    values = [*values, *[0] * (len(kernel.parameters) - len(values))]
    for parameter, value in zip(kernel.parameters, values, strict=True):
        if isinstance(value, TensorMap):
            machine.tensor_maps[program.slots.addresses[parameter.name]] = value
        else:
            machine.parameters[parameter.name] = _bytes_of(value, parameter.type)
    return machine


def run_together(machines: Sequence[Machine]) -> None:
    """Launches that run at the same time, as those of several GPUs do."""
    running = [x.rounds() for x in machines]
    while running:
        running = [x for x in running if next(x, machines) is not machines]


@lru_cache(maxsize=16)
def _decoded(ptx: str) -> tuple[Kernel, Program]:
    kernel = parse(ptx)
    addresses = {"global_smem": SHARED}
    for number, parameter in enumerate(kernel.parameters):
        addresses[parameter.name] = PARAMETERS + 1024 * number
    return kernel, Program(kernel, addresses)


def _flatten(compiled: Any, args: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Values of the parameters, by the signature that was compiled, as Triton's launcher does; and
    the tensors among them.
    """
    signature = list(compiled.src.signature.values())
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    flat: list[Any] = []
    tensors: list[torch.Tensor] = []

    def walk(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for one_kind, one in zip(kind, value, strict=True):
                walk(one_kind, one)
        elif kind.startswith("tensordesc"):
            meta = next(described)
            if meta is None:
                raise PtxError("a descriptor that was not made a tensor map")
            tensors.append(value.base)
            flat.extend([_tensor_map(value, meta), *value.shape, *value.strides])
        elif kind.startswith("*"):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            flat.append(value.data_ptr())
        elif kind != "constexpr":
            flat.append(value)

    for kind, value in zip(signature, args, strict=True):
        walk(kind, value)
    return flat, tensors


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
    from gluon_emulator import hopper
    from gluon_emulator.triton import interpreter

    def launch(kernel: Any, *_: Any, **__: Any) -> execute:
        return execute(kernel, **how)

    with patch.context() as patched:
        patched.setattr(hopper, "emulate", launch)
        patched.setattr(interpreter, "interpret", launch)
        yield
