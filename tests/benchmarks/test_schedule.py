"""`python -m benchmarks schedule` draws which SM runs which tile when, in characters and as SVG."""

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from benchmarks import timeline  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from tilewise.testing.schedule import Run, Tile, simulate, tiles  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "design" / "schedule.md"
SVG = "{http://www.w3.org/2000/svg}"


def invoke(*arguments, width=100):
    runner = testing.CliRunner(env={"COLUMNS": str(width)})
    return runner.invoke(main, ["schedule", *arguments])


def shown(*arguments, **options):
    done = invoke(*arguments, **options)
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.output.splitlines()]


def test_a_small_case_lists_its_tiles():
    lines = shown("--lengths", "160,300", "--processors", "2")
    rows = [line.split() for line in lines if " SM " in line and "," in line]
    assert [row[:6] for row in rows] == [
        ["0", "0", "(a)", "0", "0", "2"],
        ["1", "0", "(a)", "0", "1", "2"],
        ["2", "1", "(b)", "0", "0", "3"],
        ["3", "1", "(b)", "0", "1", "3"],
        ["4", "1", "(b)", "0", "2", "3"],
    ]
    assert "SM 0, 5 to 8  SM 0, 5 to 8" in "\n".join(lines)


def test_timelines_stand_side_by_side():
    lines = shown("--lengths", "128,128,128,512", "--processors", "2", width=40)
    start = next(i for i, line in enumerate(lines) if line.split() == ["static", "dynamic"])
    # 10 units of time, a character each: two do not fit in 16
    assert lines[start + 1] == "SM 0 ACDdddDddd  ACDdddDddd"
    assert lines[start + 2] == "SM 1 BDdddDddd.  BDdddDddd."
    assert lines[start + 3].startswith("1 blocks of keys a character")


def test_dynamic_is_faster_where_tiles_differ():
    lines = shown("--lengths", "160,300,4096", "--nheads", "2", "--causal")
    assert "74 tiles: a table shows them up to 32" in lines
    static, dynamic = (
        next(line.split() for line in lines if line.startswith(f" {name} "))
        for name in ("static", "dynamic")
    )
    assert int(dynamic[1]) < int(static[1])
    assert float(dynamic[-1]) == round(int(static[1]) / int(dynamic[1]), 2) > 1


def test_the_order_can_be_asked_for():
    causal = ["--lengths", "1k", "--causal"]
    assert shown(*causal) == shown(*causal, "--longest-first")
    assert shown(*causal) != shown(*causal, "--no-longest-first")


def test_many_sequences_are_cut():
    lines = shown("--lengths", ",".join(["0", "7"] * 20))
    assert "... and 28 sequences more" in lines
    assert any(line.split()[:4] == ["0", "(a)", "0", "0"] for line in lines)


def test_no_line_is_wider_than_the_terminal():
    for width in (60, 81, 140):
        lines = shown("--lengths", "160,300,2k", "--processors", "12", "--causal", width=width)
        assert max(map(len, lines)) <= width
        assert sum(line.startswith("SM ") for line in lines) == 12


def test_bars_show_every_unit_where_they_fit():
    numbered = list(tiles([300, 160], 1, 128))
    runs = simulate([3, 3, 3, 2, 2], 2, dynamic=True)
    bars = [timeline.bar(timeline.of_processor(runs, p), numbered, 8, 8) for p in range(2)]
    assert bars == ["AaaAaa..", "AaaBbBb."]


def test_a_bar_is_as_wide_as_asked():
    numbered = [Tile(n, n, 0, 0, 0) for n in range(40)]
    runs = [Run(0, 3 * n, 3 * n + 3, n) for n in range(40)]
    for width in (1, 7, 40, 97, 240):
        drawn = timeline.bar(runs, numbered, 150, width)
        assert len(drawn) == width
        assert abs(drawn.count(".") - width * 30 / 150) <= 1


def test_nothing_to_do():
    assert shown("--lengths", "0,0") == ["no tiles: every sequence is empty"]


@pytest.mark.parametrize(
    "wrong", [["--lengths", "160,-3"], ["--processors", "0"], ["--block", "0"]], ids=str
)
def test_wrong_numbers_are_usage_errors(wrong):
    assert invoke(*wrong).exit_code == 2


def test_picture(tmp_path):
    path = tmp_path / "schedule.svg"
    lines = shown("--lengths", "160,300", "--nheads", "2", "--svg", str(path), width=1000)
    assert lines[-1] == f"picture: {path}"
    root = xml.parse(path).getroot()
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert "2 sequences with 2 heads" in title.text
    assert "static takes 5; dynamic takes 5" in description.text
    boxes = [box.find(f"{SVG}title").text for box in root.iter(f"{SVG}g")]
    assert len(boxes) == 2 * 10  # both timelines show each tile
    assert "tile 9: sequence 1, head 1, block 2; SM 1, 2 to 5" in boxes


@pytest.mark.skipif(not PAGE.exists(), reason="a source tree without its pages")
def test_the_page_shows_what_the_command_prints():
    blocks = [
        part
        for part in PAGE.read_text().split("```\n")
        if part.startswith("$ python -m benchmarks ")
    ]
    assert blocks
    for block in blocks:
        command, *expected = block.splitlines()
        found = [line for line in shown(*command.split()[5:]) if line]
        assert found == [line for line in expected if line], command
