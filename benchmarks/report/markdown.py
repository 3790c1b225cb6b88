"""A page as Markdown: text, tables and commands; charts are named, and stand in the HTML."""

from __future__ import annotations

from .page import Cell, Charts, Code, Heading, Page, Table


def to_markdown(page: Page) -> str:
    """The whole document; tables are wide, cells are not padded."""
    parts = [f"# {page.title}", *page.lead]
    if page.cards:
        parts.append(
            "\n".join(f"- **{card.figure}** {card.label}: {card.note}" for card in page.cards)
        )
    for section in page.sections:
        parts.append(f"## {section.title}")
        parts += [text for text in map(_block, section.blocks) if text]
    return "\n\n".join(parts) + "\n"


def _block(block: object) -> str:
    if isinstance(block, Heading):
        return f"### {block.text}"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Charts):
        return ""
    if isinstance(block, Code):
        return f"```sh\n{block.text}\n```"
    return str(block)


def _table(table: Table) -> str:
    rules = ["---:" if column in table.numbers else "---" for column in table.columns]
    lines = [_line(table.columns), f"|{'|'.join(rules)}|", *map(_line, table.rows)]
    return f"**{table.caption}**\n\n" + "\n".join(lines)


def _line(cells: list) -> str:
    texts = (cell.text if isinstance(cell, Cell) else str(cell) for cell in cells)
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
