"""A page as one HTML file: style and charts lie in it, no script, and nothing is asked for."""

from __future__ import annotations

import html
from pathlib import Path

from .page import Card, Cell, Chart, Charts, Code, Heading, Page, Section, Table

STYLE = Path(__file__).with_name("style.css")


def to_html(page: Page) -> str:
    """The whole document."""
    links = "".join(f'<li><a href="#{s.anchor}">{_text(s.title)}</a></li>' for s in page.sections)
    lead = "".join(f"<p>{_text(words)}</p>" for words in page.lead)
    cards = "".join(_card(card) for card in page.cards)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(page.title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n"
        f"<body>\n<header>\n<h1>{_text(page.title)}</h1>\n{lead}\n"
        + (f'<ul class="cards">{cards}</ul>\n' if cards else "")
        + f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n'
        + "\n".join(_section(section) for section in page.sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    name = section.anchor
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{_text(section.title)}</h2>\n{blocks}\n</section>'
    )


def _block(block: object) -> str:
    if isinstance(block, Heading):
        return f"<h3>{_text(block.text)}</h3>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Charts):
        return f'<div class="charts">{"".join(map(_chart, block.charts))}</div>'
    if isinstance(block, Code):
        return f'<pre tabindex="0"><code>{_text(block.text)}</code></pre>'
    return f"<p>{_code(str(block))}</p>"


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_aligned(table, column)}>{_text(column)}</th>' for column in table.columns
    )
    body = "\n".join(f"<tr>{_row(table, row)}</tr>" for row in table.rows)
    whole = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(table.caption)}">'
        f"<table><caption>{_text(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
    if not table.folded:
        return whole
    return f"<details><summary>All figures ({len(table.rows)} shapes)</summary>{whole}</details>"


def _row(table: Table, row: list) -> str:
    cells = []
    for place, (column, value) in enumerate(zip(table.columns, row, strict=True)):
        cell = value if isinstance(value, Cell) else Cell(str(value))
        kinds = [kind for kind in ("n" if column in table.numbers else "", cell.tone) if kind]
        name = f' class="{" ".join(kinds)}"' if kinds else ""
        tag = 'th scope="row"' if place == 0 else "td"
        cells.append(f"<{tag}{name}>{_text(cell.text)}</{tag.split()[0]}>")
    return "".join(cells)


def _aligned(table: Table, column: str) -> str:
    return ' class="n"' if column in table.numbers else ""


def _chart(chart: Chart) -> str:
    legend = "".join(f"<li>{sample}{_text(name)}</li>" for sample, name in chart.legend)
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    if not chart.narrow:
        return f"<figure><figcaption>{_text(chart.title)}{keys}</figcaption>{chart.svg}</figure>"
    return (
        f'<figure class="whole"><figcaption>{_text(chart.title)}{keys}</figcaption>'
        f'<div class="wide">{chart.svg}</div><div class="narrow">{chart.narrow}</div></figure>'
    )


def _card(card: Card) -> str:
    return (
        f'<li class="{card.tone or "even"}"><strong>{_text(card.figure)}</strong>'
        f"<span>{_text(card.label)}</span><small>{_text(card.note)}</small></li>"
    )


def _text(words: str) -> str:
    return html.escape(words, quote=True)


def _code(words: str) -> str:
    """A paragraph, with what stands between backticks set as code."""
    parts = words.split("`")
    return "".join(
        f"<code>{_text(part)}</code>" if place % 2 else _text(part)
        for place, part in enumerate(parts)
    )
