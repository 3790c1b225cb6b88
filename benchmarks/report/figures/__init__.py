"""The figures that README and the docs state: pages with questions in braces, answered from rows.

`{rate: fwd D64 full 1Ki}` asks for a rate, `{over fa3: fwd D64 full}` for the ratios to a peer. The
committed rows give README's own section, yours give the same section about your GPU; what no row
answers is a dash. `calls`, `grids`, `steps` and `experiments` know the questions.
"""

from __future__ import annotations

import re
from importlib import resources

from ..evidence import Evidence
from ..page import Cell, Heading, Section, Table
from . import calls, experiments, grids, steps
from . import picture as picture

QUESTION = re.compile(r"\{([^{}]+)\}")
COMMANDS = {"bench": "python -m benchmarks bench", "experiments": "python -m benchmarks"}
ANSWERS = calls.ANSWERS | experiments.ANSWERS | grids.ANSWERS | steps.ANSWERS
README, CHINESE, DOCS = "readme.md", "readme.zh-CN.md", "docs.md"  # two sections, and a page
IN_CHINESE = {
    "; below 1 in ": "；低于 1 的有 ",
    ", least ": "，最低 ",
    " to ": " 到 ",
    " of ": " / ",
    "sustained": "持续负载",
    "flushed": "L2 清空",
}


def page(name: str, evidence: Evidence) -> str:
    """One of the pages, with every question answered."""
    text = resources.files(__name__).joinpath(name).read_text("utf-8")
    return fill(text, evidence, IN_CHINESE if name == CHINESE else {})


def fill(text: str, evidence: Evidence, translated: dict[str, str] | None = None) -> str:
    """The text with its questions answered; ValueError names an unknown one."""

    def answer(found: re.Match) -> str:
        asked, _, words = found[1].partition(": ")  # a provider's name may hold a colon
        name, *names = asked.split()
        if asked in COMMANDS:
            return COMMANDS[asked]
        if name not in ANSWERS:
            raise ValueError(
                f"{found[0]}: unknown question {name!r}, not one of {', '.join(ANSWERS)}"
            )
        try:
            said = ANSWERS[name](evidence, names, words.split())
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{found[0]} is no question that {name!r} understands") from error
        for ours, theirs in (translated or {}).items():
            said = said.replace(ours, theirs)
        return said

    return QUESTION.sub(answer, text)


def section(evidence: Evidence) -> Section:
    """The docs' page of figures as a section of the report."""
    blocks: list = []
    heading = "Cards"
    for part in re.split(r"\n{2,}", page(DOCS, evidence).strip()):
        first, *lines = part.splitlines()
        if first.startswith(("## ", "### ")):
            heading = first.lstrip("# ")
            blocks.append(Heading(heading))
        elif first.startswith("|"):
            head = [plain(cell.strip()) for cell in first.split("|")[1:-1]]
            body = [_cells(line) for line in lines[1:]]
            caption = f"{heading}: {head[0]}" if head[0] else heading
            blocks.append(Table(caption, head, body, frozenset(head[1:])))
        elif not first.startswith(("# ", "![")):
            blocks.append(plain(" ".join([first, *lines])))
    return Section("The docs' page of figures, from these rows", blocks)


def _cells(line: str) -> list[str | Cell]:
    texts = [cell.strip() for cell in line.split("|")[1:-1]]
    return [Cell(plain(text), "behind") if "**" in text else plain(text) for text in texts]


def plain(text: str) -> str:
    """Markdown's text without its links and bold; the page sets code as it does."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("**", "")
