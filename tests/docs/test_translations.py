"""What is there in Chinese says what the English says: the same headings, code, tables, numbers."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "tour"
CHINESE = ROOT / "docs" / "zh"

PAGES = [
    ("README.md", "README.zh-CN.md"),
    ("docs/index.md", "docs/zh/index.md"),
    ("docs/quickstart.md", "docs/zh/quickstart.md"),
    ("docs/tour/index.md", "docs/zh/tour/index.md"),
]
LESSONS = sorted(path.name for path in TOUR.glob("[0-9][0-9]_*.py"))
TRANSLATED = sorted(path.name for path in (CHINESE / "tour").glob("[0-9][0-9]_*.py"))


class Page(NamedTuple):
    """What of a page a translation keeps."""

    headings: list[int]  # their levels
    code: list[str]  # fenced blocks, with the language
    blocks: int  # indented ones
    rows: list[tuple[int, list[str]]]  # cells and numbers of each row of a table


def parse(text: str) -> Page:
    """Markdown, as far as we write it."""
    fences = re.findall(r"^(```.*?^```)$", text, re.MULTILINE | re.DOTALL)
    # the text in an interactive piece's directive is prose
    code = [f for f in fences if not f.startswith(("```{interactive}", "```{toctree}"))]
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    headings = [len(line) - len(line.lstrip("#")) for line in lines if re.match(r"#+ ", line)]
    rows = [line for line in lines if line.startswith("|")]
    numbers = [(row.count("|"), re.findall(r"\d[\d.,]*\d|\d", row)) for row in rows]
    pairs = itertools.pairwise(lines)
    blocks = sum(line.startswith("    ") and not before.strip() for before, line in pairs)
    return Page(headings, code, blocks, numbers)


def cells(path: Path) -> list[tuple[bool, str]]:
    """The cells of a lesson: whether it is Markdown, and its text."""
    parts = re.split(r"^# %%(.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for kind, text in zip(parts[1::2], parts[2::2]):
        is_markdown = "[markdown]" in kind
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if is_markdown else text
        found.append((is_markdown, text.strip()))
    return found


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_pages_are_in_step(english, chinese):
    ours, theirs = (parse((ROOT / name).read_text(encoding="utf-8")) for name in (english, chinese))
    assert theirs.headings == ours.headings
    assert theirs.code == ours.code
    assert theirs.blocks == ours.blocks
    assert theirs.rows == ours.rows


def assert_in_step(ours: list[tuple[bool, str]], theirs: list[tuple[bool, str]]) -> None:
    """The same cells in the same order, code to the letter."""
    assert [kind for kind, _ in theirs] == [kind for kind, _ in ours]
    for (is_markdown, text), (_, translated) in zip(ours, theirs):
        if is_markdown:
            assert parse(translated) == parse(text)
        else:
            assert translated == text


def test_lessons_are_in_step():
    for name in TRANSLATED:
        assert_in_step(cells(TOUR / name), cells(CHINESE / "tour" / name))


def test_a_lesson_is_compared_cell_by_cell(tmp_path):
    lesson = "# %% [markdown]\n# # 00. Title\n#\n# Prose.\n\n# %%\nx = 1\n"
    ours, same, other = (tmp_path / name for name in ("ours.py", "same.py", "other.py"))
    ours.write_text(lesson)
    same.write_text(lesson.replace("Title", "标题").replace("Prose.", "正文。"), encoding="utf-8")
    assert_in_step(cells(ours), cells(same))
    for old, new in (("x = 1", "x = 2"), ("# # 00", "# 00"), ("# %%\nx", "x")):
        other.write_text(lesson.replace(old, new))
        with pytest.raises(AssertionError):
            assert_in_step(cells(ours), cells(other))


def test_every_lesson_is_translated():
    assert LESSONS == TRANSLATED


def test_the_check_sees_a_difference():
    page = "# A\n\n## B\n\n| 1 | 2.5 |\n\n```python\nx = 1\n```\n\n    make test\n"
    assert parse(page) == Page([1, 2], ["```python\nx = 1\n```"], 1, [(3, ["1", "2.5"])])
    for old, new in (("## B", "B"), ("2.5", "2.6"), ("x = 1", "x = 2"), ("    make", "make")):
        assert parse(page.replace(old, new)) != parse(page)
