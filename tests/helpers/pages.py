"""What a page has its reader run, in the page's order: blocks of Python, commands in blocks and in
sentences, and names such as `tilewise.integrations.transformers.register()`.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("pip", "python", "tilewise", "make", "git")
FENCE = re.compile(r"^(`{3,})\s*(?:\{code-cell\}\s*)?(\S*)")
NAME = re.compile(r"tilewise(?:\.\w+)+(?:\(\))?")


class Line(NamedTuple):
    """`kind` is "python", "command" or "name"; `number` is the first line's, from 1."""

    kind: str
    number: int
    text: str


def lines_of(page: str) -> list[Line]:
    """What the page, a path below the repository, has its reader run."""
    found: list[Line] = []
    rows = iter(enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1))
    for number, row in rows:
        if fence := FENCE.match(row):
            block = []
            for _, inner in rows:
                if inner.startswith(fence[1]):
                    break
                block.append(inner)
            found += of_block(fence[2], number + 1, block)
        elif row.startswith("    "):
            found += of_block("sh", number, [row.strip()])
        else:
            for span in re.findall(r"`([^`]+)`", row):
                found += of_span(number, span)
    return found


def of_block(language: str, number: int, block: list[str]) -> list[Line]:
    """A block of Python as one line, a shell's as its commands."""
    if language == "python":
        return [Line("python", number, "\n".join(block))]
    if language not in ("sh", "bash"):
        return []
    rows = [(number + i, row.split(" #")[0].strip()) for i, row in enumerate(block)]
    return [Line("command", i, row) for i, row in rows if row.split(" ")[0] in COMMANDS]


def of_span(number: int, span: str) -> list[Line]:
    """What stands between backquotes in a sentence: a command with its arguments, or a name."""
    if NAME.fullmatch(span):
        return [Line("name", number, span)]
    first, _, rest = span.partition(" ")
    return [Line("command", number, span)] if rest and first in COMMANDS else []


def installed_by(line: Line) -> set[str] | None:
    """The extras that a `pip install` of the project brings; None where it is none."""
    if not line.text.startswith("pip install "):
        return None
    words = [word for word in shlex.split(line.text)[2:] if word != "-e"]
    assert len(words) == 1, line
    of_project = re.fullmatch(r"(?:\.|tilewise)(?:\[([\w,]+)\])?", words[0])
    assert of_project, line
    return set(filter(None, (of_project[1] or "").split(",")))
