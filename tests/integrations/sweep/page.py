"""docs/transformers.md, from the rows: a table for each task, and why cells are refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from .cells import CLOSE, CLOSE_GRADIENTS, NEW_TOKENS, REAL
from .outcomes import EQUAL, NEVER, REFUSED, SERVED, THEIRS
from .rows import outcomes
from .subjects import MAPPINGS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transformers.md"
TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "encoder-decoder": "Encoder-decoder models",
    "vision": "Vision",
}
INTRODUCTION = Path(__file__).with_name("introduction.md")


def page(rows: list[dict]) -> str:
    """The whole page."""
    introduction = INTRODUCTION.read_text("utf-8").format(
        close=CLOSE,
        close_gradients=CLOSE_GRADIENTS,
        worst=worst(rows, of_gradients=False),
        worst_gradient=worst(rows, of_gradients=True),
        rounding=", ".join(
            f"`{row['name']}`"
            for row in rows
            if any("rounding" in cell for cell in row.get("cells", {}).values())
        ),
        lengths=", ".join(map(str, REAL[:-1])) + f" and {REAL[-1]}",
        new=NEW_TOKENS,
    )
    reasons: list[str] = []
    tables = [table(task, of_task(rows, task), reasons) for task in sorted(MAPPINGS)]
    parts = [introduction, summary(rows), *tables, reasons_of(reasons), not_built(rows)]
    return "\n".join(parts)


def of_task(rows: list[dict], task: str) -> list[dict]:
    found = [row for row in rows if row["task"] == task and "cells" in row]
    return sorted(found, key=lambda row: row["name"].lower())


def worst(rows: list[dict], of_gradients: bool) -> float:
    """The largest error of cells that are equal."""
    cells = [(name, cell) for row in rows for name, cell in row.get("cells", {}).items()]
    return max(
        (
            c["error"]
            for name, c in cells
            if c["outcome"] == EQUAL and "rounding" not in c and is_of(name, of_gradients)
        ),
        default=0.0,
    )


def is_of(cell: str, of_gradients: bool) -> bool:
    return (cell == "gradients") == of_gradients


def summary(rows: list[dict]) -> str:
    """How many classes, by what all of their cells come to."""
    versions = ", ".join(sorted({row["transformers"] for row in rows}))
    kinds = [*SERVED, *(x for x in NEVER if any(x in outcomes(row) for row in rows))]
    head = ["", "classes", "not built", "equal in all that eager does"]
    head += [f"{kind} in some" for kind in kinds[1:]]
    lines = [line(head), line(["---"] * len(head))]
    for task in sorted(MAPPINGS):
        every = [row for row in rows if row["task"] == task]
        found = [set(outcomes(row)) for row in every]
        counts = Counter(kind for kinds_of in found for kind in kinds_of)
        counts[EQUAL] = sum({EQUAL} <= kinds_of <= {EQUAL, THEIRS} for kinds_of in found)
        cells = [len(every), sum(not x for x in found), *(counts[kind] for kind in kinds)]
        lines.append(line([TITLES[task], *map(str, cells)]))
    said = f"With transformers {versions}. A class counts in every column that applies to it."
    return "\n".join(["## Summary", "", said, "", *lines, ""])


def table(task: str, rows: list[dict], reasons: list[str]) -> str:
    """A row a class; what is new among the reasons is appended."""
    names = list(rows[0]["cells"]) if rows else []
    lines = [line(["class", *names]), line(["---"] * (len(names) + 1))]
    for row in rows:
        cells = [told(cell, reasons) for cell in row["cells"].values()]
        lines.append(line([f"`{row['name']}`", *cells]))
    return f"## {TITLES[task]}\n\n" + "\n".join(lines) + "\n"


def told(cell: dict, reasons: list[str]) -> str:
    if cell["outcome"] != REFUSED:
        return cell["outcome"]
    reason = sentence(cell["reason"])
    if reason not in reasons:
        reasons.append(reason)
    return f"{REFUSED} ({reasons.index(reason) + 1})"


def sentence(reason: str) -> str:
    """Without the error's class, and without which operator of the mask came first."""
    reason = re.sub(r"^\w+: ", "", reason)
    return re.sub(r"^attention_mask\.\w+: ", "", reason)


def reasons_of(reasons: list[str]) -> str:
    lines = [line([str(number), text(reason)]) for number, reason in enumerate(reasons, 1)]
    return "## Reasons\n\n|  | the error says |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def not_built(rows: list[dict]) -> str:
    """The classes that say nothing of tilewise: eager does not run them tiny, or as plain."""
    found = sorted((row for row in rows if "not_built" in row), key=lambda row: row["name"].lower())
    lines = [line([f"`{row['name']}`", text(row["not_built"])]) for row in found]
    return (
        "## Not built\n\nThe tiny config does not fit these classes, a library is missing, or "
        "their inputs are more than tokens or an image.\n\n| class | error |\n| --- | --- |\n"
        + "\n".join(lines)
        + "\n"
    )


def text(said: str) -> str:
    """For Markdown."""
    return re.sub(r"([*_<>`\[\]{}|])", r"\\\1", said)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
