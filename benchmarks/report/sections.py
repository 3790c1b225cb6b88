"""The report's first half: where it stands, the roofline, speed against length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilewise.explain.cards import Roof, card_named
from tilewise.explain.shapes import Shape

from ..bench.standings import BEST_OF, Standing
from ..bench.ways import FLUSHED, SUSTAINED
from ..roofline import HALVES, bytes_of
from . import charts
from .evidence import (
    BEST,
    OURS,
    Entry,
    Environment,
    Evidence,
    Timing,
    is_ours,
    place_of,
    ratios_by_peer,
    set_of,
)
from .page import (
    BEHIND,
    Card,
    Cell,
    Chart,
    Charts,
    Heading,
    Section,
    Table,
    length,
    number,
    plural,
    ratio_cell,
    times,
)

WORDS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
SHORT = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
}
RULE = (
    f"A figure is the time of a peer over our time, from interleaved rounds of one run: above 1 we"
    f" are the faster; {BEHIND} marks where we are not. Times are {SUSTAINED}, of calls back to"
    f" back, where rows have such, else {FLUSHED}, with pauses between."
)


class Group(NamedTuple):
    """What rows of one line have in common."""

    environment: Environment
    subject: str  # which of ours
    kind: str
    dtype: str
    direction: str

    def __str__(self) -> str:
        of = "" if self.subject == OURS else f"{self.subject.removeprefix(f'{OURS}:')}, "
        return f"{of}{self.kind}, {WORDS[self.direction]}, {SHORT.get(self.dtype, self.dtype)}"


def groups(timings: Iterable[Timing]) -> dict[Group, list[Timing]]:
    """Timings with a row to compare with, each in its group."""
    found: dict[Group, list[Timing]] = {}
    for timing in timings:
        if timing.ratios:
            shape = timing.shape
            where = timing.environment, timing.subject
            key = Group(*where, set_of(shape), shape.dtype, shape.direction)
            found.setdefault(key, []).append(timing)
    return found


def standing(evidence: Evidence) -> Section:
    """Ratios to each peer: means, ranges, how many rows are 1 or more."""
    blocks: list = [
        f"{RULE} Means are geometric. “{BEST}” is the fastest of {', '.join(BEST_OF)} at each"
        " shape, of those that ran."
    ]
    for environment, taken in evidence.by_environment(evidence.timings).items():
        mine, rows, pictures = groups(taken), [], []
        if not mine:
            continue
        for key in sorted(mine, key=lambda key: key.subject):
            what, timings = str(key), mine[key]
            ratios = ratios_by_peer(timings)
            rows += [_line(what, name, Standing.of(of)) for name, of in ratios.items()]
            pictures.append(_strip(what, ratios))
        columns = ["what", "peer", "mean", "least", "most", "rows ≥ 1", "least at"]
        numbers = frozenset(columns[2:6])
        caption = f"Time of a peer over ours: {environment}"
        blocks.append(Heading(str(environment)))
        blocks.append(Table(caption, columns, rows, numbers))
        blocks.append(Charts(pictures))
    if len(blocks) == 1:
        blocks.append("No run has rows of a peer beside ours.")
    return Section("Where it stands", blocks)


def _line(what: str, name: str, of: Standing) -> list:
    ahead = Cell(f"{of.ahead} of {of.rows}", "" if of.ahead == of.rows else "behind")
    return [
        what,
        name,
        ratio_cell(of.mean),
        ratio_cell(of.least),
        ratio_cell(of.most),
        ahead,
        str(of.worst) if of.least < 1 else "",
    ]


def _strip(what: str, ratios: dict[str, dict[Shape, float]]) -> Chart:
    rows = [
        charts.Strip(name, [(value, str(shape)) for shape, value in of.items()])
        for name, of in ratios.items()
    ]
    words = f"{what}: time of each peer over ours, a dot a shape; the bar is the geometric mean"
    return Chart(what, charts.strips(rows, words, "time of a peer / ours"), words)


def cards(evidence: Evidence) -> list[Card]:
    """The first environment's means against its nearest peers, for the page's head."""
    made = []
    for (_, subject, kind, dtype, direction), timings in _first(evidence).items():
        if kind not in ("dense", "packed") or subject != OURS:
            continue
        ratios = ratios_by_peer(timings)
        peers = [name for name in ratios if not is_ours(name) and name != BEST]
        for name in peers[:2]:
            of = Standing.of(ratios[name])
            label = f"{kind} {WORDS[direction]} beside {name}"
            range_of = f"{times(of.least)} to {times(of.most)}"
            note = f"{of.ahead} of {of.rows} rows ≥ 1, {range_of}, {SHORT.get(dtype, dtype)}"
            made.append(Card(f"{times(of.mean)}×", label, note, "behind" if of.mean < 1 else ""))
    return made[:8]


def _first(evidence: Evidence) -> dict[Group, list[Timing]]:
    found = map(groups, evidence.by_environment(evidence.timings).values())
    return next(filter(None, found), {})


def roof_of(device: str) -> Roof | None:
    """What the maker of a device states, None for one that is not listed."""
    card = card_named(device)
    return None if card is None else Roof(card.tflops_16, card.bandwidth, "datasheet")


def roofline(evidence: Evidence) -> Section:
    """Every row that counts, by FLOPs a byte; a chart a device."""
    blocks: list = [
        "Both axes are logarithmic. FLOPs and bytes are by formula: the matmuls over the pairs that"
        " a mask keeps, and the least bytes, each tensor read or written once. Under the slope"
        " memory is the limit, under the flat roof the matmuls are. A roof is drawn where the"
        " maker's data sheet states the peak of dense 16-bit matmuls."
    ]
    devices: dict[str, list[Entry]] = {}
    for environment, mine in evidence.by_environment(evidence.entries).items():
        devices.setdefault(environment.device, []).extend(mine)
    rows = []
    for device, entries in devices.items():
        blocks.append(Charts([_roofline_of(device, entries)]))
        rows += _shares(device, entries)
    if rows:
        columns = ["device", "direction", "provider", "best TFLOP/s", "of the peak", "at"]
        caption = "The best 16-bit row of each provider, and how much of the peak it is"
        blocks.append(Table(caption, columns, rows, frozenset(columns[3:5])))
    return Section("Roofline", blocks if devices else ["There are no rows of attention calls."])


def _roofline_of(device: str, entries: Sequence[Entry]) -> Chart:
    peak = roof_of(device)
    points = [
        charts.Point(
            entry.row.provider,
            entry.shape.direction,
            entry.shape.flops / bytes_of(entry.shape),
            entry.tflops,
            f"{entry.row.provider}, {entry.shape}: {number(entry.tflops)} TFLOP/s",
        )
        for entry in entries
        if entry.tflops > 0
    ]
    roofless = "" if peak else "; its peaks are not listed, so there is no roof"
    title = f"{device}: {plural(len(points), 'row')}{roofless}"
    names = sorted({point.provider for point in points}, key=place_of)
    directions = [d for d in WORDS if any(point.direction == d for point in points)]
    words = f"Rate of every row over its FLOPs a byte, {device}"
    wide, narrow = (charts.roofline(points, peak, words, small) for small in (False, True))
    return Chart(title, wide, words, charts.roofline_legend(names, directions), narrow)


def _shares(device: str, entries: Sequence[Entry]) -> list[list]:
    peak = roof_of(device)
    halves = [entry for entry in entries if entry.shape.dtype in HALVES and entry.tflops > 0]
    rising = sorted(halves, key=lambda entry: entry.tflops)
    best = {(entry.shape.direction, entry.row.provider): entry for entry in rising}
    order = sorted(best, key=lambda key: (list(WORDS).index(key[0]), place_of(key[1])))
    if peak is None:
        return []
    return [
        [
            *(device, WORDS[key[0]], key[1], number(best[key].tflops)),
            f"{best[key].tflops / peak.tflops:.0%}",
            str(best[key].shape),
        ]
        for key in order
    ]


def speed(evidence: Evidence) -> Section:
    """A small chart for each head size, mask and direction, and all its figures in a table."""
    blocks: list = []
    for environment, timings in evidence.by_environment(evidence.timings, "dense").items():
        for direction in WORDS:
            if mine := [timing for timing in timings if timing.shape.direction == direction]:
                title = f"{WORDS[direction].capitalize()}: {environment}"
                pictures = _curves(mine)
                blocks.append(Heading(title))
                blocks += [Charts(pictures)] if pictures else []
                blocks.append(figures(title, mine, folded=bool(pictures)))
    return Section("Speed against length", blocks or ["There are no rows of dense shapes."])


def _curves(timings: Sequence[Timing]) -> list[Chart]:
    families: dict[tuple, list[Timing]] = {}
    for timing in timings:
        families.setdefault((timing.subject, _family(timing.shape)), []).append(timing)
    made = []
    for members in families.values():
        if len({timing.shape.seqlen_q for timing in members}) < 2:
            continue
        points: dict[str, dict[int, float]] = {}
        for timing in members:
            for name in timing.rows:
                points.setdefault(name, {})[timing.shape.seqlen_q] = timing.rate(name)
        series = [
            charts.Series(name, sorted(points[name].items()))
            for name in sorted(points, key=place_of)
        ]
        shape = members[0].shape
        mask = "causal" if shape.causal else "full"
        heads = f"H{shape.nheads}" + (
            f":{shape.nheads_k}" if shape.nheads_k != shape.nheads else ""
        )
        title = f"D{shape.headdim}, {mask}, {heads}, {SHORT.get(shape.dtype, shape.dtype)}"
        words = f"{WORDS[shape.direction]}, {title}: TFLOP/s of {', '.join(points)} over length"
        svg = charts.lines(series, "TFLOP/s", words)
        made.append(Chart(title, svg, words, charts.legend([one.name for one in series])))
    return made


def _family(shape: Shape) -> Shape:
    """What all lengths of one curve share."""
    return shape._replace(batch=0, seqlen_q=0, seqlen_k=0)


def figures(caption: str, timings: Sequence[Timing], folded: bool = False) -> Table:
    """TFLOP/s of every provider, our error beside its bound, and the ratios; of timings with
    sustained times also the ratios of the flushed ones.
    """
    peers = sorted({name for t in timings for name in t.ratios}, key=place_of)
    beside = peers if any(timing.way == SUSTAINED for timing in timings) else []
    columns = ["shape", "ms", "TFLOP/s", *(f"{name} TFLOP/s" for name in peers)]
    columns += [f"/ {name}" for name in peers] + [f"/ {name}, {FLUSHED}" for name in beside]
    columns += ["error", "bound"]
    rows = []
    for timing in timings:
        row, ratios = timing.ours, timing.ratios
        if row is None:
            continue
        theirs = [timing.rate(name) if name in timing.rows else None for name in peers]
        flushed = timing.flushed.ratios if beside else {}
        medians = [ratios[name].median if name in ratios else None for name in peers]
        medians += [flushed[name].median if name in flushed else None for name in beside]
        name = "" if timing.subject == "tilewise" else f"{timing.subject}: "
        errors = (row.max_error, row.bound)
        rows.append(
            [
                f"{name}{_words_of(timing.shape)}",
                number(timing.ms(timing.subject)),
                number(timing.rate(timing.subject)),
                *(number(value) for value in theirs),
                *(ratio_cell(value) for value in medians),
                *("–" if value is None else f"{value:.1e}" for value in errors),
            ]
        )
    return Table(caption, columns, rows, frozenset(columns[1:]), folded)


def _words_of(shape: Shape) -> str:
    words = str(shape).split(" ", 1)[1]
    size = f"S{shape.seqlen_q}"
    return words.replace(size, f"S{length(shape.seqlen_q)}", 1)
