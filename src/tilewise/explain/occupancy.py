"""How many programs an NVIDIA SM works on at once, by what each needs of it."""

from __future__ import annotations

from typing import NamedTuple

from ..hardware import REGISTERS, RESERVED, SHARED_MEMORY
from .cards import PROGRAMS, WARPS

REGISTERS_AT_ONCE = 256  # a warp's registers come in such pieces
SHARED_AT_ONCE = 128
LANES = 32


class Occupancy(NamedTuple):
    """Programs and warps at work on one SM, as a share of the warps that it could hold."""

    programs: int
    warps: int
    share: float
    limit: str  # what a further program would lack


def occupancy(target: str, registers: int, shared_memory: int, warps: int) -> Occupancy | None:
    """The occupancy of a kernel; None for GPUs whose rules are others.

    >>> occupancy("sm90", registers=168, shared_memory=229912, warps=12)
    Occupancy(programs=1, warps=12, share=0.1875, limit='registers and shared memory')
    """
    if target not in WARPS:
        return None
    of_warp = _up(registers * LANES, REGISTERS_AT_ONCE)
    of_program = _up(shared_memory + RESERVED, SHARED_AT_ONCE)
    fits = {
        "registers": REGISTERS // max(1, of_warp) // warps,
        "shared memory": (SHARED_MEMORY[target] + RESERVED) // of_program,
        "warps": WARPS[target] // warps,
        "programs": PROGRAMS[target],
    }
    programs = min(fits.values())
    limit = " and ".join(name for name, count in fits.items() if count == programs)
    return Occupancy(programs, programs * warps, programs * warps / WARPS[target], limit)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
