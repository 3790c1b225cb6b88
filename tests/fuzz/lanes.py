"""Where cases run, and which sizes each place can afford."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

HALF = ("float16", "bfloat16")
OF_WGMMA = (8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128)
ODD = (1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 40, 64, 65, 72)


class Lane(NamedTuple):
    """A backend and a device; what is drawn there."""

    backend: str | None  # None: by choice
    device: str
    dtypes: tuple[str, ...]
    headdims: tuple[int, ...]
    longest: int
    most_heads: int
    most_batch: int
    looks: int = 0  # on a GPU each look is a compilation: there are no more than this
    again: int = 1  # one case in as many is computed twice
    tanh_off: float = 0.0  # `budget` has the reasons
    lse_off: float = 0.0
    refused: float = 0.0  # the share of cases that may be refused, at most

    @property
    def name(self) -> str:
        return f"{self.backend or 'choice'}-{self.device}"

    def on_cpu(self, seed: int) -> contextlib.AbstractContextManager:
        """What runs a GPU backend on CPU tensors."""
        from tilewise.testing import use_emulator, use_interpreter

        if self.device == "cpu" and self.backend == "portable":
            return use_interpreter()
        if self.device == "cpu" and self.backend == "hopper":
            return use_emulator(seed)
        return contextlib.nullcontext()


_SMALL = dict(device="cpu", longest=130, most_heads=3, most_batch=2, again=4)
_EMULATED = dict(_SMALL, longest=260)
_GPU = dict(device="cuda", longest=700, most_heads=8, most_batch=3)
_HOPPER = dict(tanh_off=2**-10, **_GPU)
_PORTABLE = ("float32", *HALF)
_WIDE = (128, 160, 192, 255, 256, 512)
_USUAL = (8, 40, 64, 64, 64, 72, 96, 128, 128, 128, 192, 256)
LANES = {
    lane.name: lane
    for lane in (
        Lane("cpu", "cpu", (*_PORTABLE, "float64"), (*ODD, *_WIDE), 300, 8, 3, lse_off=2**-13),
        Lane(None, "cpu", (*_PORTABLE, "float64"), (*ODD, *_WIDE), 300, 8, 3, lse_off=2**-13),
        Lane("portable", dtypes=_PORTABLE, headdims=(*ODD, 128), refused=0.1, **_SMALL),
        Lane("hopper", dtypes=HALF, headdims=(*OF_WGMMA, 65, 256), refused=0.3, **_EMULATED),
        Lane("hopper", dtypes=HALF, headdims=_USUAL, looks=30, refused=0.3, **_HOPPER),
        Lane("portable", dtypes=_PORTABLE, headdims=(*ODD, *_WIDE), looks=20, refused=0.1, **_GPU),
        Lane(None, dtypes=_PORTABLE, headdims=(*ODD, *_USUAL), looks=10, refused=0.1, **_HOPPER),
    )
}


def lane_of(backend: str | None, device: str) -> Lane:
    """The lane of a backend, or of the choice of one, on a device."""
    return LANES[f"{backend or 'choice'}-{torch.device(device).type}"]
