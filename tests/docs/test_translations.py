"""What is there in Chinese says what the English says: the same headings, code, lists, tables,
numbers.
"""

import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tour"))

from lesson_cells import PATTERN, as_pages, cells_of, lesson_table, translate  # noqa: E402

TOUR = ROOT / "tour"

PAGES = [
    ("README.md", "README.zh-CN.md"),
    ("docs/index.md", "docs/zh/index.md"),
    ("docs/quickstart.md", "docs/zh/quickstart.md"),
    ("docs/tour/index.md", "docs/zh/tour/index.md"),
    *(
        (f"docs/see/{name}.md", f"docs/zh/see/{name}.md")
        for name in ("index", "online-softmax", "tile-schedule", "tile-walk")
    ),
    ("tour/README.md", "tour/zh/README.md"),
    ("tour/puzzles/README.md", "tour/zh/puzzles/README.md"),
]
LESSONS = sorted(path.stem for path in TOUR.glob(PATTERN))
TRANSLATED = sorted(path.stem for path in (TOUR / "zh").glob("[0-9]*.md"))
PUZZLES = sorted((TOUR / "puzzles").glob("[1-9]_*.py"))


class Page(NamedTuple):
    """What of a page a translation keeps."""

    headings: list[int]  # their levels
    code: list[str]  # fenced blocks, with the language
    blocks: int  # indented ones
    items: int  # of lists
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
    items = sum(bool(re.match(r"(-|\d+\.) ", line)) for line in lines)
    return Page(headings, code, blocks, items, numbers)


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_pages_are_in_step(english, chinese):
    ours, theirs = (parse((ROOT / name).read_text(encoding="utf-8")) for name in (english, chinese))
    assert theirs.headings == ours.headings
    assert theirs.code == ours.code
    assert theirs.blocks == ours.blocks
    assert theirs.rows == ours.rows


def assert_in_step(lesson: str, translation: str) -> None:
    """A section for each cell of prose, with the same headings, code, tables and numbers."""
    made, cells = cells_of(translate(lesson, translation)), cells_of(lesson)
    for (is_prose, theirs), (_, ours) in zip(made, cells, strict=True):
        assert parse(theirs) == parse(ours) if is_prose else theirs == ours


@pytest.mark.parametrize("name", TRANSLATED)
def test_lessons_are_in_step(name):
    lesson = (TOUR / f"{name}.py").read_text(encoding="utf-8")
    assert_in_step(lesson, (TOUR / "zh" / f"{name}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("puzzle", PUZZLES, ids=[puzzle.stem for puzzle in PUZZLES])
def test_puzzles_are_in_step(puzzle):
    translation = TOUR / "zh" / "puzzles" / f"{puzzle.stem}.md"
    assert_in_step(puzzle.read_text("utf-8"), translation.read_text("utf-8"))


def test_a_lesson_is_compared_section_by_section():
    lesson = (
        "# %% [markdown]\n# # 00. Title\n#\n# Prose.\n\n# %%\nx = 1\n\n\n# %%\ny = 2\n\n"
        "# %% [markdown]\n# | 1 | 2 |\n"
    )
    chinese = "# 00. 标题\n\n正文。\n\n<!-- code -->\n\n| 1 | 2 |\n"
    assert_in_step(lesson, chinese)
    assert translate(lesson, chinese).count("# %%") == 4 and "y = 2" in translate(lesson, chinese)
    for old, new in (("# 00", "00"), ("2 |", "3 |")):
        with pytest.raises(AssertionError):
            assert_in_step(lesson, chinese.replace(old, new))
    for wrong in (chinese + "\n<!-- code -->\n\n更多\n", "# 00. 标题\n\n正文。\n"):
        with pytest.raises(ValueError, match="sections for 2 cells of prose"):
            translate(lesson, wrong)


def test_every_lesson_is_translated():
    assert LESSONS == TRANSLATED


@pytest.mark.parametrize(
    ("page", "ending"), [("tour/README.md", "py"), ("tour/zh/README.md", "md")]
)
def test_the_table_of_lessons_has_every_lesson(page, ending):
    """Which the site's two pages of the tour show; its links lead to files on a git host, too."""
    table = lesson_table((ROOT / page).read_text(encoding="utf-8"))
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.(\w+)\) \| \d+ \| (.*?) \|", table, re.MULTILINE)
    assert [(name, end) for _, name, end, _ in rows] == [(name, ending) for name in LESSONS]
    for number, name, _, needs in rows:
        assert name.startswith(f"{number}_")
        earlier = re.findall(r"\d\d\w?", needs)
        assert all(f"{other}_" in " ".join(LESSONS) for other in earlier), "needs what there is"
        assert all(other < number for other in earlier), "needs earlier lessons"
    *_, advice, _ = table.split("\n\n")
    assert re.match(r"\*\*(If you read three|如果只读三课)", advice)
    assert all(f"({name}." in advice for name in LESSONS if name[:3] in ("01_", "03_", "04_"))
    linked = re.findall(rf"\]\((\w+)\.{ending}\)", table)
    assert set(linked) == set(LESSONS)
    assert "]" not in re.sub(r"\{doc}`\w+ <\w+>`", "", as_pages(table)), "links to pages alone"


def test_the_check_sees_a_difference():
    page = "# A\n\n## B\n\n- C\n\n| 1 | 2.5 |\n\n```python\nx = 1\n```\n\n    make test\n"
    assert parse(page) == Page([1, 2], ["```python\nx = 1\n```"], 1, 1, [(3, ["1", "2.5"])])
    for old, new in (
        ("## B", "B"),
        ("- C", "C"),
        ("2.5", "2.6"),
        ("x = 1", "x = 2"),
        ("    make", "make"),
    ):
        assert parse(page.replace(old, new)) != parse(page)


def test_bold_chinese_ends_before_punctuation():
    """CommonMark closes no bold text behind punctuation that a letter follows."""
    pages = [*(TOUR / "zh").rglob("*.md"), *(ROOT / theirs for _, theirs in PAGES)]
    assert len(pages) > 10
    for path in pages:
        for bold in re.finditer(r"\*\*([^*\n]+)\*\*(.?)", path.read_text("utf-8")):
            closes = bold[1][-1] not in "：。，、；" or not bold[2].isalnum()
            assert closes, f"{path.name}: {bold[0]}"


def test_the_sidebar_has_the_titles_that_pages_have():
    """A title that changes is translated again."""
    sys.path.append(str(ROOT / "docs" / "extensions"))
    from languages import SIDEBAR, in_chinese

    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    titles = {
        path.read_text("utf-8").split("# ", 1)[1].splitlines()[0]
        for folder in ("", "see", "tour", "design")
        for path in (ROOT / "docs" / folder).glob("*.md")
    }
    titles |= set(re.findall(r"^:caption: (.*)$", index, re.MULTILINE))
    assert not SIDEBAR.keys() - titles
    tree = '<a href="x.html">Install</a><span>Use</span><a href="y.html">tilewise.mods: masks</a>'
    assert in_chinese(tree) == tree.replace(">Install", ">安装").replace(">Use", ">使用")
