"""The sentences of a Markdown page, without code blocks, tables and headings, and their counts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d.,]*(?:\^-?\d+|e[+-]?\d+)?")
OPENING = re.compile(r"[\"(*]*(?:Of|Where|What|Those|Such)\b")
REPLACED = re.compile(r"\b(?:beside|serves|served|held to)\b")  # compared with, supports, tested
END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[\"(*`[]*[A-Z0-9])")


class Counts(NamedTuple):
    """Rates of some pages, each with a limit that only falls."""

    of: float  # "of" per 100 words
    openings: float  # percent of sentences that open with Of, Where, What, Those or Such
    crowded: int  # sentences with more than two numbers
    stale: int  # words of `REPLACED`


def paragraphs(text: str) -> Iterator[str]:
    """One line each: paragraphs, and items of lists."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^(```|\$\$).*?\1\s*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts, is_cell = ITEM.match(line), line.lstrip().startswith("|")
        if lines and (starts or is_cell or not line.strip() or line.startswith("#")):
            yield " ".join(lines)
            lines = []
        is_prose = lines or starts or not line.startswith(("#", "    "))
        if is_prose and line.strip() and not is_cell:
            lines.append(ITEM.sub("", line, count=1) if starts else line.strip())


def sentences(page: Path) -> Iterator[str]:
    """Without the targets of links; code in a sentence stays."""
    for paragraph in paragraphs(page.read_text(encoding="utf-8")):
        yield from END.split(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph))


def is_crowded(sentence: str) -> bool:
    """Whether numbers belong in a table: names such as `sm_90`, FA3 and 16-bit are none."""
    return len(NUMBER.findall(re.sub(r"\d+-(?=[a-z])", "", without_code(sentence)))) > 2


def without_code(sentence: str) -> str:
    return re.sub(r"`[^`]*`", "", sentence)


def count(pages: list[Path]) -> Counts:
    every = [sentence for page in pages for sentence in sentences(page)]
    words = [word.lower() for sentence in every for word in re.findall("[A-Za-z]+", sentence)]
    openings = sum(bool(OPENING.match(sentence)) for sentence in every)
    return Counts(
        of=100 * words.count("of") / max(len(words), 1),
        openings=100 * openings / max(len(every), 1),
        crowded=sum(map(is_crowded, every)),
        stale=sum(len(REPLACED.findall(without_code(sentence))) for sentence in every),
    )
