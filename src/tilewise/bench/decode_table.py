"""What `bench decode` prints: the lines of a case, and its figures at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .row import Row
from .table import spread_of
from .timer import Spread
from .ways import ratio_of

if TYPE_CHECKING:
    from .caches import Decode
    from .run import Outcome

AIMS = {"pages": 0.85, "queries": 1 / 1.1, "host": 1 / 0.8}  # of a GPU: pages of 16, 8 queries


class Figure(NamedTuple):
    """A ratio of ours, above 1 where we are the faster, and the least that it is to be."""

    what: str
    ratio: Spread
    aim: float | None = None


def lines_of(outcomes: Sequence[Outcome[Decode]], copies: int) -> list[str]:
    """A line a step; the last column is its time over ours of as many queries, on the same pages
    if it has any.
    """
    first = outcomes[0].shape
    size = f"{first.kv_bytes / 1e6:,.1f} MB of keys and values"
    lines = [f"\n{first}, {size}" + (f", {copies} caches in turns" if copies > 1 else "")]
    head = f"  {'':<12}{'queries':>7}{'page':>6}{'us':>9}{'p20-p80':>17}{'GB/s':>8}{'share':>7}"
    lines.append(f"{head}{'error':>9}{'bound':>9}{'host us':>9}  time / {outcomes[0].provider}")
    for outcome in outcomes:
        of = outcome.shape
        named = f"  {outcome.provider:<12}{of.seqlen_q:>7}{of.page_size or '-':>6}"
        if (row := outcome.row) is None:
            why = f"WRONG: {outcome.wrong}" if outcome.wrong else f"not here: {outcome.refused}"
            lines.append(f"{named}  {why}")
            continue
        own = beside(outcome, outcomes)
        lines.append(f"{named}{_numbers(row)}  {spread_of(ratio_of(own, row)) if own else ''}")
    return [line.rstrip() for line in lines]


def _numbers(row: Row) -> str:
    us, low, high = (ms * 1e3 for ms in (row.median_ms, row.p20_ms, row.p80_ms))
    host = row.extra.get("host_us")
    return (
        f"{_short(us):>9}{f'{_short(low)}-{_short(high)}':>17}{_short(row.extra['gb_per_s']):>8}"
        f"{row.extra['of_measured']:>7.2f}{row.max_error:>9.1g}{row.bound:>9.1g}"
        f"{'-' if host is None else _short(host):>9}"
    )


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def beside(outcome: Outcome[Decode], outcomes: Sequence[Outcome[Decode]]) -> Row | None:
    """Our row that a step is held against."""
    of, name = outcome.shape, outcomes[0].provider
    mine = [o for o in outcomes if o.provider == name and o.shape.seqlen_q == of.seqlen_q]
    same = [o for o in mine if o.shape.page_size == of.page_size]
    return next((o.row for o in (*same, *mine) if o.row is not None), None)


def summary(done: Sequence[Sequence[Outcome[Decode]]]) -> list[str]:
    """A line a figure, and how many rows there are."""
    lines = []
    for outcomes in done:
        for figure in figures_of(outcomes):
            what = f"{outcomes[0].shape.sizes}: {figure.what}"
            has_aim = figure.aim is not None and is_on_gpu(outcomes)
            aim = f"aim {figure.aim:.2f}" if has_aim else ""
            lines.append(f"{what:<60}{spread_of(figure.ratio):>22}  {aim}".rstrip())
    each = [outcome for outcomes in done for outcome in outcomes]
    wrong = sum(outcome.wrong is not None for outcome in each)
    return [*lines, f"{sum(o.row is not None for o in each)} rows timed, {wrong} wrong"]


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
            what = f"contiguous / page {of.page_size}, {_queries(of)}"
            yield Figure(what, ratio_of(row, other), aim)
        if of.seqlen_q > 1 and (other := mine.get(of._replace(seqlen_q=1))):
            aim = AIMS["queries"] if of.seqlen_q <= 8 else None
            yield Figure(f"1 query / {of.seqlen_q}, {_pages(of)}", ratio_of(row, other), aim)
    for outcome in outcomes:
        own, row = beside(outcome, outcomes), outcome.row
        if outcome.provider == name or own is None or row is None:
            continue
        what = f"{outcome.provider} / {name}, {_queries(outcome.shape)}, {_pages(outcome.shape)}"
        yield Figure(what, ratio_of(own, row))
        if host := row.extra.get("host_us"):
            ratio = host / own.extra["host_us"]
            aim = AIMS["host"] if outcome.provider == "sdpa" else None
            yield Figure(f"host: {what}", Spread(ratio, ratio, ratio), aim)


def _queries(of: Decode) -> str:
    return "1 query" if of.seqlen_q == 1 else f"{of.seqlen_q} queries"


def _pages(of: Decode) -> str:
    return f"page {of.page_size}" if of.page_size else "contiguous"
