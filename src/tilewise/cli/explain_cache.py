"""What `tilewise explain --cache` prints: the backend of a decoding step, its pieces and bytes."""

from __future__ import annotations

import click

from .explain_tables import (
    LAUNCH,
    common_record,
    launch_column,
    plain,
    roof_rows,
    show_answers,
    show_launches,
    verdict,
)
from .options import DTYPES
from .tables import table

TILES = LAUNCH.index("tiles")


def step_of(options: dict, page_size: int | None, features: tuple[str, ...]):
    """The step that the options ask for: its queries are `--seqlen`, 1 by default."""
    from ..explain.steps import decode

    if any(options[name] for name in features) or options["direction"] != "fwd":
        raise click.UsageError("--cache is a forward, and goes with no other feature here")
    if options["headdim_v"] not in (None, options["headdim"]):
        raise click.UsageError("--cache has one headdim here")
    heads = options["heads"], options["kv_heads"] or options["heads"], options["headdim"]
    if heads[0] % heads[1]:
        raise click.UsageError("--heads must be a multiple of --kv-heads")
    try:
        return decode(
            options["batch"],
            options["seqlen_k"] or 8192,
            heads=heads,
            lengths=options["lengths"] or "",
            queries=options["seqlen"] or 1,
            page_size=page_size or 0,
            dtype=DTYPES[options["dtype"]],
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def show(screen, explanation) -> None:
    """Tables: backends, launches, pieces and bytes."""
    step = explanation.shape
    queries = "1 query" if step.seqlen_q == 1 else f"{step.seqlen_q} queries"
    pages = f"pages of {step.page_size}" if step.page_size else "no pages"
    if not show_answers(screen, explanation, what=f"{step}, {queries}, {pages},"):
        return
    columns = [launch_column(one) for one in explanation.launches]
    for number, (column, one) in enumerate(zip(columns, explanation.launches)):
        beside = "all pieces" if number else f"{one.block_n} keys"
        column[0] = f"{one.block_m} rows (queries x heads) x {beside}"
        if one.is_persistent and explanation.how:
            column[TILES], column[TILES + 1] = f"{column[TILES]}, counted by pieces", "one an SM"
    show_launches(screen, explanation, columns=columns)
    screen.print(table(["pieces", ""], piece_rows(explanation)))
    screen.print(table(["work", ""], work_rows(explanation)))
    screen.print(verdict(explanation, f"{plain(explanation.work.least_ms * 1e3)} us"))


def piece_rows(explanation) -> list[tuple[str, str]]:
    """How keys are cut, and where what is known of the pieces lies."""
    cut = explanation.pieces
    total = f"{cut.of_longest} of the longest sequence, {cut.total:,} in the batch"
    if not explanation.how:
        return [("keys are summed", "by each tile of queries in turn, as in the training forward")]
    rows = [("keys are summed", f"in pieces: {explanation.how}")]
    rows.append(("split_size", f"{cut.split_size:,} keys, part of the arithmetic"))
    rows.append(("pieces", total))
    if not explanation.launches:
        return [*rows, ("slots", "none: folded as they come")]
    if not cut.slots:
        return [*rows, ("slots", "none: a program walks all pieces of its rows")]
    size = f"{cut.slots:,} of {cut.slot_bytes} bytes, {cut.workspace / 1e6:,.1f} MB"
    if not cut.are_all_used:
        return [*rows, ("slots", f"{size}, used by tiles that several programs share")]
    where = f"for {cut.room} pieces a sequence, as the cache has room for"
    return [*rows, ("slots", f"{size}, {where}"), ("programs without a piece", f"{cut.idle:,}")]


def work_rows(explanation) -> list[tuple[str, str]]:
    """Bytes, FLOPs and the roof."""
    step, cut, work = explanation.shape, explanation.pieces, explanation.work
    states = cut.state_bytes(step)
    share = f"{states / 1e6:,.2f} MB, {100 * states / step.kv_bytes:.1f} % of those"
    between = ("of states between the launches", share)
    if cut.slots and not cut.are_all_used:
        most = 2 * cut.total * cut.slot_bytes * step.seqlen_q * step.nheads
        between = ("of states of shared tiles", f"at most {most / 1e6:,.2f} MB")
    return [
        ("bytes of keys and values", f"{step.kv_bytes / 1e6:,.1f} MB"),
        between,
        ("of queries, out, LSE and table", f"{step.other_bytes / 1e6:,.2f} MB"),
        ("FLOPs", f"{work.flops / 1e9:,.3g} G, {plain(work.intensity)} a byte"),
        *roof_rows(work.roof),
    ]


def points_of(explanation) -> dict[str, float]:
    """The points of its picture."""
    return {"this step": explanation.work.intensity}


def as_record(explanation) -> dict:
    """The explanation as JSON takes it."""
    step, cut, work = explanation.shape, explanation.pieces, explanation.work
    moved = dict(kv=step.kv_bytes, others=step.other_bytes, partials=cut.state_bytes(step))
    return {
        **common_record(explanation),
        "launches": [one.record for one in explanation.launches],
        "in_pieces": explanation.how,
        "pieces": {**cut._asdict(), "workspace": cut.workspace},
        "moved": {**moved, "total": work.moved.once},
        "roof": work.roof._asdict(),
        "intensity": work.intensity,
        "least_ms": work.least_ms,
    }
