"""Launches of Gluon kernels: those of `program`, whose descriptors are encoded for each address."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...emulation import emulate, emulator_seed
from ..common import direct, program
from ..common.building import num_sms
from ..common.direct import Relaunch, filler
from ..common.operand import Encoded, Gap, Within, gaps_in
from ..common.packed import map_of, packed
from .assembly import ASM
from .compat import At, Direct
from .descriptors import DescriptorFields, checked

KEPT = 256  # descriptors of one operand: models have a cache for each of their layers
EMULATED = 4  # programs of a persistent kernel, so that each works through several tiles

OF_COMPILER = "num_warps", "maxnreg", "launch_pdl"  # the other options are the emulator's


class Launch(program.Launch):
    """One kernel on a grid. `DescriptorFields` among its arguments have operands as their base."""

    __slots__ = ()
    asm: ClassVar[dict[str, Callable[..., Any]]] = ASM  # what assembly means to the emulator

    def filled(self, values: Mapping[str, Any]) -> list[Any]:
        """The arguments of the tensors of these names, as Triton's front end takes them."""
        return [*checked(tuple(super().filled(values)))]

    def start(self, values: dict[str, Any], device: torch.device) -> Any:
        """Launches as `program.Launch.start`; on CPU tensors the emulator runs it."""
        if device.type != "cpu" or emulator_seed() is None:
            return super().start(values, device)
        beside = {name: x for name, x in self.options.items() if name not in OF_COMPILER}
        emulated = emulate(self.kernel, self.asm, **beside)
        warps = self.options["num_warps"]
        emulated[(self.programs,)](*self.filled(values), **self.constants, num_warps=warps)
        return None

    def relaunch_of(self, compiled: Any, values: dict[str, Any]) -> Relaunch | None:
        """As `program.Launch.relaunch_of`; None where this Triton's launcher is unknown."""
        launcher = direct.launcher_of(compiled)
        if launcher is None:
            return None
        kernel = Direct(compiled, self.programs, *launcher)
        args, described = [], []
        for x in self.positional:
            if isinstance(x, DescriptorFields):
                address = values[x.base.name].data_ptr()
                described.append(Described(kernel, len(described), x))
                args += described[-1].opened(address)
            else:
                args.append(x)
        moved = [*described, *(x for x in gaps_in(tuple(args)) if isinstance(x, Within))]
        if not moved:
            return direct.relaunch_of(kernel, tuple(args), [*values])
        in_maps = packed_of(kernel, tuple(args), values, moved)
        return in_maps or direct.relaunch_of(kernel, tuple(args), [*values], may_pack=False)


class Described(Encoded):
    """A descriptor as the kernel takes it, one for all tensors at an address: they differ in
    nothing else. Encoding it takes some 2.5 us.
    """

    __slots__ = ("in_map", "parts")

    def __init__(self, kernel: Direct, which: int, fields: DescriptorFields) -> None:
        """`which` of the kernel's descriptors it is."""
        template = fields._replace(base=None)

        def parts(address: int) -> list[Any]:
            return kernel.encode(which, template._replace(base=At(address)))

        keep = functools.lru_cache(maxsize=KEPT)
        encode = keep(lambda address: parts(address)[0])
        super().__init__(f"descriptor {which}", fields.base.name, encode)
        self.parts = parts
        self.in_map = keep(lambda address: map_of(encode(address)))  # as `packed` takes it

    def opened(self, address: int) -> list[Any]:
        """What moves of it, and the sizes and strides that stay."""
        return [self, *self.parts(address)[1:]]


def packed_of(
    kernel: Direct, args: tuple, values: dict[str, Any], described: Sequence[Described | Within]
) -> Relaunch | None:
    """The launch straight to the driver, of maps and of addresses; None where that takes none."""
    if None in [x.in_map(values[x.base].data_ptr()) for x in described]:
        return None
    names = [*values]
    moving = [*(x.name for x in described), *names]
    stream = Gap("stream")
    fill, launcher = filler(kernel.arguments(stream, args), ("stream", *moving)), kernel.launcher

    def otherwise(stream: int, row: Sequence[Any]) -> None:
        launcher(*fill(stream, *row))

    launch = packed(kernel.compiled, kernel.programs, args, moving, otherwise)
    if launch is None:
        return None
    maps = (Encoded(x.name, x.base, x.in_map) for x in described)
    moved = filler((*maps, *map(Gap, names)), names)
    return lambda stream, row: launch(stream, moved(*row))


def programs_of(tiles: int, device: torch.device) -> int:
    """Programs of a persistent kernel: one an SM, or fewer."""
    return min(tiles, EMULATED if device.type == "cpu" else num_sms(device))
