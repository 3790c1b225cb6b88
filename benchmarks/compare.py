"""`python -m benchmarks compare A B`: what became slower or larger from A to B, beyond noise."""

from __future__ import annotations

import json
from collections import Counter

import click

from tilewise.cli.options import NameList
from tilewise.cli.tables import FAIL, OK, STYLES, console, table

from .bench.standings import mean_of
from .changes import Change, Choice, Comparison, changes_between, rule
from .options import fail_if
from .sides import Side, read

NUMBERS = ("A", "B", "change")
MARKS = {"regressed": FAIL, "improved": OK}  # a colour beside the word


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--threshold", type=click.FloatRange(0), default=3.0, show_default=True, help="In %.")
@click.option(
    "--provider", "providers", type=NameList(), help="Whose rows; all that begin with tilewise."
)
@click.option("--peer", default="", help="Compare beside this one alone.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def compare(a, b, threshold, providers, peer, as_json) -> None:
    """What regressed from A to B, beyond noise: rows that `bench --save` wrote.

    A and B are FILE, or FILE@WHICH for the rows of one commit or run in it, by the beginning of its
    name: results.jsonl@27d2d19. A commit of a changed tree ends in '+', and so does its name here.
    The newest row of a shape and provider on one device counts.

    Compared is the time of a peer over ours, the median of ratios taken round by round, where both
    sides have that peer in the same run: fa3, else cudnn, fa4, or the first by name. Where they
    have none it is plain milliseconds, which are only comparable on one machine. Times are the
    sustained ones where both sides have them, else the flushed ones. Peaks of memory are compared
    where both rows have one. Rows with neither are counted.

    A change counts where the p20-p80 intervals of the rounds do not overlap (else it is noise) and
    the medians differ by more than --threshold (else it is small); of fewer than 3 rounds none
    does. Memory is one number, without noise. The change is of our time (beside the peer's) or
    memory: + is worse.

    Exit codes: 0 nothing regressed, 1 something did, 2 a file that cannot be read, or nothing that
    both sides have.
    """
    try:
        sides = read(a), read(b)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    choice = Choice(threshold / 100, providers or (), peer)
    found = changes_between(*sides, choice)
    if not found.changes:
        raise click.UsageError(nothing(found, sides, choice.providers))
    if as_json:
        click.echo(json.dumps(as_record(found, sides, rule(choice.threshold)), indent=1))
    else:
        show(console(), found, sides, rule(choice.threshold))
    fail_if(found.has_regressed)


def nothing(found: Comparison, sides: tuple[Side, Side], providers: tuple[str, ...]) -> str:
    """Why nothing can be compared, and what there is on each side."""
    why = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
    whose = ", ".join(providers) or "providers that begin with tilewise"
    lines = [f"nothing to compare of {whose}: {why or 'neither side has a row'}"]
    for name, side in zip("AB", sides):
        has = {row.provider: None for row in side.rows}, {row.device: None for row in side.rows}
        lines.append(f"{name} has {', '.join(has[0])}; timed on {', '.join(has[1])}")
    return "\n".join(lines)


def show(screen, found: Comparison, sides: tuple[Side, Side], rule: str) -> None:
    """A table for each measure, provider and peer, the worst change first; counts at the end."""
    for name, side in zip("AB", sides):
        screen.print(f"{name}: {described(side)}", soft_wrap=True)
    for title, changes in grouped(found.changes).items():
        screen.print(f"\n{title}")
        changes = sorted(changes, key=lambda change: -change.cost)
        common, shapes = shortened(changes)
        rows = [(name, *figures(x), percent(x.cost), x.verdict) for name, x in zip(shapes, changes)]
        made = table([common, *NUMBERS, ""], rows, numbers=NUMBERS)
        for line, change in zip(made.rows, changes):
            line.style = STYLES.get(MARKS.get(change.verdict, ""))
        screen.print(made)
        mean = mean_of(change.cost for change in changes)
        screen.print(f"{percent(mean)} in the geometric mean of {len(changes)}.")
    screen.print(f"\n{rule}")
    for note in found.notes:
        screen.print(note)
    screen.print(counted(found))


def grouped(changes: list[Change]) -> dict[str, list[Change]]:
    """Changes by what a table says in its title."""
    titles = {
        "ratio": "{0.provider} and {0.peer}, interleaved: time of {0.peer} / time of ours, {0.way}",
        "time": "{0.provider}, plain milliseconds, {0.way}",
        "memory": "{0.provider}, peak memory in MiB",
    }
    tables: dict[str, list[Change]] = {}
    for change in changes:
        tables.setdefault(titles[change.measure].format(change), []).append(change)
    return tables


def figures(change: Change) -> list[str]:
    """Both sides: a median with its p20-p80, or one number."""
    if change.measure == "memory":
        return [f"{side.median / 2**20:,.1f}" for side in (change.a, change.b)]
    return [
        f"{three(side.median)} ({three(side.p20)}-{three(side.p80)})"
        for side in (change.a, change.b)
    ]


def three(value: float) -> str:
    """Three digits, zeros too: 1.00."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def shortened(changes: list[Change]) -> tuple[str, list[str]]:
    """What all shapes begin and end with, for the head of the column, and the rest of each."""
    words = [change.shape.split(" ") for change in changes]
    labels = [f" ({change.label})" if change.label else "" for change in changes]
    begin = end = 0
    if len({change.shape for change in changes}) > 1:
        least = min(map(len, words)) - 1  # a word stays
        begin = min(alike(words), least)
        end = min(alike([each[::-1] for each in words]), least - begin)
    head, tail = words[0][:begin], words[0][len(words[0]) - end :]
    common = " ".join([*head, "...", *tail]) if begin + end else "shape"
    rest = (" ".join(each[begin : len(each) - end]) for each in words)
    return common, [shape + label for shape, label in zip(rest, labels)]


def alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    columns = list(zip(*rows))
    return next((n for n, words in enumerate(columns) if len(set(words)) > 1), len(columns))


def percent(cost: float) -> str:
    """A factor as a change: 1.05 is +5.0 %."""
    return f"{100 * (cost - 1):+.1f} %"


def described(side: Side) -> str:
    """A side's name, its commits, dates and devices."""
    commits, devices, days = (
        list(dict.fromkeys(of(row) for row in side.rows))
        for of in (lambda row: row.commit, lambda row: row.device, lambda row: row.date[:10])
    )
    when = min(days) if len(days) == 1 else f"{min(days)} to {max(days)}"
    which = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return f"{side.source}: {len(side.rows)} rows, {which}, {when}, {', '.join(devices)}"


def counted(found: Comparison) -> str:
    """How many of which verdict, and what is left out."""
    verdicts = Counter(change.verdict for change in found.changes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    line = f"{len(found.changes)} compared: {said}."
    if found.left_out:
        out = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
        line += f" Left out: {out}."
    return line


def as_record(found: Comparison, sides: tuple[Side, Side], rule: str) -> dict:
    """The comparison as JSON takes it."""
    changes = [
        {**x._asdict(), "a": x.a._asdict(), "b": x.b._asdict(), "cost": x.cost}
        for x in found.changes
    ]
    asked = {name: side.source for name, side in zip("ab", sides)}
    rest = dict(left_out=found.left_out, notes=found.notes, regressed=found.has_regressed)
    return {**asked, "rule": rule, **rest, "changes": changes}
