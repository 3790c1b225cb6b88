"""The report: which rows speak, what it says of them, and that it needs nothing else."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from helpers.made_rows import pair, row

from benchmarks.bench.row import load
from benchmarks.bench.shapes import square
from benchmarks.report import collect, page_of, to_html, to_markdown, write
from benchmarks.report.sources import commands_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def said(rows):
    return to_markdown(page_of(collect(rows)))


def test_the_newest_row_of_a_shape_counts():
    old = pair(1.0, 2.0, run="old", date="2025-12-31T00:00:00+00:00")
    text = said(pair(1.0, 1.5) + old)
    assert "2 of them have a newer row" in text
    assert "1.50" in text and "2.00" not in text


def test_ratios_are_taken_within_a_run():
    """Two runs in which the machine was faster and slower."""
    rows = pair(1.0, 1.2, seqlen=1024, run="a") + pair(10.0, 12.0, seqlen=2048, run="b")
    text = said(rows)
    line = next(x for x in text.splitlines() if x.startswith("| dense, forward, bf16 | fa3 |"))
    assert "| 1.20 | 1.20 | 1.20 | 2 of 2 |" in line


def test_a_peer_of_an_older_run_still_counts():
    """And only the shapes that pages speak of are in a mean of dense ones."""
    old = [*pair(2.0, 2.4, run="old"), row("cudnn", 3.0, run="old")]
    new = pair(1.0, 1.5, run="new", date="2026-03-01T00:00:00+00:00")
    shape = square("fwd", 1024, 192, False)._asdict()
    wide = pair(1.0, 9.0, shape=shape, run="wide")
    text = said(old + new + wide)
    assert "| dense, forward, bf16 | fa3 | 1.50 | 1.50 | 1.50 | 1 of 1 |" in text
    assert "| dense, forward, bf16 | cudnn | 1.50 | 1.50 | 1.50 | 1 of 1 |" in text
    assert "| other, forward, bf16 | fa3 | 9.00 |" in text


def test_our_ways_do_not_speak_for_each_other():
    """The portable kernel's ratios to a peer are no ratios of ours."""
    rows = pair(1.0, 1.2) + [
        row("tilewise:portable", 2.0, run="b"),
        row("fa3", 1.2, run="b", date="2026-03-01T00:00:00+00:00"),
    ]
    text = said(rows)
    assert "| dense, forward, bf16 | fa3 | 1.20 |" in text
    assert "| portable, dense, forward, bf16 | fa3 | 0.60 ▼ |" in text


def test_losses_are_shown_as_losses():
    text = said(pair(2.0, 1.0))
    assert "0.50 ▼" in text and "0 of 1" in text


def test_unknown_suites_are_tables():
    other = row(suite="of-tomorrow", shape={"what": "a thing"}, extra={"cells": {"a": 1}})
    text = said([*pair(1.0, 1.0), other])
    assert "of-tomorrow" in text and "what a thing" in text and "a 1" in text


def test_a_page_needs_nothing_else():
    html = to_html(page_of(collect(load(RESULTS / "h200.jsonl"))))
    assert "<script" not in html and "@import" not in html
    assert not re.search(r"""(src|href)=["'](?!#)""", html)
    assert "prefers-color-scheme: dark" in html
    assert html.count("<h1") == 1 and "<caption>" in html


def test_the_same_rows_give_the_same_page(tmp_path):
    rows = load(RESULTS / "h200-triton38.jsonl")
    pages = [write(rows, tmp_path / name)[0].read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]
    pictures = re.findall(r"!\[[^\]]*\]\((.*?)\)", (tmp_path / "a" / "figures.md").read_text())
    assert pictures and all((tmp_path / "a" / picture).exists() for picture in pictures)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_every_committed_row_is_spoken_of(file):
    rows = load(file)
    evidence = collect(rows)
    assert said(rows).startswith("# ")
    counted = len(evidence.entries) + sum(map(len, evidence.others.values()))
    assert 0 < counted <= len(rows)
    for name in {r.run for r in rows}:
        commands = commands_of([r for r in rows if r.run == name])
        assert all(re.match(r"(python |TILEWISE_RECORD=)", c) for c in commands)


def test_the_head_says_what_readme_says():
    rows = load(RESULTS / "h200.jsonl")
    figures = {f"{card.label}": card.figure for card in page_of(collect(rows)).cards}
    assert figures["dense forward beside fa3"] == "1.02×"
    assert figures["dense forward beside cudnn"] == "1.11×"
    assert figures["dense backward beside cudnn"] == "1.20×"


def test_sustained_times_count_and_flushed_ratios_stand_beside_them():
    ours, theirs = pair(1.0, 1.5)
    loaded = [dataclasses.replace(x, sustained_ms=[ms] * 8) for x, ms in ((ours, 2), (theirs, 2.5))]
    text = said(loaded)
    assert "| dense, forward, bf16 | fa3 | 1.25 |" in text
    (head,) = [line for line in text.splitlines() if "/ fa3, flushed" in line]
    (line,) = [line for line in text.splitlines() if line.startswith("| B16 S1Ki H16 D128 full")]
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["/ fa3"] == "1.25" and cells["/ fa3, flushed"] == "1.50"
    assert cells["ms"].startswith("2") and "/ fa3, flushed" not in said(pair(1.0, 1.5))


def test_a_command_takes_sustained_times_again():
    rows = [row(sustained_ms=[1.0] * 8), row("fa3", sustained_ms=[1.0] * 8)]
    assert " --rounds 3 --sustained --save" in commands_of(rows)[0]
    rows = [dataclasses.replace(x, joules=0.1) for x in rows]
    assert " --rounds 3 --energy --save" in commands_of(rows)[0]


def test_experiments_name_their_commands():
    shape = {"m": 1, "n": 1, "k": 1, "kind": "bf16"}
    assert commands_of([row(suite="matmul", shape=shape)]) == [
        "python -m benchmarks matmul --dtype bf16 --save rows.jsonl"
    ]
    assert json.dumps(commands_of([row(suite="cold")])).count("benchmarks cold") == 1
