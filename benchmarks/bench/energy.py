"""Joules a call: blocks of seconds back to back, between two readings of the card's energy counter.

The counter, and power where a card has none, are read through NVML, the driver's library.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from .timer import Call, calls_in

if TYPE_CHECKING:
    from .sustained import Span

LIBRARY = "libnvidia-ml.so.1"
BLOCK_MS = 5000.0
SAMPLE_S = 0.02
COUNTER, POWER = "counter", "sampled power"
LEAD_MS = {COUNTER: 200.0, POWER: 1200.0}  # a reading of power is a mean over its last second


class NoEnergy(Exception):
    """A card's energy cannot be asked for; the text says why."""


class Source(Protocol):
    """What a card says of itself; NoEnergy where it does not."""

    def energy(self) -> float:
        """Joules since the driver was loaded."""
        ...

    def power(self) -> float:
        """Watts."""
        ...


class Nvml:
    """One card, by the UUID that torch knows it by."""

    def __init__(self, device: str) -> None:
        import torch

        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoEnergy(f"{LIBRARY} does not load: {error}") from error
        self.card = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self.card))

    def energy(self) -> float:
        value = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self.card, ctypes.byref(value))
        return value.value / 1e3

    def power(self) -> float:
        value = ctypes.c_uint()
        self._ask("nvmlDeviceGetPowerUsage", self.card, ctypes.byref(value))
        return value.value / 1e3

    def _ask(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self.library, name)(*arguments)
        except AttributeError as error:
            raise NoEnergy(f"{LIBRARY} has no {name}") from error
        if code:
            raise NoEnergy(f"{name} answers with error {code}")


class Meter:
    """Measures what a card takes meanwhile: by its counter or, where it has none, by its power."""

    def __init__(self, source: Source) -> None:
        self.source = source
        try:
            source.energy()
            self.kind = COUNTER
        except NoEnergy:
            source.power()
            self.kind = POWER

    def joules(self, work: Callable[[], None]) -> float:
        """What was taken while `work` ran."""
        if self.kind == COUNTER:
            before = self.source.energy()
            work()
            return self.source.energy() - before
        return self._sampled(work)

    def _sampled(self, work: Callable[[], None]) -> float:
        ended = threading.Event()

        def sample() -> list[float]:
            watts = [self.source.power()]
            while not ended.wait(SAMPLE_S):
                watts.append(self.source.power())
            return watts

        with ThreadPoolExecutor(1) as pool:
            watts, start = pool.submit(sample), time.perf_counter()
            try:
                work()
            finally:
                seconds = time.perf_counter() - start
                ended.set()
            return statistics.fmean(watts.result()) * seconds


def open_meter(device: str) -> Meter:
    """The meter of a CUDA device; NoEnergy where there is none."""
    return Meter(Nvml(device))


def block(call: Call, span: Span, meter: Meter) -> float:
    """Joules a call over at least BLOCK_MS back to back, behind a lead of the same calls."""
    each = span(call, calls_in(LEAD_MS[meter.kind], span(call, 2)))
    made = 0

    def work() -> None:
        nonlocal made, each
        done = 0.0
        while done < BLOCK_MS:
            count = calls_in(BLOCK_MS - done, each)
            each = span(call, count)
            done += count * each
            made += count + 1  # a span has one that it does not time

    return meter.joules(work) / made
