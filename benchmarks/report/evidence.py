"""Rows in order: which of them count, which were timed in interleaved rounds, and where.

The newest row of a shape counts, within one environment (device, torch, Triton). A ratio is taken
only within a run, so for a shape it is the newest run that counts, of those with a row to
compare with if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tilewise.explain.modifiers import NAMES
from tilewise.explain.shapes import Shape
from tilewise.explain.traffic import PASSES

from ..bench.row import Row
from ..bench.shapes import SUITES, square
from ..bench.standings import BEST_OF
from ..bench.timer import Spread, ratio
from ..bench.ways import median_of, rate_of, rounds_of, way_of

OURS = "tilewise"
ATTENTION = {"adhoc", "varlen", "modifiers", *SUITES}  # suites whose shapes are attention calls
BEST = "best peer"
CLASSIC = 64, 128, 256  # headdims
SIZES = Shape._fields.index("window")  # so many fields come before what is done to scores


class Environment(NamedTuple):
    """What figures depend on besides the code; rows of two are never mixed."""

    device: str
    torch: str
    triton: str

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, Triton {self.triton}"

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU's."""
        return "+cpu" not in self.torch and "thread" not in self.device


class Entry(NamedTuple):
    """A row of an attention call."""

    row: Row
    shape: Shape
    environment: Environment

    @property
    def tflops(self) -> float:
        """Its rate, in the way that counts."""
        return rate_of(self.row, way_of(self.row))


class Timing(NamedTuple):
    """The rows of one shape from the interleaved rounds of a run, ours first."""

    environment: Environment
    shape: Shape
    rows: dict[str, Row]
    subject: str  # which of ours the others are divided by; "" where none of ours ran
    older: dict[str, Spread] | None = None  # ratios to peers that this run lacks

    @property
    def ours(self) -> Row | None:
        """The row that the others are divided by."""
        return self.rows.get(self.subject)

    @property
    def way(self) -> str:
        """How the times that count were taken: sustained where all rows have such, else flushed."""
        return way_of(*self.rows.values())

    @property
    def flushed(self) -> Timing:
        """The same without its sustained times."""
        rows = {name: replace(row, sustained_ms=[]) for name, row in self.rows.items()}
        return self._replace(rows=rows, older=None)

    def ms(self, name: str) -> float:
        """A provider's milliseconds."""
        return median_of(self.rows[name], self.way)

    def rate(self, name: str) -> float:
        """A provider's TFLOP/s."""
        return rate_of(self.rows[name], self.way)

    @property
    def ratios(self) -> dict[str, Spread]:
        """Time of each other over ours: above 1, ours is the faster."""
        if self.ours is None:
            return {}
        times = {name: list(rounds_of(row, self.way)) for name, row in self.rows.items()}
        ours = times.pop(self.subject)
        mine = {name: ratio(ours, of) for name, of in times.items() if len(of) == len(ours)}
        return (self.older or {}) | mine

    @property
    def best(self) -> float | None:
        """The least of the ratios to the peers that a GPU's best time is looked for among."""
        found = [of.median for name, of in self.ratios.items() if name in BEST_OF]
        return min(found) if found else None


class Evidence(NamedTuple):
    """What a report is made of."""

    rows: list[Row]
    entries: list[Entry]  # the newest of each shape and provider
    timings: list[Timing]  # the newest of each shape: dense, with features, packed
    others: dict[str, list[Row]]  # by suite
    calls: list[Entry]  # every attention call, the oldest first
    environments: list[Environment]  # GPUs first, then by the number of rows

    def by_environment(self, things: Iterable[Any], kind: str = "") -> dict[Environment, list]:
        """Rows, entries or timings by environment, in the order of environments; those of one kind
        of shapes where it is named.
        """
        found: dict[Environment, list] = {where: [] for where in self.environments}
        for one in things:
            if isinstance(one, Row):
                found[environment_of(one)].append(one)
            elif not kind or kind_of(one.shape) == kind:
                found[one.environment].append(one)
        return {where: mine for where, mine in found.items() if mine}


def collect(rows: Sequence[Row]) -> Evidence:
    """The rows that count, sorted."""
    entries, others = [], {}
    for row in rows:
        shape = shape_of(row)
        if shape is None:
            others.setdefault(row.suite, []).append(row)
        else:
            entries.append(Entry(row, shape, environment_of(row)))
    entries.sort(key=lambda entry: entry.row.date)  # stable: of one date the later line is newer
    newest = {(e.environment, e.shape, e.row.provider, lane_of(e.row)): e for e in entries}
    counts = Counter(map(environment_of, rows))
    return Evidence(
        list(rows),
        entries=list(newest.values()),
        timings=with_older(newest_timings(entries), entries),
        others=others,
        calls=entries,
        environments=sorted(counts, key=lambda where: (not where.on_gpu, -counts[where])),
    )


def environment_of(row: Row) -> Environment:
    """Where a row was taken."""
    return Environment(row.device, row.torch, row.triton)


def shape_of(row: Row) -> Shape | None:
    """The attention call that a row timed; None where it is something else."""
    if row.suite not in ATTENTION:
        return None
    try:
        shape = Shape(**row.shape)
        return shape if shape.flops > 0 and shape.modifier in ("", *NAMES) else None
    except (TypeError, ValueError, KeyError):
        return None


def lane_of(row: Row) -> str:
    """What distinguishes rows of one shape and provider: the baseline that they ran with."""
    return str(row.extra.get("lane") or row.extra.get("beside") or "")


def kind_of(shape: Shape) -> str:
    """dense, features, packed or modifiers."""
    if shape.modifier:
        return "modifiers"
    return "packed" if shape.lengths else "features" if shape.features else "dense"


def set_of(shape: Shape) -> str:
    """The kind, with dense shapes that pages do not speak of as a kind of their own."""
    kind = kind_of(shape)
    return "other" if kind == "dense" and not is_classic(shape) else kind


def is_classic(shape: Shape) -> bool:
    """Whether it is one of the dense shapes that pages speak of: 16Ki tokens, hidden size 2048, and
    headdim 64, 128 or 256.
    """
    if shape.headdim not in CLASSIC:
        return False
    plain = square(shape.direction, shape.seqlen_q, shape.headdim, shape.causal, dtype=shape.dtype)
    return shape[:SIZES] == plain[:SIZES]


def timings_of(entries: Iterable[Entry]) -> Iterator[Timing]:
    """A timing of each shape in each run; entries are the oldest first."""
    runs: dict[tuple, dict[str, Row]] = {}
    for entry in entries:
        if not lane_of(entry.row):
            key = entry.environment, entry.shape, entry.row.run
            runs.setdefault(key, {})[entry.row.provider] = entry.row
    for (environment, shape, _), rows in runs.items():
        ours_first = {name: rows[name] for name in sorted(rows, key=place_of)}
        yield Timing(environment, shape, ours_first, subject_of(list(rows)))


def newest_timings(entries: Iterable[Entry]) -> list[Timing]:
    """The timing that counts for each shape, in reading order."""
    newest: dict[tuple, Timing] = {}
    for timing in timings_of(entries):
        key = timing.environment, timing.shape, timing.subject
        if key not in newest or len(timing.rows) > 1 or len(newest[key].rows) == 1:
            newest[key] = timing
    return sorted(newest.values(), key=reading_order)


def with_older(timings: Iterable[Timing], entries: Iterable[Entry]) -> list[Timing]:
    """The same with ratios to peers that took part in older runs alone, each of the newest."""
    older: dict[tuple, dict[str, Spread]] = {}
    for one in timings_of(entries):
        older.setdefault((one.environment, one.shape, one.subject), {}).update(one.ratios)
    return [one._replace(older=older[one.environment, one.shape, one.subject]) for one in timings]


def subject_of(providers: Sequence[str]) -> str:
    """The provider that ratios are taken to: tilewise, else the first that is ours."""
    if OURS in providers:
        return OURS
    return next((name for name in providers if is_ours(name)), "")


def is_ours(provider: str) -> bool:
    """Whether a provider is one of our own ways, such as tilewise:portable."""
    return provider.split(":")[0] == OURS


def place_of(provider: str) -> tuple:
    """Ours first, then the peers that are looked at first, then by name."""
    order = ("tilewise", *BEST_OF, "flash", "sdpa", "efficient", "flex", "standard", "math")
    known = order.index(provider) if provider in order else len(order)
    return (not is_ours(provider), known, provider)


def reading_order(timing: Timing) -> tuple:
    """Direction, head size, mask, length."""
    shape = timing.shape
    return (
        list(PASSES).index(shape.direction),
        shape.dtype,
        shape.headdim,
        shape.nheads,
        shape.nheads_k,
        shape.causal,
        tuple(shape.features),
        shape.lengths,
        shape.seqlen_q,
        shape.batch,
    )


def ratios_by_peer(timings: Iterable[Timing]) -> dict[str, dict[Shape, float]]:
    """For each other provider, and for the best peer of each shape, the ratios there are."""
    found: dict[str, dict[Shape, float]] = {}
    for timing in timings:
        for name, of in timing.ratios.items():
            found.setdefault(name, {})[timing.shape] = of.median
        if timing.best is not None:
            found.setdefault(BEST, {})[timing.shape] = timing.best
    rivals = [name for name in found if name in BEST_OF]
    if len(rivals) < 2:
        found.pop(BEST, None)  # it is the only one
    return {name: found[name] for name in sorted(found, key=lambda n: (n == BEST, place_of(n)))}
