"""Lessons as cells: jupytext's percent format, and translations of the prose.

`tour/01_vector_add.py` has cells of prose and of code. `tour/zh/01_vector_add.md`
has the prose in Chinese, a section for each cell of prose, in the same order, with
`<!-- code -->` between them. The code cells of the Chinese lesson are the English
ones.
"""

import re
from pathlib import Path
from typing import NamedTuple

PATTERN = "[0-9][0-9]*_*.py"  # a number, as 02 or 02b, and a name
MARK = re.compile(r"^# %%(.*)\n", re.MULTILINE)
BETWEEN = "<!-- code -->"
PUZZLES = "[1-9]_*.py"
ANSWER = """<details><summary>{folded}</summary>

```{{literalinclude}} /../tour/puzzles/answers.py
:pyobject: {kernel}
:language: python
```

</details>
"""


class Cell(NamedTuple):
    """One cell of a lesson; prose without its comment signs."""

    is_prose: bool
    text: str


def cells_of(lesson: str) -> list[Cell]:
    """The cells of a lesson in order; ValueError for text before the first."""
    before, *parts = MARK.split(lesson)
    if before.strip():
        raise ValueError(
            f"no cell begins before {before.strip().splitlines()[0]!r}"
        )
    cells = []
    for mark, text in zip(parts[::2], parts[1::2]):
        is_prose = mark.strip() == "[markdown]"
        if is_prose:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        cells.append(Cell(is_prose, text.strip()))
    return cells


def sections_of(translation: str) -> list[str]:
    """The sections of a translation, one for each cell of prose."""
    return [section.strip() for section in translation.split(BETWEEN)]


def translate(lesson: str, translation: str) -> str:
    """The lesson with the translation's prose; ValueError if their numbers differ.

    Every other byte is the lesson's, so that its code cells have one hash in both
    languages.
    """
    sections = sections_of(translation)
    count = sum(cell.is_prose for cell in cells_of(lesson))
    if count != len(sections):
        raise ValueError(f"{len(sections)} sections for {count} cells of prose")
    prose, parts = iter(sections), MARK.split(lesson)
    made = parts[0]
    for mark, text in zip(parts[1::2], parts[2::2]):
        if mark.strip() == "[markdown]":
            space = text[len(text.rstrip()) :]
            text = commented(next(prose)) + space
        made += f"# %%{mark}\n{text}"
    return made


def commented(text: str) -> str:
    """Prose as comments."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def lesson_table(readme: str) -> str:
    """The table of lessons of a README, and what it says about it."""
    return readme.partition("<!-- lessons -->")[2].partition("<!-- /lessons -->")[0]


def as_pages(table: str) -> str:
    """The same table on the site, where a lesson is a page beside it."""
    table = re.sub(
        r"\[([^]]+)\]\(puzzles/README\.md\)", r"{doc}`\1 <puzzles>`", table
    )
    return re.sub(r"\[(\w+)\]\((\d\w+)\.(?:py|md)\)", r"{doc}`\1 <\2>`", table)


def pages_of(tour: Path) -> dict[str, str]:
    """Pages that the site makes of lessons: the path below docs, and its text."""
    pages = {}
    for file in sorted(tour.glob(PATTERN)):
        lesson = file.read_text(encoding="utf-8")
        pages[f"tour/{file.name}"] = lesson
        translation = tour / "zh" / f"{file.stem}.md"
        if translation.exists():
            prose = translation.read_text(encoding="utf-8")
            try:
                pages[f"zh/tour/{file.name}"] = translate(lesson, prose)
            except ValueError as error:
                raise ValueError(f"{translation}: {error}") from error
    if list(tour.glob(f"puzzles/{PUZZLES}")):
        pages["tour/puzzles.md"] = ladder_of(tour, tour / "puzzles", "An answer")
        pages["zh/tour/puzzles.md"] = ladder_of(
            tour, tour / "zh" / "puzzles", "一种答案"
        )
    return pages


def ladder_of(tour: Path, prose: Path, folded: str) -> str:
    """All puzzles on one page, which runs nothing; `folded` opens an answer."""
    page = [(prose / "README.md").read_text(encoding="utf-8")]
    for file in sorted(tour.glob(f"puzzles/{PUZZLES}")):
        lesson = file.read_text(encoding="utf-8")
        if prose != file.parent:
            lesson = translate(
                lesson, (prose / f"{file.stem}.md").read_text("utf-8")
            )
        task, stub = cells_of(lesson)
        kernel = file.stem.split("_", 1)[1] + "_kernel"
        page.append(f"{task.text}\n\n```python\n{stub.text}\n```\n")
        page.append(ANSWER.format(folded=folded, kernel=kernel))
    return "\n".join(page)
