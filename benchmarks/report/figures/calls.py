"""Questions about attention calls: rates, and ratios to peers, over the shapes that words describe.

A shape answers to words: fwd, D64, causal, 4Ki, bf16, packed, zipf, window, group4. A question
means every shape that answers to all of its words; bf16 and dense go without saying, and so does
the GPU, torch and Triton that most rows are from, unless H100, H200 or a word such as Triton-3.8
names another. Ours is the call as it is, unless a word such as portable or quantized names another
of our ways.
Times are the sustained ones, where a run has them for all that took part; the word flushed means
the other ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from tilewise.explain.shapes import Shape

from ...bench.row import Row
from ...bench.shapes import SUITES, dense_of
from ...bench.standings import Standing, mean_of
from ...bench.timer import ratio as spread_between
from ...bench.ways import FLUSHED, SUSTAINED, rounds_of, way_of
from ..evidence import (
    OURS,
    Entry,
    Environment,
    Evidence,
    Timing,
    is_classic,
    kind_of,
    lane_of,
    newest_timings,
)
from ..page import length, times
from ..sections import SHORT

NONE = "–"
KINDS = {"dense", "features", "packed", "other"}
CARDS, TRITON = {"H100", "H200"}, "Triton-"
WAYS = {"portable", "quantized", "quantize", "calibrated"}  # of ours
# Means over FA3 by another harness, which have no rows; for pages to show beside those that have
INDEPENDENT = {("bwd", "H100"): "0.96"}
ASIDE = {FLUSHED, *WAYS, *CARDS}  # words that say what of a shape is meant, and not which shape


@functools.cache
def words_of(shape: Shape, suite: str = "adhoc") -> frozenset[str]:
    """What a shape answers to."""
    features = {word.split()[0] for word in shape.features}
    words = {
        *(shape.direction, shape.lengths, suite, *features),
        *(f"D{shape.headdim}", "causal" if shape.causal else "full"),
        *(length(shape.seqlen_q), SHORT.get(shape.dtype, shape.dtype)),
        f"group{shape.nheads // shape.nheads_k}",  # query heads that share keys
        kind_of(shape) if shape.lengths or is_classic(shape) else "other",
    }
    return frozenset(words)


def where(evidence: Evidence, words: Sequence[str] = ()) -> Environment | None:
    """The GPU, torch and Triton that are meant."""
    version = next((word.removeprefix(TRITON) for word in words if word.startswith(TRITON)), "")
    cards = CARDS.intersection(words)
    for one in evidence.environments:
        if one.on_gpu and cards <= set(one.device.split()):
            if f"{one.triton}.".startswith(version):
                return one
    return None


def timings(evidence: Evidence, peers: Sequence[str], words: Sequence[str]) -> list[Timing]:
    """The newest timing of each shape in which all of these took part."""
    ours = next((f"{OURS}:{word}" for word in words if word in WAYS), OURS)
    asked, wanted, place = asked_of(words), {ours, *peers}, where(evidence, words)
    runs: dict[tuple, list[Entry]] = {}
    for entry in evidence.calls:
        if entry.environment == place and entry.row.provider in wanted and not lane_of(entry.row):
            if asked <= words_of(entry.shape, entry.row.suite):
                runs.setdefault((entry.shape, entry.row.run), []).append(entry)
    whole = [of for of in runs.values() if {entry.row.provider for entry in of} == wanted]
    found = newest_timings(itertools.chain(*whole))
    return [timing.flushed for timing in found] if FLUSHED in words else found


def asked_of(words: Sequence[str]) -> set[str]:
    """What a shape has to answer to."""
    asked = {word for word in words if word not in ASIDE and not word.startswith(TRITON)}
    asked |= set() if asked & (KINDS | SUITES.keys()) else {"dense"}
    return asked | (set() if asked & set(SHORT.values()) else {"bf16"})


def over_versions(evidence: Evidence, words: Sequence[str]) -> dict[Shape, float]:
    """Our time with the Triton that most rows are of over that with the one that `words` name, of
    each shape the newest run that timed both.
    """
    asked, place = asked_of(words), where(evidence, words)
    usual = where(evidence, [word for word in words if not word.startswith(TRITON)])
    runs: dict[tuple[Shape, str], dict[Environment | None, Row]] = {}
    for entry in evidence.calls:
        if entry.row.provider == OURS and asked <= words_of(entry.shape, entry.row.suite):
            runs.setdefault((entry.shape, entry.row.run), {})[entry.environment] = entry.row
    found = {}
    for (shape, _), of in runs.items():
        if place in of and usual in of:
            way = way_of(of[place], of[usual])
            new, old = (list(rounds_of(of[which], way)) for which in (place, usual))
            found[shape] = spread_between(new, old).median
    return found


def versions(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The mean of these ratios, and the least."""
    found = over_versions(evidence, words).values()
    return f"{marked(mean_of(found))}, least {times(min(found))}" if found else NONE


def ratios(evidence: Evidence, peer: str, words: Sequence[str]) -> list[float]:
    """Time of a peer over ours, a shape each."""
    return [timing.ratios[peer].median for timing in timings(evidence, [peer], words)]


def rate(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Our TFLOP/s at the one shape that is meant."""
    found = timings(evidence, names, words)
    if not found:
        return NONE
    (timing,) = found
    return f"{timing.rate(timing.subject):.0f}"


def milliseconds(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Median time of the one shape that is meant."""
    found = timings(evidence, names, words)
    return digits(found[0].ms(names[0] if names else OURS)) if found else NONE


def way(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """How times were taken: sustained, flushed, or in how many shapes sustained."""
    ways = [timing.way for timing in timings(evidence, names, words)]
    if not ways:
        return NONE
    count = ways.count(SUSTAINED)
    mixed = f"{SUSTAINED} in {count} of {len(ways)}, else {FLUSHED}"
    return ways[0] if count in (0, len(ways)) else mixed


def over(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """How many times as fast as a peer we are: least to most."""
    return span(ratios(evidence, names[0], words))


def ratio(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The ratio to each peer at the one shape that is meant, in bold where the peer is faster."""
    found = [ratios(evidence, name, words) for name in names]
    if any(len(values) > 1 for values in found):
        raise ValueError("several shapes")
    return slashed([marked(values[0]) if values else NONE for values in found])


def mean(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The geometric mean of these ratios, in bold below 1; `{mean best fa3 fa4: ...}` is
    over the better of these peers in each shape.
    """
    first, *peers = names
    if first == "best":
        found = [timing.best for timing in timings(evidence, peers, words)]
        found = [value for value in found if value is not None]
    else:
        found = ratios(evidence, first, words)
    return marked(mean_of(found)) if found else NONE


def ahead(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """In how many shapes we are as fast as a peer or faster, of how many."""
    found = ratios(evidence, names[0], words)
    of = Standing.of(dict(enumerate(found))) if found else None
    return f"{of.ahead} of {of.rows}" if of else NONE


def behind(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """In how many shapes the peer is faster, of how many, and the least of all ratios."""
    found = ratios(evidence, names[0], words)
    slower = sum(value < 1 for value in found)
    return f"{slower} of {len(found)}, least {times(min(found))}" if found else NONE


def stands(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The mean, and in how many shapes the peer is faster."""
    found = behind(evidence, names, words)
    return found if found == NONE else f"{mean(evidence, names, words)}; below 1 in {found}"


def independent(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The mean over FA3 that an independent run gave, whatever the rows."""
    return INDEPENDENT[words[0], words[1]]


def commits(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The commits that these rows timed, with a + where the tree had changes."""
    rows = [timing.rows[timing.subject] for timing in timings(evidence, names, words)]
    found = {row.commit[:7] + "+" * row.commit.endswith("+") for row in rows}
    return ", ".join(f"`{commit}`" for commit in sorted(found)) or NONE


def keeps(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The share of our rate that another of our ways has: mean (least to most)."""
    found = [1 / value for value in ratios(evidence, names[0], words)]
    return f"{mean_of(found):.2f} ({span(found)})" if found else NONE


def share(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The same, of the one shape that is meant."""
    return span([1 / value for value in ratios(evidence, names[0], words)])


def skewed(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The rate of one set of lengths over another's, `{skewed zipf equal4096: fwd}`.

    Each beside the same dense shape of its run, mean over heads and masks.
    """
    kept: dict[tuple, dict[str, float]] = {}
    place = where(evidence)
    for entry in evidence.calls:
        shape, extra = entry.shape, entry.row.extra
        if entry.environment == place and shape.lengths in names and "of_dense" in extra:
            if entry.row.provider == OURS and set(words) <= words_of(shape):
                alike = dense_of(shape), shape.causal
                kept.setdefault(alike, {})[shape.lengths] = extra["of_dense"]
    found = [of[names[0]] / of[names[1]] for of in kept.values() if len(of) == 2]
    return times(mean_of(found)) if found else NONE


def energy(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Our joules a call over a peer's, where both were measured: mean (least to most)."""
    measured = evidence._replace(calls=[entry for entry in evidence.calls if entry.row.joules])
    pairs = [
        (one.rows[OURS].joules, one.rows[names[0]].joules)
        for one in timings(measured, [names[0]], words)
    ]
    of_peer = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return f"{mean_of(of_peer):.2f} ({span(of_peer)})" if of_peer else NONE


def environment(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The device, or a version without what is built in: `{environment torch}`."""
    found = where(evidence, words)
    return getattr(found, names[0]).split("+")[0].removesuffix(".0") if found else NONE


def card(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The GPU in a word: H200."""
    found = where(evidence, words)
    if found is None:
        return NONE
    known = CARDS.intersection(found.device.split())
    return known.pop() if known else found.device.removeprefix("NVIDIA ")


def digits(value: float) -> str:
    """Three significant digits, zeros at the end too."""
    return f"{value:#.3g}".removesuffix(".")


def figure(value: float) -> str:
    """Three significant digits, thousands in full."""
    return digits(value) if value < 1000 else f"{value:,.0f}"


def factor(value: float) -> str:
    """A ratio, with no more digits than it is good for."""
    return times(value) if value < 10 else digits(value)


def slashed(said: Sequence[str]) -> str:
    """Figures of one cell; one dash where there is none."""
    return NONE if {*said} == {NONE} else " / ".join(said)


def marked(value: float) -> str:
    """A ratio, in bold where the peer is the faster."""
    return f"**{times(value)}**" if value < 1 else times(value)


def span(values: Sequence[float]) -> str:
    """Least to most, one number where they read the same."""
    if not values:
        return NONE
    least, most = factor(min(values)), factor(max(values))
    return least if least == most else f"{least} to {most}"


ANSWERS = {
    "rate": rate,
    "ms": milliseconds,
    "way": way,
    "over": over,
    "ratio": ratio,
    "mean": mean,
    "ahead": ahead,
    "behind": behind,
    "stands": stands,
    "independent": independent,
    "commits": commits,
    "keeps": keeps,
    "share": share,
    "skewed": skewed,
    "energy": energy,
    "versions": versions,
    "environment": environment,
    "card": card,
}
