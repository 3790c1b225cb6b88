"""What became slower or larger between two sets of rows, beyond noise.

Times of two days or two machines differ by themselves. A peer that was timed in rounds interleaved
with ours, in the same run, drifts with it: so the peer's time over ours is compared where both
sides have that peer, and milliseconds only where they do not. Compared are times under sustained
load, where both sides have them, else flushed ones (`ways`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilewise.explain.shapes import Shape

from .bench.row import Row
from .bench.standings import BEST_OF
from .bench.timer import Spread, ratio
from .bench.ways import FLUSHED, SUSTAINED, rounds_of, way_of
from .sides import Side

OURS = "tilewise"  # how the names of our providers begin
RATIO, TIME, MEMORY = "ratio", "time", "memory"
REGRESSED, IMPROVED = "regressed", "improved"
NOISE, SMALL, TOO_FEW = "noise", "small", "few rounds"
LEAST_ROUNDS = 3  # fewer have no 20th and 80th percentile to speak of
# What in `extra` says that rows of one shape and provider are not the same measurement. A lane says
# what a row was timed for, which its neighbours in that run need not say.
LABELS = ("mode", "cache", "kernel", "config", "modifier", "beside")
LANE = "lane"
VERSIONS = ("torch", "triton", "cuda", "driver")


class Choice(NamedTuple):
    """What is compared, and from what change on it counts; no providers: all that are ours."""

    threshold: float = 0.03
    providers: tuple[str, ...] = ()
    peer: str = ""  # the only one that counts; "": the first of `order` that both sides have


class Change(NamedTuple):
    """One figure of a shape and provider on both sides."""

    shape: str
    label: str  # what else says which measurement it is; mostly ""
    provider: str
    measure: str  # RATIO: peer's time / ours; TIME: milliseconds; MEMORY: bytes
    peer: str
    a: Spread
    b: Spread
    rounds: int  # of the side with fewer
    verdict: str
    way: str = ""  # of the times: FLUSHED or SUSTAINED

    @property
    def cost(self) -> float:
        """Time (beside the peer's) or memory of B over that of A: above 1 is worse."""
        return cost(self.measure, self.a, self.b)


class Comparison(NamedTuple):
    """All changes, how many series are left out and why, and what else a reader is to know."""

    changes: list[Change]
    left_out: dict[str, int]
    notes: list[str]

    @property
    def has_regressed(self) -> bool:
        """Whether anything did."""
        return any(change.verdict == REGRESSED for change in self.changes)


def rule(threshold: float) -> str:
    """When a change is one, in words."""
    return (
        f"A change counts where the p20-p80 intervals of the rounds do not overlap (else {NOISE}) "
        f"and the medians differ by more than {100 * threshold:g} % (else {SMALL}); of fewer than "
        f"{LEAST_ROUNDS} rounds none does. Memory is one number, without noise."
    )


def changes_between(a: Side, b: Side, choice: Choice) -> Comparison:
    """Every shape and provider of both sides, by its newest row there."""
    (newest_a, older_a), (newest_b, older_b) = (newest(x.rows, choice) for x in (a, b))
    beside_a, beside_b = Neighbours(a.rows), Neighbours(b.rows)
    changes, pairs = [], []
    untimed = 0
    for key, row_a in newest_a.items():
        if (row_b := newest_b.get(key)) is None:
            continue
        found = changes_of(row_a, row_b, (beside_a.of(row_a), beside_b.of(row_b)), choice)
        changes += found
        pairs += [(row_a, row_b)] if found else []
        untimed += not found
    left_out = {
        "only in A": len(newest_a.keys() - newest_b.keys()),
        "only in B": len(newest_b.keys() - newest_a.keys()),
        "without a time or a peak of memory on both sides": untimed,
        "older rows": older_a + older_b,
    }
    return Comparison(changes, {why: n for why, n in left_out.items() if n}, notes(changes, pairs))


def newest(rows: Sequence[Row], choice: Choice) -> tuple[dict[tuple, Row], int]:
    """The newest row of each series that is asked for, and how many rows are older ones."""
    found: dict[tuple, Row] = {}
    count = 0
    for row in rows:
        if not is_asked(row.provider, choice):
            continue
        count += 1
        key = (shape_key(row), row.provider, row.device, labels(row), str(row.extra.get(LANE)))
        if key not in found or row.date >= found[key].date:
            found[key] = row
    return found, count - len(found)


def is_asked(provider: str, choice: Choice) -> bool:
    """Whether a provider's rows are compared."""
    return provider in choice.providers if choice.providers else provider.startswith(OURS)


class Neighbours:
    """The rows of runs with interleaved rounds of several providers, by provider."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.groups: dict[tuple, dict[str, Row]] = {}
        for row in rows:
            self.groups.setdefault(self._key(row), {})[row.provider] = row

    def of(self, row: Row) -> dict[str, Row]:
        """Of its run, shape and labels those with as many rounds, without itself."""
        return {
            name: other
            for name, other in self.groups[self._key(row)].items()
            if name != row.provider and is_timed(other) and len(other.rounds_ms) == rounds(row)
        }

    @staticmethod
    def _key(row: Row) -> tuple:
        return row.run, shape_key(row), labels(row)


def changes_of(
    a: Row, b: Row, beside: tuple[dict[str, Row], dict[str, Row]], choice: Choice
) -> list[Change]:
    """What can be compared of two rows of one series: times, and peaks of memory."""
    found: list[tuple[str, str, Spread, Spread, int, str]] = []
    if is_timed(a) and is_timed(b):
        peer = peer_of(beside, choice)
        sides = [(x, of[peer]) if peer else (x,) for x, of in zip((a, b), beside)]
        way = SUSTAINED if all(way_of(*rows) == SUSTAINED for rows in sides) else FLUSHED
        times = [[list(rounds_of(row, way)) for row in rows] for rows in sides]
        one, other = (ratio(*of) if peer else Spread.of(*of) for of in times)
        count = min(len(of[0]) for of in times)
        found.append((RATIO if peer else TIME, peer, one, other, count, way))
    most_a, most_b = peak(a), peak(b)
    if most_a and most_b:
        held = Spread(most_a, most_a, most_a), Spread(most_b, most_b, most_b)
        found.append((MEMORY, "", *held, min(rounds(a), rounds(b)), ""))
    return [
        Change(
            *(*words_of(b), b.provider, measure, peer, one, other, count),
            verdict=verdict(measure, one, other, count, choice.threshold),
            way=way,
        )
        for measure, peer, one, other, count, way in found
    ]


def peer_of(beside: tuple[dict[str, Row], dict[str, Row]], choice: Choice) -> str:
    """The peer that is compared with, "" for none: no other provider of ours, unless asked for."""
    both = beside[0].keys() & beside[1].keys()
    if choice.peer:
        return choice.peer if choice.peer in both else ""
    peers = sorted(name for name in both if not name.startswith(OURS))
    return next((name for name in [*BEST_OF, *peers] if name in both), "")


def verdict(measure: str, a: Spread, b: Spread, count: int, threshold: float) -> str:
    """One word; what `rule` says. It is the opposite one with the sides exchanged."""
    if measure != MEMORY and count < LEAST_ROUNDS:
        return TOO_FEW
    if a.p20 <= b.p80 and b.p20 <= a.p80:
        return NOISE
    change = cost(measure, a, b)
    if max(change, 1 / change) <= 1 + threshold:
        return SMALL
    return REGRESSED if change > 1 else IMPROVED


def cost(measure: str, a: Spread, b: Spread) -> float:
    """What B takes over what A takes: a ratio is higher where ours is the faster."""
    return a.median / b.median if measure == RATIO else b.median / a.median


def notes(changes: Sequence[Change], pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """What limits the comparison: plain times, and versions that differ."""
    found = []
    if plain := sum(change.measure == TIME for change in changes):
        found.append(
            f"{plain} in plain milliseconds, as no peer was interleaved on both sides: these "
            "are only comparable on one machine."
        )
    sustained = sum(any(row.sustained_ms for row in pair) for pair in pairs)
    if lost := sustained - sum(change.way == SUSTAINED for change in changes):
        found.append(
            f"{lost} in {FLUSHED} times: one side has no {SUSTAINED} ones, or its peer has none."
        )
    for name in VERSIONS:
        differ = Counter((getattr(a, name), getattr(b, name)) for a, b in pairs)
        for (old, new), count in differ.items():
            if old != new:
                found.append(
                    f"{name} is {old} in A and {new} in B ({count} of {len(pairs)}): what that "
                    "changes, of a peer too, is in the figures."
                )
    return found


def shape_key(row: Row) -> str:
    """A shape by what differs from Shape's defaults: fields that came later are in no old row."""
    defaults = Shape._field_defaults
    said = {k: v for k, v in row.shape.items() if k not in defaults or v != defaults[k]}
    return json.dumps(said, sort_keys=True)


def labels(row: Row) -> str:
    """What says that two rows of one shape and provider are not the same measurement."""
    return json.dumps({name: row.extra[name] for name in LABELS if name in row.extra})


def words_of(row: Row) -> tuple[str, str]:
    """A shape and its labels for a reader."""
    try:
        shape = str(Shape(**row.shape))
    except (TypeError, ValueError, KeyError):  # another's shape, such as a matmul's
        shape = " ".join(f"{name}={value}" for name, value in row.shape.items())
    names = [name for name in (*LABELS, LANE) if name in row.extra]
    return shape, ", ".join(f"{name} {row.extra[name]}" for name in names)


def is_timed(row: Row) -> bool:
    """Whether the row has times: memory's, and others', are 0."""
    return row.median_ms > 0 and all(0 < time < math.inf for time in row.rounds_ms)


def rounds(row: Row) -> int:
    """How many."""
    return len(row.rounds_ms)


def peak(row: Row) -> float | None:
    """The most memory that was held, in bytes, where the row knows it."""
    value = row.extra.get("peak_bytes")
    return value if isinstance(value, int | float) and value > 0 else None
