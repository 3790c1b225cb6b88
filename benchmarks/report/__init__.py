"""A report from rows: what they say, as one HTML page that needs nothing else, and as Markdown.

`figures.md` beside it is the docs' page of figures, with these rows in the place of ours.

Only rows speak: the same rows give the same page, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..bench.row import Row
from . import figures, sections, sources, tables
from .evidence import Evidence, collect
from .html_page import to_html
from .markdown import to_markdown
from .page import Page, plural

HTML, MARKDOWN, FIGURES = "index.html", "report.md", "figures.md"

__all__ = ["collect", "page_of", "to_html", "to_markdown", "write"]


def write(rows: Sequence[Row], out: str | Path) -> list[Path]:
    """Makes `index.html`, `report.md` and `figures.md` in a folder."""
    evidence = collect(rows)
    page = page_of(evidence)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    stated = figures.page(figures.DOCS, evidence)
    files = {HTML: to_html(page), MARKDOWN: to_markdown(page), FIGURES: stated}
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    (out / "_static").mkdir(exist_ok=True)  # where that page looks for its pictures
    for name, draw in figures.picture.PICTURES.items():
        (out / "_static" / name).write_text(draw(evidence), encoding="utf-8")
    return [out / name for name in files]


def page_of(evidence: Evidence) -> Page:
    """The report's sections; those that no row speaks of are left out."""
    memory, first = tables.memory(evidence), tables.first_calls(evidence)
    shown = [name for name, made in (("memory", memory), ("cold", first)) if made]
    found = [
        sections.standing(evidence),
        figures.section(evidence),
        sections.roofline(evidence),
        sections.speed(evidence),
        tables.features(evidence),
        tables.packed(evidence),
        tables.modifiers(evidence),
        memory,
        first,
        tables.errors(evidence),
        tables.others(evidence, shown),
        sources.environments(evidence),
        sources.reproduce(evidence),
    ]
    kept = [section for section in found if section is not None]
    return Page("tilewise, measured", _lead(evidence), sections.cards(evidence), kept)


def _lead(evidence: Evidence) -> list[str]:
    rows = evidence.rows
    days = sorted({row.date[:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    devices = ", ".join(dict.fromkeys(where.device for where in evidence.environments))
    counted = len(evidence.entries) + sum(map(len, evidence.others.values()))
    lead = [f"{plural(len(rows), 'row')} taken {when} on {devices}."]
    if older := len(rows) - counted:
        lead[0] += (
            f" {older:,} of them have a newer row of the same shape and provider in the same"
            " environment, and are left out."
        )
    return lead
