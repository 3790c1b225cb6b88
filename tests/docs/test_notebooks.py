"""The lessons' notebooks and drawings: complete in both languages, and true."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "tour"
sys.path.append(str(TOUR))

from lesson_cells import cells_of, pages_of  # noqa: E402
from lesson_notebooks import NO_WORDS, TEXT, notebook_of, svg_of  # noqa: E402

DRAWINGS = sorted(path.stem for path in (TOUR / "diagrams").glob("*.svg"))
PAGES = {page: text for page, text in pages_of(TOUR).items() if page.endswith(".py")}


def language_of(page):
    return "zh-CN" if page.startswith("zh/") else "en"


def sources(notebook, kind):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_has_the_lesson_and_nothing_that_only_the_site_reads(page):
    notebook = notebook_of(PAGES[page], language_of(page))
    cells = cells_of(PAGES[page])
    assert sources(notebook, "code")[1:] == [x.text for x in cells if not x.is_prose]
    prose = "\n".join(sources(notebook, "markdown"))
    assert "```{" not in prose and "<summary>" in prose and "```python\n" in prose
    assert len({cell["id"] for cell in notebook["cells"]}) == len(cells) + 1
    assert json.loads(json.dumps(notebook)) == notebook
    for cell in notebook["cells"]:
        linked = re.findall(r"\(attachment:(\w+\.svg)\)", "".join(cell["source"]))
        assert linked == list(cell.get("attachments", {}))


@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_is_one_by_jupyters_schema(page):
    pytest.importorskip("nbformat").validate(notebook_of(PAGES[page], language_of(page)))


def test_its_first_cell_finds_the_lessons():
    """Run in `tour`, by a Python that knows no path of ours."""
    first, second, *_ = sources(notebook_of(PAGES["tour/01_vector_add.py"], "en"), "code")
    command = [sys.executable, "-I", "-c"]
    done = subprocess.run([*command, first + "\nimport lesson_cells"], cwd=TOUR)
    assert done.returncode == 0 and "from lesson import" in second
    elsewhere = subprocess.run([*command, first], cwd=ROOT, capture_output=True, text=True)
    assert "has no folder `lesson`" in elsewhere.stderr


def test_every_drawing_is_shown_in_both_languages():
    shown = {page: re.findall(r"\{diagram\} (\w+)", text) for page, text in PAGES.items()}
    for language in ("en", "zh-CN"):
        names = [x for page in PAGES if language_of(page) == language for x in shown[page]]
        assert sorted(names) == DRAWINGS


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_translated(name):
    english, chinese = (TEXT.findall(svg_of(name, language)) for language in ("en", "zh-CN"))
    for ours, theirs in zip(english, chinese, strict=True):
        numbers, same = (sorted(re.findall(r"\d+", text)) for text in (ours, theirs))
        assert numbers == same
        assert NO_WORDS.fullmatch(ours) or re.search("[一-鿿]", theirs) or theirs == "Tensor Core"


def test_no_translation_is_left_over():
    texts = {text for name in DRAWINGS for text in TEXT.findall(svg_of(name, "en"))}
    assert set(json.loads((TOUR / "diagrams" / "zh.json").read_text("utf-8"))) <= texts


def test_sizes_of_the_hierarchy_are_recorded_ones():
    rows = (ROOT / "benchmarks" / "results" / "h200.jsonl").read_text("utf-8").splitlines()
    cards = [r for r in map(json.loads, rows) if r["shape"] == {"what": "card"}]
    sizes = {row["provider"]: round(row["extra"]["value"]) for row in cards}
    drawn = " ".join(TEXT.findall(svg_of("memory", "en")))
    assert f"SM {sizes['SMs'] - 1} " in drawn
    assert f"registers: {sizes['registers of an SM, KiB']} KiB" in drawn
    assert f"shared memory: {sizes['shared memory of an SM, KiB']} KiB" in drawn
    assert f"{sizes['L2, MiB']} MiB" in drawn and f"{sizes['HBM, GiB']} GiB" in drawn


def test_threads_of_a_warpgroup_are_those_of_wgmma():
    """The accumulator of the PTX ISA's wgmma: rows by lane // 4, pairs of columns by lane % 4."""
    cells = re.findall(r'x="([\d.]+)" y="([\d.]+)">T(\d+)<', svg_of("warpgroup", "en"))
    columns, rows = (sorted({float(cell[i]) for cell in cells}) for i in (0, 1))
    assert (len(rows), len(columns)) == (16, 8)
    for x, y, thread in cells:
        row, column = rows.index(float(y)), 2 * columns.index(float(x))
        assert int(thread) == row % 8 * 4 + column % 8 // 2
    assert len(cells) == 16 * 8


def test_an_attached_drawing_is_whole():
    notebook = notebook_of(PAGES["zh/tour/00_gpu.py"], "zh-CN")
    attached = [x for cell in notebook["cells"] for x in cell.get("attachments", {}).values()]
    for one in attached:
        drawing = base64.b64decode(one["image/svg+xml"]).decode("utf-8")
        assert drawing.startswith("<svg") and "<style>" in drawing and 'fill="white"' in drawing
    assert len(attached) == 2
