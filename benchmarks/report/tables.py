"""The report's second half: score features, packed sequences, modifiers, memory, first calls,
errors, and whatever other suites there are rows of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.explain.shapes import Shape

from ..bench.row import Row
from ..bench.standings import Standing, mean_of
from . import charts
from .evidence import Entry, Evidence, Timing, environment_of, is_ours, place_of
from .page import BEHIND, Chart, Charts, Heading, Section, Table, number, plural, ratio_cell, times
from .sections import SHORT, WORDS, figures

MIB = 1 << 20


def features(evidence: Evidence) -> Section | None:
    """Window, softcap, ALiBi and sinks: every shape."""
    tables: list = [
        figures(f"Score features: {where}", timings)
        for where, timings in evidence.by_environment(evidence.timings, "features").items()
    ]
    return Section("Score features", tables) if tables else None


def packed(evidence: Evidence) -> Section | None:
    """Packed sequences: by set of lengths, then every shape."""
    blocks: list = [
        "Ratios are geometric means over heads and masks, with their range. “of dense” is how much"
        " of its own FLOP/s on dense batches the packed call keeps."
    ]
    for environment, timings in evidence.by_environment(evidence.timings, "packed").items():
        blocks.append(Heading(str(environment)))
        blocks.append(_by_lengths(str(environment), timings))
        blocks.append(Charts(_strips_by_lengths(timings)))
        blocks.append(figures(f"Every packed shape: {environment}", timings, folded=True))
    return Section("Packed sequences", blocks) if len(blocks) > 1 else None


def _sets(timings: Iterable[Timing]) -> dict[tuple[str, str], list[Timing]]:
    found: dict[tuple[str, str], list[Timing]] = {}
    for timing in timings:
        found.setdefault((timing.shape.direction, timing.shape.lengths), []).append(timing)
    return found


def _by_lengths(where: str, timings: Sequence[Timing]) -> Table:
    peers = sorted({name for timing in timings for name in timing.ratios}, key=place_of)
    columns = ["direction", "lengths", "shapes", *(f"/ {n}" for n in peers), "range", "of dense"]
    rows = []
    for (direction, lengths), members in _sets(timings).items():
        of_peer = {
            name: {t.shape: t.ratios[name].median for t in members if name in t.ratios}
            for name in peers
        }
        means = [Standing.of(of).mean if of else None for of in of_peer.values()]
        ranges = [Standing.of(of) for of in of_peer.values() if of]
        kept = [t.ours.extra["of_dense"] for t in members if t.ours and "of_dense" in t.ours.extra]
        dense = mean_of(kept) if kept else None
        rows.append(
            [
                *(WORDS[direction], lengths, str(len(members))),
                *(ratio_cell(value) for value in means),
                ", ".join(f"{times(of.least)} to {times(of.most)}" for of in ranges) or "–",
                "–" if dense is None else times(dense),
            ]
        )
    caption = f"Time of a peer over ours, by set of lengths: {where}"
    return Table(caption, columns, rows, frozenset(columns[2:]))


def _strips_by_lengths(timings: Sequence[Timing]) -> list[Chart]:
    made = []
    for direction in dict.fromkeys(timing.shape.direction for timing in timings):
        mine = [timing for timing in timings if timing.shape.direction == direction]
        for peer in sorted({name for timing in mine for name in timing.ratios}, key=place_of):
            rows = [
                charts.Strip(
                    lengths,
                    [(t.ratios[peer].median, str(t.shape)) for t in of if peer in t.ratios],
                    peer,
                )
                for (_, lengths), of in _sets(mine).items()
                if any(peer in t.ratios for t in of)
            ]
            title = f"{WORDS[direction]}, beside {peer}"
            words = f"Packed sequences, {title}: time of {peer} over ours by set of lengths"
            svg = charts.strips(rows, words, f"time of {peer} / ours")
            made.append(Chart(title, svg, words))
    return made


def modifiers(evidence: Evidence) -> Section | None:
    """Masks, score functions, dropout and a bias: our rate over that of each baseline."""
    mine = [
        entry
        for entry in evidence.entries
        if is_ours(entry.row.provider) and entry.row.extra.get("rate_over")
    ]
    if not mine:
        return None
    lanes = list(dict.fromkeys(lane for e in mine for lane in e.row.extra["rate_over"]))
    columns = ["case", "direction", "shape", "TFLOP/s", *(f"/ {lane}" for lane in lanes)]
    tables: list = [
        "Each figure is our rate over that of a baseline in the same interleaved rounds: flex is"
        " compiled FlexAttention with the same predicate or score function, packed our own packed"
        " sequences of the same lengths, without our own call without the modifier: there less"
        " than 1 is the modifier's price."
    ]
    for environment, entries in evidence.by_environment(mine).items():
        rows = [
            [
                str(entry.row.extra.get("modifier", entry.shape.modifier)),
                WORDS[entry.shape.direction],
                f"{entry.shape.sizes} H{entry.shape.nheads} D{entry.shape.headdim}",
                number(entry.row.tflops),
                *(_over(entry, lane) for lane in lanes),
            ]
            for entry in entries
        ]
        caption = f"Our rate over another's: {environment}"
        tables.append(Table(caption, columns, rows, frozenset(columns[3:])))
    return Section("Masks, score functions, dropout, bias", tables)


def _over(entry: Entry, lane: str) -> Any:
    value = entry.row.extra["rate_over"].get(lane)
    is_peer = lane not in ("without", "packed")
    return ratio_cell(value) if is_peer else ("–" if value is None else times(value))


def memory(evidence: Evidence) -> Section | None:
    """Peak memory over length, where rows of `memory` say it in bytes."""
    rows = [row for row in evidence.others.get("memory", []) if _bytes_in(row) is not None]
    if not rows:
        return None
    blocks: list = []
    for environment, mine in evidence.by_environment(rows).items():
        directions = dict.fromkeys(str(row.shape.get("direction", "")) for row in mine)
        found = [_memory_of(mine, environment, direction) for direction in directions]
        if drawn := [chart for chart, _ in found if chart is not None]:
            blocks.append(Charts(drawn))
        blocks += [table for _, table in found]
    return Section("Memory", blocks)


def _memory_of(rows: Sequence[Row], environment, direction: str) -> tuple[Chart | None, Table]:
    """The chart and the table of one direction; of one length there is no chart."""
    of = [row for row in rows if str(row.shape.get("direction", "")) == direction]
    table: dict[int, dict[str, float]] = {}
    for row in sorted(of, key=lambda row: row.date):
        size = int(row.shape.get("seqlen_k", row.shape.get("seqlen_q", 0)))
        table.setdefault(size, {})[row.provider] = (_bytes_in(row) or 0.0) / MIB
    names = sorted({row.provider for row in of}, key=place_of)
    what = WORDS.get(direction, direction)
    words = f"Peak memory beside the inputs over length: {what}, {environment}"
    series = [
        charts.Series(name, [(s, at[name]) for s, at in sorted(table.items()) if name in at])
        for name in names
    ]
    chart = None
    if len(table) > 1:
        svg = charts.lines(series, "MiB", words, log=True)
        chart = Chart(what, svg, words, charts.legend(names))
    columns = ["sequence length", *names]
    body = [
        [str(size), *(number(at.get(name)) for name in names)] for size, at in sorted(table.items())
    ]
    return chart, Table(f"{words}, MiB", columns, body, frozenset(columns))


def _bytes_in(row: Row) -> float | None:
    for name, value in row.extra.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name in ("peak_bytes", "bytes", "memory_bytes", "peak"):
            return float(value)
    return None


def first_calls(evidence: Evidence) -> Section | None:
    """The first call of a process, with an empty and with a warm kernel cache."""
    newest: dict[tuple, Row] = {}
    for row in sorted(evidence.others.get("cold", []), key=lambda row: row.date):
        key = environment_of(row), _named(row.shape), row.provider, str(row.extra.get("cache"))
        newest[key] = row
    if not newest:
        return None
    rows = [
        [
            str(environment_of(row)),
            WORDS.get(str(row.shape.get("direction")), "call"),
            str(row.extra.get("cache", "–")),
            f"{row.median_ms / 1e3:.2f}",
            f"{min(row.rounds_ms) / 1e3:.2f} to {max(row.rounds_ms) / 1e3:.2f}",
        ]
        for row in newest.values()
    ]
    columns = ["environment", "call", "kernel cache", "seconds", "range"]
    caption = "The first call of a process, importing tilewise and Triton included"
    return Section("First call", [Table(caption, columns, rows, frozenset(columns[3:]))])


def errors(evidence: Evidence) -> Section | None:
    """Errors against fp64 as a share of what the budget allows; 1 would be the bound."""
    checked = [e for e in evidence.entries if e.row.max_error and e.row.bound]
    if not checked:
        return None
    blocks: list = [
        "Each provider's result is held to fp64 at the shape before it is timed: the largest error"
        " over the output, or over the gradients. Ours must keep to a bound, from the error that"
        " a plain implementation in the same dtype makes; a row that does not has no time."
    ]
    pictures, rows = [], []
    for environment, mine in evidence.by_environment(checked).items():
        by: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in mine:
            key = entry.shape.direction, entry.shape.dtype, entry.row.provider
            by.setdefault(key, []).append(entry)
        for (direction, dtype, name), of in sorted(by.items(), key=lambda x: _order(*x[0])):
            worst = max(of, key=_share)
            size = f"{max(e.row.max_error or 0.0 for e in of):.1e}"
            what = f"{WORDS[direction]}, {SHORT.get(dtype, dtype)}"
            share = f"{_share(worst):.2f}" + (f" {BEHIND}" if _share(worst) > 1 else "")
            rows.append([str(environment), what, name, str(len(of)), size, share, str(worst.shape)])
        ours = [key for key in by if is_ours(key[2])]
        strips = [
            charts.Strip(
                f"{key[0]}, {SHORT.get(key[1], key[1])}",
                [(_share(e), str(e.shape)) for e in by[key]],
                "tilewise",
            )
            for key in sorted(ours, key=lambda key: _order(*key))
            if key[2] == "tilewise"
        ]
        if strips:
            words = f"Our error over its bound, {environment}; 1 is the bound"
            svg = charts.strips(strips, words, "error / bound", is_limit=True)
            pictures.append(Chart(str(environment), svg, words))
    columns = ["environment", "what", "provider", "rows", "largest error", "most of bound", "at"]
    caption = "Largest errors, and the largest share of a bound"
    table = Table(caption, columns, rows, frozenset(columns[3:6]))
    return Section("Errors beside bounds", [*blocks, Charts(pictures), table])


def _share(entry: Entry) -> float:
    return (entry.row.max_error or 0.0) / (entry.row.bound or 1.0)


def _order(direction: str, dtype: str, name: str) -> tuple:
    return list(WORDS).index(direction), dtype, place_of(name)


def others(evidence: Evidence, shown: Iterable[str]) -> Section | None:
    """Suites without a section of their own: every row, as it is."""
    blocks: list = []
    for suite in sorted(set(evidence.others) - set(shown)):
        rows = evidence.others[suite]
        keys = list(dict.fromkeys(key for row in rows for key in row.extra))
        columns = ["shape", "provider", "ms", "TFLOP/s", *keys, "device", "date"]
        body = [
            [
                _named(row.shape),
                row.provider,
                number(row.median_ms) if row.median_ms else "–",
                number(row.tflops) if row.tflops else "–",
                *(_shown(row.extra.get(key)) for key in keys),
                *(row.device, row.date[:10]),
            ]
            for row in rows
        ]
        blocks.append(Heading(suite))
        caption = f"{suite}: {plural(len(rows), 'row')}"
        numbers = frozenset(("ms", "TFLOP/s"))
        blocks.append(Table(caption, columns, body, numbers, len(rows) > 24))
    return Section("Other suites", blocks) if blocks else None


def _named(shape: dict) -> str:
    """A shape in words: as attention calls are named, or each field with its value."""
    try:
        return str(Shape(**shape))
    except TypeError:
        return ", ".join(f"{name} {value}" for name, value in shape.items()) or "–"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(x)}" for name, x in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return "–" if value is None else str(value)
