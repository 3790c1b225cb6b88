"""What GPUs have, by target: the vendors' figures that more than one part of the library needs."""

from __future__ import annotations

# Bytes of shared memory one program (CTA, workgroup) may use
SHARED_MEMORY: dict[str, int] = {
    "sm80": 166912,
    "sm86": 101376,
    "sm89": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "sm120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}
RESERVED = 1024  # more bytes of it, of an NVIDIA SM's, that the driver keeps of each program
REGISTERS = 65536  # of an NVIDIA SM
