"""A timer with interleaved rounds: a machine's speed drifts, and a ratio within a round does not.

Each round times every provider once, in a balanced order: none always follows the same other. On an
H200 one kernel under two names took 3 to 4.5 % less where it always followed FlashAttention-2 (16Ki
tokens a sequence, headdim 128 and 256; at 64 nothing). The likely reason, not measured: a slow call
leaves the card power to spare, and it clocks the next one higher.
A round's time is the median of its calls, a provider's is the median of its rounds, and a ratio is
the median of the ratios taken round by round.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")
Key = TypeVar("Key")
Call = Callable[[], object]


class Spread(NamedTuple):
    """A median and the 20th and 80th percentiles beside it."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The summary of at least one value; percentiles are interpolated."""
        return cls(statistics.median(values), _percentile(values, 0.2), _percentile(values, 0.8))


class Clock(Protocol):
    """Times `calls` calls, in milliseconds each."""

    def __call__(self, call: Call, calls: int) -> list[float]: ...


def cpu_clock(call: Call, calls: int) -> list[float]:
    """Wall time of each call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


class CudaClock:
    """Device time between events around each call, the L2 cache flushed before it.

    The queue is held shut while the host fills it, so that a slow launch is not counted as a slow
    kernel.
    """

    def __init__(self, device: str = "cuda", flush_bytes: int = 256 << 20) -> None:
        import torch

        self.device = torch.device(device)
        self.flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def __call__(self, call: Call, calls: int) -> list[float]:
        import torch

        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        torch.cuda.synchronize(self.device)
        # Cycles: about 0.25 ms a call at 2 GHz. One call alone, by autograd, takes the host longer
        torch.cuda._sleep(max(8, min(calls, 40)) * 500_000)
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]


class HostClock:
    """Wall time of each call, with an idle device before and no wait between; all of them inside of
    the call's `within`, a function that makes a context, if it has one.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")

    def __call__(self, call: Call, calls: int) -> list[float]:
        with getattr(call, "within", contextlib.nullcontext)():
            if not self.on_gpu:
                return cpu_clock(call, calls)
            import torch

            torch.cuda.synchronize()
            times = cpu_clock(call, calls)
            torch.cuda.synchronize()
            return times


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Without threads, which a call of microseconds would only wait for."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clock_for(device: str) -> Clock:
    """The clock that tells a device's time."""
    return CudaClock(device) if device.startswith("cuda") else cpu_clock


class CallFailed(Exception):
    """A call raised while it was timed: its name, and the error."""

    def __init__(self, name: Any, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        self.name, self.error = name, error


def attempt(name: object, run: Callable[[], Result]) -> Result:
    """What `run` returns; CallFailed with this name where it raises."""
    try:
        return run()
    except Exception as error:
        raise CallFailed(name, error) from error


def time_interleaved(
    calls: Mapping[Key, Call],
    *,
    clock: Clock = cpu_clock,
    rounds: int = 5,
    round_ms: float = 30.0,
    max_calls: int = 50,
) -> dict[Key, list[float]]:
    """For each named call a median time a round, in milliseconds; CallFailed where one raises."""

    def timed(name: Key, count: int) -> list[float]:
        return attempt(name, lambda: clock(calls[name], count))

    names = list(calls)
    repeats: dict[Key, int] = {}
    for name in names:
        timed(name, 1)  # the first call compiles and allocates
        estimate = max(min(timed(name, 2)), 1e-6)
        repeats[name] = int(min(max(round_ms / estimate, 1), max_calls))
    times: dict[Key, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in order_of(names, number):
            times[name].append(statistics.median(timed(name, repeats[name])))
    return times


def order_of(names: list[Key], number: int) -> list[Key]:
    """The order of a round: over as many rounds as there are names, or twice as many where that is
    odd, each directly follows every other equally often (E. J. Williams, 1949, Latin squares
    balanced for the estimation of residual effects).
    """
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [names[(step + number) % count] for step in zigzag]
    return order[::-1] if count % 2 and number % 2 else order


def calls_in(span_ms: float, each_ms: float) -> int:
    """How many calls of `each_ms` last at least `span_ms`."""
    return max(1, math.ceil(span_ms / max(each_ms, 1e-6)))


def ratio(times: list[float], baseline: list[float]) -> Spread:
    """How many times as long as `times` the `baseline` took, round by round.

    Above 1, `times` is the faster.
    """
    return Spread.of([other / own for own, other in zip(times, baseline, strict=True)])


def _percentile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
