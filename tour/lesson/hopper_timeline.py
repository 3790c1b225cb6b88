"""What lesson 07 draws: the events of one program, replayed with a clock.

The emulator records what happens and what waits for what, but no time. Here each
copy, matmul and softmax gets a length, from the rates below, and starts as soon as
what it waits for is over. So a picture shows what an order of events makes
possible; it predicts no GPU's speed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# as `emulate(kernel, trace=events)` collects them
Event = tuple[Any, str, str, str]


class Rates(NamedTuple):
    """What one SM does in a clock.

    The first two are NVIDIA's for an H100 or H200: 989 TFLOP/s of bf16, and 16
    exponentials. The others are round numbers, and assumed.
    """

    flops: float = 4096.0
    exponentials: float = 16.0
    # from the L2 cache, while all other SMs read from it, too
    copy_bytes: float = 40.0
    copy_latency: float = 800.0  # clocks from the request to the first byte


class Span(NamedTuple):
    """Something that takes from `start` to `end`, in clocks."""

    lane: str  # a partition, or a unit: see UNITS
    kind: str  # a key of LOOKS
    start: float
    end: float


UNITS = ("TMA", "tensor cores")
LOOKS = {  # what a span looks like, in grey
    "wait": dict(facecolor="white", hatch="////", edgecolor="0.6"),
    "S = Q Kᵀ": dict(facecolor="0.25", edgecolor="black"),
    "O += P V": dict(facecolor="0.55", edgecolor="black"),
    "softmax": dict(facecolor="white", hatch="....", edgecolor="black"),
    "copy": dict(facecolor="0.85", edgecolor="black"),
}


class Replay:
    """The clock of a program: `Replay(events, keys, headdim).run()` gives spans."""

    def __init__(
        self,
        events: Iterable[Event],
        keys: int,
        headdim: int,
        rates: Rates | None = None,
    ) -> None:
        self.rates = rates = rates or Rates()
        self.matmul = 2 * 64 * keys * headdim / rates.flops  # clocks
        self.softmax = 64 * keys / rates.exponentials
        self.steps: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for cta, partition, event, detail in events:
            if cta == (0, 0, 0):
                self.steps[partition].append((event, detail))
        arrivals = [
            (partition, detail)
            for partition, steps in self.steps.items()
            for event, detail in steps
            if event == "arrive"
        ]
        self.readers = defaultdict(set)
        for partition, detail in arrivals:
            self.readers[detail.split()[0]].add(partition)
        self.now = dict.fromkeys(self.steps, 0.0)
        # when each phase of a barrier ended
        self.over: dict[str, list[float]] = defaultdict(list)
        self.arrived: dict[str, list[float]] = defaultdict(list)
        # (partition, barrier) -> the phase to come
        self.waits: dict[tuple[str, str], int] = {}
        # partition -> the barrier its next copy completes
        self.expected: dict[str, str] = {}
        self.in_flight: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        self.free = dict.fromkeys((*UNITS, "exponentials"), 0.0)
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        """Runs the partition that can go on first, until all have ended."""
        places = dict.fromkeys(self.steps, 0)
        while True:
            able = [
                (max(self.now[partition], ready), partition)
                for partition, place in places.items()
                if place < len(self.steps[partition])
                and (ready := self._ready(partition, *self.steps[partition][place]))
                is not None
            ]
            if not able:
                return self.spans
            _, partition = min(able)
            self._do(partition, *self.steps[partition][places[partition]])
            places[partition] += 1

    def _ready(self, partition: str, event: str, detail: str) -> float | None:
        """When the event may happen; None while that is not known."""
        if event != "wait":
            return 0.0
        barrier, phase = self._awaited(partition, detail)
        if phase < 0:  # an empty stage is free from the start
            return 0.0
        ended = self.over[barrier]
        return ended[phase] if phase < len(ended) else None

    def _awaited(self, partition: str, detail: str) -> tuple[str, int]:
        barrier, parity = re.fullmatch(r"(\S+) phase (\d)", detail).groups()
        return barrier, self.waits.get((partition, barrier), -int(parity))

    def _do(self, partition: str, event: str, detail: str) -> None:
        now = self.now[partition]
        if event == "expect":
            self.expected[partition] = detail.split()[0]
        elif event == "TMA load":
            first_byte = now + self.rates.copy_latency
            nbytes = int(re.search(r"(\d+) bytes", detail)[1])
            landed = self._occupy(
                "TMA", "copy", first_byte, nbytes / self.rates.copy_bytes
            )
            self.over[self.expected[partition]].append(landed)
        elif event == "wait":
            ready = self._ready(partition, event, detail)
            barrier, phase = self._awaited(partition, detail)
            self.waits[partition, barrier] = phase + 1
            self._spend(partition, "wait", ready)
        elif event == "arrive":
            barrier = detail.split()[0]
            self.arrived[barrier].append(now)
            if len(self.arrived[barrier]) == len(self.readers[barrier]):
                self.over[barrier].append(max(self.arrived.pop(barrier)))
        elif event == "wgmma":
            is_scores = not detail.startswith("registers")
            kind = "S = Q Kᵀ" if is_scores else "O += P V"
            end = self._occupy("tensor cores", kind, now, self.matmul)
            self.in_flight[partition].append((end, is_scores))
        elif event == "wgmma wait":
            left = int(detail.split()[0])
            while len(self.in_flight[partition]) > left:
                end, is_scores = self.in_flight[partition].pop(0)
                self._spend(partition, "wait", end)
                if is_scores:  # its softmax is what comes next
                    start = max(self.now[partition], self.free["exponentials"])
                    self.free["exponentials"] = start + self.softmax
                    self._spend(partition, "wait", start)
                    self._spend(partition, "softmax", start + self.softmax)

    def _occupy(self, unit: str, kind: str, start: float, clocks: float) -> float:
        """A unit works on one thing at a time."""
        start = max(start, self.free[unit])
        self.free[unit] = start + clocks
        self.spans.append(Span(unit, kind, start, start + clocks))
        return start + clocks

    def _spend(self, partition: str, kind: str, until: float) -> None:
        if until > self.now[partition]:
            self.spans.append(Span(partition, kind, self.now[partition], until))
            self.now[partition] = until


def busy(spans: Iterable[Span], lane: str = "tensor cores") -> float:
    """The share of time in which a lane works, from its first span to its last."""
    found = [span for span in spans if span.lane == lane]
    begin, end = min(span.start for span in found), max(span.end for span in found)
    return sum(span.end - span.start for span in found) / (end - begin)


def lanes_of(spans: list[Span]) -> list[str]:
    """Units first, then partitions: those that load, then those that compute."""
    others = sorted(
        {span.lane for span in spans} - {*UNITS}, key=lambda x: ("load" not in x, x)
    )
    return [*UNITS, *others]


def draw(panels: dict[str, list[Span]], free: dict[str, float], title: str) -> Any:
    """A Matplotlib figure with a panel for each kernel, on one time axis.

    `free` has the share of time in which tensor cores work if copies take none.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    heights = [len(lanes_of(spans)) for spans in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        sharex=True,
        figsize=(10, 0.45 * sum(heights) + 0.6 * len(panels) + 0.8),
        gridspec_kw=dict(height_ratios=heights),
        squeeze=False,
    )
    for axis, (name, spans) in zip(axes[:, 0], panels.items()):
        lanes = lanes_of(spans)
        for span in spans:
            look = LOOKS[span.kind]
            axis.barh(
                lanes.index(span.lane),
                span.end - span.start,
                0.8,
                span.start,
                **look,
            )
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        shares = f"{busy(spans):.0%}; with free copies {free[name]:.0%}"
        text = f"{name}: tensor cores at work {shares}"
        axis.set_title(text, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("clocks of the replay")
    handles = [Patch(**look, label=kind) for kind, look in LOOKS.items()]
    figure.legend(
        handles=handles, ncols=len(handles), loc="lower center", frameon=False
    )
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def draw_speeds(speeds: dict[int, dict[str, float]], title: str) -> Any:
    """A figure of bars: TFLOP/s of each kernel, a panel for each length."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(speeds), sharey=True, figsize=(10, 3.2), squeeze=False
    )
    for axis, (seqlen, rates) in zip(axes[0], speeds.items()):
        names = list(rates)[::-1]
        bars = axis.barh(
            names, [rates[name] for name in names], color="0.6", edgecolor="black"
        )
        axis.bar_label(bars, fmt="%.0f", padding=2)
        axis.set(title=f"{seqlen} keys", xlabel="TFLOP/s")
        axis.margins(x=0.12)
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def event_lines(events: Iterable[Event], partitions: bool = True) -> Iterator[str]:
    """The events of the first program as lines to print."""
    for cta, partition, event, detail in events:
        if cta == (0, 0, 0):
            yield f"{partition + '  ' if partitions else '':20}{event:17}{detail}"
