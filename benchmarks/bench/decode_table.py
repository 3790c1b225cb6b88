"""What `bench decode` prints: the lines of a case, and its figures at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tilewise.explain.steps import BY_ROW

from .caches import is_cold
from .row import Row
from .standings import counted
from .table import aligned, spread_of, why_not
from .timer import Spread
from .ways import ratio_of

if TYPE_CHECKING:
    from tilewise.explain.steps import Decode

    from .run import Outcome

# Of a GPU: pages of 16, 8 queries, decodes and a chunk in one call, caches of 8 bits with a scale
# for each head and for each row
AIMS = {
    "pages": 0.85,
    "queries": 1 / 1.1,
    "mixed": 1 / 1.15,
    "host": 1 / 0.8,
    "head": 1 / 0.6,
    "row": 1 / 0.66,
}


class Figure(NamedTuple):
    """A ratio of ours, above 1 where we are the faster, and the least that it is to be."""

    what: str
    ratio: Spread
    aim: float | None = None


def lines_of(outcomes: Sequence[Outcome[Decode]], copies: int) -> list[str]:
    """A line a step; the last column is its time over ours of as many queries, on the same pages
    if it has any.
    """
    first = outcomes[0]
    size = f"{first.shape.kv_bytes / 1e6:,.1f} MB of keys and values"
    head = [
        "",
        "queries",
        "page",
        "cache",
        "us",
        "p20-p80",
        "GB/s",
        "share",
        "error",
        "bound",
        "host us",
    ]
    rows = [[*head, f"time / {first.provider}"]]
    for outcome in outcomes:
        of = outcome.shape
        named = [
            f"  {outcome.provider}",
            counts_of(of),
            str(of.page_size or "-"),
            of.cache or "-",
        ]
        if (row := outcome.row) is None:
            rows.append([*named, why_not(outcome)])
            continue
        own = beside(outcome, outcomes)
        rows.append([*named, *_numbers(row), spread_of(ratio_of(own, row)) if own else ""])
    warm = "" if is_cold(first.shape) else ", which the L2 cache holds"
    caches = f", rotating over {copies} caches{warm}" if copies > 1 else ""
    return [f"\n{first.shape}, {size}{caches}", *aligned(rows)]


def _numbers(row: Row) -> list[str]:
    us, low, high = (_short(ms * 1e3) for ms in (row.median_ms, row.p20_ms, row.p80_ms))
    host = row.extra.get("host_us")
    return [
        *(us, f"{low}-{high}", _short(row.extra["gb_per_s"]), f"{row.extra['of_measured']:.2f}"),
        *(f"{row.max_error:.1g}", f"{row.bound:.1g}", "-" if host is None else _short(host)),
    ]


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def beside(outcome: Outcome[Decode], outcomes: Sequence[Outcome[Decode]]) -> Row | None:
    """Our row that a step is held against."""
    of, name = outcome.shape, outcomes[0].provider
    counts = of.seqlen_q, of.chunk
    mine = [
        o for o in outcomes if o.provider == name and (o.shape.seqlen_q, o.shape.chunk) == counts
    ]
    same = [o for o in mine if o.shape.page_size == of.page_size]
    alike = [o for o in same if o.shape.cache == of.cache]
    return next((o.row for o in (*alike, *same, *mine) if o.row is not None), None)


def summary(done: Sequence[Sequence[Outcome[Decode]]]) -> list[str]:
    """A line a figure, and how many rows there are."""
    rows = [
        (
            f"{outcomes[0].shape.sizes}: {figure.what}",
            spread_of(figure.ratio),
            f"aim {figure.aim:.2f}" if figure.aim is not None and is_on_gpu(outcomes) else "",
        )
        for outcomes in done
        for figure in figures_of(outcomes)
    ]
    return [*aligned(rows), counted([outcome for outcomes in done for outcome in outcomes])]


def is_on_gpu(outcomes: Sequence[Outcome[Decode]]) -> bool:
    """Whether steps were replayed: on a CPU nothing is aimed at."""
    return any(o.row is not None and o.row.extra.get("cold") != "none" for o in outcomes)


def figures_of(outcomes: Sequence[Outcome[Decode]]) -> Iterator[Figure]:
    """Ours with pages beside ours without, of several queries beside one, and peers' beside it."""
    name = outcomes[0].provider
    mine = {o.shape: o.row for o in outcomes if o.provider == name and o.row is not None}
    for of, row in mine.items():
        if of.page_size and (other := mine.get(of._replace(page_size=0))):
            aim = AIMS["pages"] if of.page_size == 16 else None
            what = f"contiguous / {of.pages}, {_queries(of)}"
            yield Figure(what, ratio_of(row, other), aim)
        if of.cache and (other := mine.get(of._replace(cache=""))):
            aim = AIMS["row" if of.cache.endswith(BY_ROW) else "head"]
            what = f"{of.dtype} cache / {of.cache}, {_queries(of)}, {of._replace(cache='').pages}"
            yield Figure(what, ratio_of(row, other), aim)
        if min(of.seqlen_q, of.chunk) > 0:
            parts = [mine.get(of._replace(chunk=0)), mine.get(of._replace(seqlen_q=0))]
            timed = [part for part in parts if part is not None]
            if len(timed) == 2:
                larger = max(timed, key=lambda part: part.median_ms)
                what = f"larger part / both, {_queries(of)}, {of.pages}"
                yield Figure(what, ratio_of(row, larger), AIMS["mixed"])
        if of.seqlen_q > 1 and of.chunk < 0 and (other := mine.get(of._replace(seqlen_q=1))):
            aim = AIMS["queries"] if of.seqlen_q <= 8 else None
            yield Figure(f"1 query / {of.seqlen_q}, {of.pages}", ratio_of(row, other), aim)
    for outcome in outcomes:
        own, row = beside(outcome, outcomes), outcome.row
        if outcome.provider == name or own is None or row is None:
            continue
        what = f"{outcome.provider} / {name}, {_queries(outcome.shape)}, {outcome.shape.pages}"
        yield Figure(what, ratio_of(own, row))
        if host := row.extra.get("host_us"):
            ratio = host / own.extra["host_us"]
            aim = AIMS["host"] if outcome.provider == "sdpa" else None
            yield Figure(f"host: {what}", Spread(ratio, ratio, ratio), aim)


def counts_of(of: Decode) -> str:
    """The queries of a sequence, and those of the last, 1+2048."""
    if of.chunk < 0:
        return str(of.seqlen_q)
    times = f"{of.chunks} x " if of.chunks > 1 else ""
    return f"{of.seqlen_q}+{times}{of.chunk}"


def _queries(of: Decode) -> str:
    if of.chunk >= 0:
        return f"{counts_of(of)} queries"
    return "1 query" if of.seqlen_q == 1 else f"{of.seqlen_q} queries"
