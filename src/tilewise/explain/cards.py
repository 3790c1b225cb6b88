"""What GPUs can do at most: the roofs that a kernel runs into, and what one SM holds.

Peaks are the vendors' (dense, no sparsity), by bits of an element; 32 is exact fp32, without tensor
cores. `measured` is what a large matmul and a plain read reached here, where that was recorded.
"""

from __future__ import annotations

import functools
import timeit
from typing import NamedTuple

import torch

from ..hardware import REGISTERS, RESERVED, SHARED_MEMORY


class Roof(NamedTuple):
    """TFLOP/s and TB/s, and where they are from."""

    tflops: float
    bandwidth: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on arithmetic is the limit."""
        return self.tflops / self.bandwidth

    def most(self, intensity: float) -> float:
        """TFLOP/s at so many FLOPs a byte."""
        return min(self.tflops, intensity * self.bandwidth)

    def milliseconds(self, flops: float, nbytes: float) -> float:
        """The least time of so much work."""
        return max(flops / self.tflops, nbytes / self.bandwidth) / 1e9


class Card(NamedTuple):
    """A GPU by its short name."""

    name: str
    target: str  # as `tilewise.testing.build` calls it
    sms: int
    tflops_16: float
    tflops_32: float
    bandwidth: float  # TB/s
    measured: Roof | None = None

    def roof(self, bits: int) -> Roof:
        """The measured one where there is one for this width, else the vendor's."""
        if bits == 16 and self.measured is not None:
            return self.measured
        return Roof(self.tflops_16 if bits == 16 else self.tflops_32, self.bandwidth, "datasheet")


class Occupancy(NamedTuple):
    """Programs and warps at work on one SM, as a share of the warps that it could hold."""

    programs: int
    warps: int
    share: float
    limit: str  # what a further program would lack


# CUDA programming guide, technical specifications by compute capability
WARPS = {"sm80": 64, "sm89": 48, "sm90": 64, "sm100": 64, "sm120": 48}  # on one SM
PROGRAMS = {"sm80": 32, "sm89": 24, "sm90": 32, "sm100": 32, "sm120": 24}
REGISTERS_AT_ONCE = 256  # a warp's registers come in such pieces
SHARED_AT_ONCE = 128
LANES = 32
# bf16 matmul of 8192^3 at its best (695 to 744 in several runs), and a plain read of 4 GiB
_H200 = Roof(744.0, 4.42, source="measured on an H200: matmul of 8192^3 in bf16, a plain read")
ENOUGH = 0.01  # seconds that a matmul takes to say how fast a CPU is
CARDS = {
    card.name: card
    for card in (
        Card("h200", "sm90", 132, 989.0, 67.0, 4.8, _H200),
        Card("h100", "sm90", sms=132, tflops_16=989.0, tflops_32=67.0, bandwidth=3.35),
        Card("a100", "sm80", sms=108, tflops_16=312.0, tflops_32=19.5, bandwidth=2.04),
        Card("a100-40gb", "sm80", sms=108, tflops_16=312.0, tflops_32=19.5, bandwidth=1.56),
        Card("rtx4090", "sm89", sms=128, tflops_16=165.0, tflops_32=82.6, bandwidth=1.01),
        Card("rtx5090", "sm120", sms=170, tflops_16=209.5, tflops_32=104.8, bandwidth=1.79),
        Card("b200", "sm100", sms=148, tflops_16=2250.0, tflops_32=75.0, bandwidth=8.0),
        Card("mi300x", "gfx942", sms=304, tflops_16=1307.0, tflops_32=163.4, bandwidth=5.3),
        Card("mi355x", "gfx950", sms=256, tflops_16=2516.0, tflops_32=157.3, bandwidth=8.0),
    )
}


def card_for(target: str) -> Card:
    """The first card of a target."""
    return next(card for card in CARDS.values() if card.target == target)


def card_here() -> Card | None:
    """The GPU of this machine with its own number of SMs, if its kind is known."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    card = card_named(properties.name)
    return None if card is None else card._replace(sms=properties.multi_processor_count)


def card_named(device: str) -> Card | None:
    """The card that a driver calls so, if its kind is known.

    >>> card_named("NVIDIA A100-SXM4-40GB").bandwidth
    1.56
    """
    name = "".join(device.lower().split())
    cards = [card for card in CARDS if all(part in name for part in card.split("-"))]
    return CARDS[max(cards, key=len)] if cards else None


@functools.cache
def cpu_roof(dtype: torch.dtype, size: int = 1024, nbytes: int = 64 << 20) -> Roof:
    """The roof of this CPU, measured in a fraction of a second: the best of three of a matmul and a
    copy. `size` is the widest matmul; a CPU without instructions for `dtype` has a narrower one.
    """
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(call) -> float:
        return min(timeit.repeat(call, repeat=4, number=1)[1:])

    width, seconds = min(size, 128) // 2, 0.0
    while width < size and seconds < ENOUGH:
        width *= 2
        x = torch.randn(width, width).to(dtype)
        seconds = best(functools.partial(torch.mm, x, x))
    tflops = 2 * width**3 / seconds / 1e12
    bandwidth = 2 * nbytes / best(lambda: target.copy_(source)) / 1e12
    name = str(dtype).removeprefix("torch.")
    return Roof(tflops, bandwidth, source=f"measured now: matmul of {width}^3 in {name}, a copy")


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
