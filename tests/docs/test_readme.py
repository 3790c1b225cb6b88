"""README's first 60 lines answer what a reader asks first, and say what pyproject and rows say."""

import re
import tomllib
from pathlib import Path

import pytest

import tilewise
from benchmarks.report.pages import committed
from tilewise.testing import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FIRST = 60  # lines
READMES = "README.md", "README.zh-CN.md"
# A heading or bold words for each question: English, Chinese
QUESTIONS = {
    "what it is": ("**Exact attention for PyTorch**", "**面向 PyTorch 的精确注意力**"),
    "version and maturity": ("**Version and maturity.**", "**版本与成熟度。**"),
    "where to ask": ("**Help.**", "**求助。**"),
    "install": ("## Install", "## 安装"),
    "tested on": ("## Tested on", "## 测试环境"),
    "why": ("## Why tilewise, and when not", "## 何时选用，何时不用"),
    "when not": ("**Use another library**", "**以下情况请用别的库：**"),
    "not supported": ("**Not supported:**", "**不支持：**"),
    "how fast": ("## Speed", "## 速度"),
}
PEERS = "FlashAttention-3", "SDPA", "FlexAttention"


def first_lines(name):
    return (ROOT / name).read_text("utf-8").splitlines()[:FIRST]


def cells(row):
    return [cell.strip() for cell in row.split("|")[1:-1]]


def places(name):
    """The table of what tilewise was tested on, without its head."""
    lines = first_lines(name)
    start = lines.index(QUESTIONS["tested on"][READMES.index(name)])
    return [cells(line) for line in lines[start:] if line.startswith("| ")][1:5]


@pytest.mark.parametrize("name", READMES)
def test_the_first_lines_answer_nine_questions(name):
    lines = first_lines(name)
    for question, marks in QUESTIONS.items():
        mark = marks[READMES.index(name)]
        found = [line for line in lines if line == mark or (mark[0] == "*" and mark in line)]
        assert found, f"{question}: {mark} is not in the first {FIRST} lines"
    for peer in PEERS:
        assert any(line.startswith("- **") and peer in line.split(":")[0] for line in lines), peer


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_speed_is_whole(name):
    lines = (ROOT / name).read_text("utf-8").splitlines()
    heading = lines.index(QUESTIONS["how fast"][READMES.index(name)])
    start = next(n for n, line in enumerate(lines) if n > heading and line.startswith("|"))
    end = next(n for n, line in enumerate(lines) if n > start and not line.startswith("|"))
    assert end <= FIRST


@pytest.mark.parametrize("name", READMES)
def test_version_and_requirements_are_those_of_the_project(name):
    text = "\n".join(first_lines(name))
    (maturity,) = (x for x in PROJECT["classifiers"] if x.startswith("Development Status"))
    assert f"{tilewise.__version__}, {maturity.split()[-1].lower()}" in text.replace("，", ", ")
    needed = [re.search(r"(\w+)>=([\d.]+)", x) for x in PROJECT["dependencies"]]
    (install,) = (line for line in text.splitlines() if line.startswith("    pip install . "))
    for package, version in [x.groups() for x in needed]:
        assert re.search(rf"{package} {re.escape(version)}\b", install, re.IGNORECASE), package
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')}" in install
    assert PROJECT["license"] in text


def test_the_page_on_installing_names_what_is_needed():
    page = " ".join((ROOT / "docs" / "install.md").read_text("utf-8").lower().split())
    assert f"python {PROJECT['requires-python'].removeprefix('>=')} or newer" in page
    for package, version in re.findall(r"(\w+)>=([\d.]+)", " ".join(PROJECT["dependencies"])):
        assert f"{package} {version} or newer" in page


@pytest.mark.parametrize("name", READMES)
def test_cards_and_versions_are_those_of_rows_and_of_make_test(name):
    measured, compiled, _, cpu = places(name)
    gpus = [place for place in committed(ROOT).environments if place.on_gpu]
    devices = {" ".join(place.device.split()[:2]) for place in gpus}
    assert set(re.split("[,、] ?", measured[1])) == devices
    assert {place.torch.split(".0+")[0] for place in gpus} == {measured[2]}
    versions = {place.triton.removesuffix(".0") for place in gpus}
    assert set(re.findall(r"\d\.\d", measured[3])) == versions
    assert re.split("[,、] ?", compiled[1]) == [x for x in TARGETS if x != "sm90"]
    pinned = re.findall(r"(?:torch|triton)==(\d+\.\d+)", (ROOT / "Makefile").read_text("utf-8"))
    for row in (compiled, cpu):
        assert all(version in cell for version, cell in zip(pinned, row[2:], strict=True))


def test_the_backward_says_what_was_seen_on_each_card():
    (row,) = (
        line for line in first_lines("README.md") if line.startswith("| backward, over Flash")
    )
    _, h200, h100 = cells(row.replace("**", ""))
    assert re.match(r"\d\.\d\d+; below 1 in \d+ of \d+", h200)
    assert re.match(r"\d\.\d\d+; below 1 in \d+ of \d+.*independent run: 0\.96$", h100)


@pytest.mark.parametrize("name", READMES)
def test_no_address_is_invented(name):
    """There is none yet: no home page, no badge. Papers are named by their number."""
    assert "urls" not in PROJECT
    assert not re.findall(r"https?://|git@|badge", (ROOT / name).read_text("utf-8"))
