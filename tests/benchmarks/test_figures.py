"""Figures that pages state: computed from rows, never typed, and dashes where no row answers."""

import dataclasses
import itertools
import re
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.made_rows import row

from benchmarks.bench.shapes import square
from benchmarks.report import collect, figures
from benchmarks.report.pages import committed, pages

ROOT = Path(__file__).resolve().parents[2]
NAMES = (figures.README, figures.CHINESE, figures.DOCS)


@pytest.fixture(scope="module")
def evidence():
    return committed(ROOT)


def test_pages_say_what_the_rows_say():
    for path, text in pages(ROOT).items():
        assert path.read_text("utf-8") == text, f"{path.name}: `make figures` writes it"


def test_features_are_what_the_backends_answer():
    pytest.importorskip("triton")
    from benchmarks.report import features

    ((path, text),) = features.pages(ROOT).items()
    assert path.read_text("utf-8") == text, "`make figures` writes it"


@pytest.mark.parametrize("name", NAMES)
def test_no_figure_is_typed(name):
    """Where a page has a table, its cells are questions: a typed number would have no source."""
    lines = resources.files(figures.__name__).joinpath(name).read_text("utf-8").splitlines()
    below = [line for line, after in itertools.pairwise(lines) if not after.startswith("|---")]
    rows = [line.split("|")[2:-1] for line in below if line.startswith("| ")]
    rows = [cells for cells in rows if any("{" in cell for cell in cells)]
    assert len(rows) > 7
    for cell in (cell for cells in rows for cell in cells[1:]):
        rest = re.sub(r"\b(4096|8192): ", "", figures.QUESTION.sub("", cell))
        assert not re.search(r"\d", rest), cell


@pytest.mark.parametrize("name", NAMES)
def test_without_rows_there_are_dashes(name):
    assert "–" in figures.page(name, collect([]))


def test_both_languages_ask_the_same():
    asked = []
    for name in (figures.README, figures.CHINESE):
        text = resources.files(figures.__name__).joinpath(name).read_text("utf-8")
        asked.append(figures.QUESTION.findall(text))
    assert asked[0] == asked[1]


def test_questions_about_calls():
    rows = [row(ms=1.0, seqlen=1024), row("fa3", 1.5, 1024), row(ms=2.0, seqlen=2048, run="two")]
    rows += [row("fa3", 1.9, 2048, run="two"), row("tilewise:deterministic", 4.0, 2048, run="two")]
    evidence = collect(rows)
    for asked, answer in {
        "{over fa3: fwd D128 full}": "0.95 to 1.50",
        "{mean fa3: fwd}": "1.19",
        "{ahead fa3: fwd}": "1 of 2",
        "{ms fa3: fwd 2Ki}": "1.90",
        "{keeps tilewise:deterministic: fwd}": "0.50 (0.50)",
        "{rate: fwd 1Ki}": f"{rows[0].tflops:.0f}",
        "{over fa3: fwd D64}": "–",
        "{over cudnn: fwd}": "–",
        "{over fa3: fwd Triton-3.8}": "–",
        "{environment triton}": "3.6",
    }.items():
        assert figures.fill(asked, evidence) == answer, asked


def loaded(ours, theirs, seqlen=1024, **changed):
    """A run of one shape, as fast as fa3 with pauses and not under load."""
    rows = [row(ms=1.0, seqlen=seqlen, **changed), row("fa3", 1.0, seqlen, **changed)]
    return [dataclasses.replace(x, sustained_ms=[ms] * 8) for x, ms in zip(rows, (ours, theirs))]


def test_sustained_times_count_and_flushed_ones_can_be_asked_for():
    rows = [
        *loaded(2.0, 2.5),
        row(ms=1.0, seqlen=2048, run="two"),
        row("fa3", 1.5, 2048, run="two"),
    ]
    tflops = rows[0].tflops
    for asked, answer in {
        "{over fa3: fwd 1Ki}": "1.25",
        "{over fa3: flushed fwd 1Ki}": "1.00",
        "{mean best fa3 cudnn: fwd 1Ki}, {mean best fa3 cudnn: flushed fwd}": "–, –",
        "{rate: fwd 1Ki}, {rate: flushed fwd 1Ki}": f"{tflops / 2:.0f}, {tflops:.0f}",
        "{ms fa3: fwd 1Ki}, {ms fa3: flushed fwd 1Ki}": "2.50, 1.00",
        "{ahead fa3: fwd}, {over fa3: fwd 2Ki}": "2 of 2, 1.50",
        "{way fa3: fwd 1Ki}, {way fa3: fwd 2Ki}": "sustained, flushed",
        "{way fa3: fwd}": "sustained in 1 of 2, else flushed",
        "{way cudnn: fwd}": "–",
    }.items():
        assert figures.fill(asked, collect(rows)) == answer, asked


def test_two_versions_of_triton_that_were_interleaved_are_compared():
    rows = [row(ms=1.0, seqlen=1024), row(ms=1.25, seqlen=1024, triton="3.8.0")]
    rows += [row(ms=2.0, seqlen=2048), row(ms=1.6, seqlen=2048, triton="3.8.0")]
    rows += [row(ms=0.5, seqlen=1024, run="alone"), row(ms=0.5, seqlen=512)]
    evidence = collect(rows)
    assert figures.fill("{versions: fwd Triton-3.8}", evidence) == "1.00, least 0.80"
    assert figures.fill("{versions: bwd Triton-3.8}", evidence) == "–"
    grid = figures.fill("{grid versions: fwd Triton-3.8}", evidence).splitlines()
    assert grid[2] == "| D128 full | – | **0.80** | 1.25 | – | – | – |"


def test_pages_say_which_times_they_have():
    for rows, said in ((loaded(2.0, 2.5), "sustained"), ([row(), row("fa3", 1.5)], "flushed")):
        page = " ".join(figures.page(figures.README, collect(rows)).split())
        assert f"geometric means, {said}," in page
    assert "，持续负载，" in figures.page(figures.CHINESE, collect(loaded(2.0, 2.5)))


def test_energy_is_of_runs_that_measured_it():
    rows = [row(joules=3.0, seqlen=1024), row("fa3", seqlen=1024, joules=4.0)]
    rows += [row(joules=5.0, seqlen=2048, run="b"), row("fa3", seqlen=2048, run="b", joules=4.0)]
    rows += [row(seqlen=1024, run="later"), row("fa3", seqlen=1024, run="later")]
    evidence = collect(rows)
    assert figures.fill("{energy fa3: fwd}", evidence) == "0.97 (0.75 to 1.25)"
    assert figures.fill("{energy fa3: fwd 1Ki}", evidence) == "0.75 (0.75)"
    assert figures.fill("{energy cudnn: fwd}", evidence) == "–"


def test_odd_and_wide_headdims_have_a_table():
    rows = []
    for headdim, ms in ((100, 1.0), (104, 0.8), (512, 4.0)):
        for i, direction in enumerate(("fwd", "bwd")):
            shape = square(direction, 2048, headdim, False)
            of = dict(shape=shape._asdict(), run=f"{headdim} {direction}")
            tflops = shape.flops / ms / 1e9
            rows.append(row(ms=ms, **of, tflops=tflops))
            rows.append(row("efficient", ms * (1.5 + i), **of, tflops=tflops / (1.5 + i)))
    found = figures.page(figures.DOCS, collect(rows)).splitlines()
    for headdim in (100, 104, 512):
        rates = [f"{x.tflops:.0f}" for x in rows[::2] if x.shape["headdim"] == headdim]
        (line,) = (line for line in found if re.match(rf"\| D{headdim}(, copied)? \|", line))
        assert line.split(" | ")[1] == " / ".join(rates) and "– / –" in line
    (line,) = (line for line in found if line.startswith("| D512 over"))
    assert line.split(" | ")[1] == "1.50 / 2.50"


def test_a_ratio_is_of_the_newest_run_in_which_both_ran():
    old = [row(ms=1.0, run="old"), row("fa3", 2.0, run="old"), row("cudnn", 3.0, run="old")]
    later = "2026-02-01T00:00:00+00:00"
    new = [row(ms=9.0, run="new", date=later), row("fa3", 9.9, run="new", date=later)]
    evidence = collect(old + new)
    asked = "{over fa3: fwd}, {over cudnn: fwd}, {mean best fa3 cudnn: fwd}"
    assert figures.fill(asked, evidence) == "1.10, 3.00, 2.00"


def test_an_unknown_question_is_an_error(evidence):
    with pytest.raises(ValueError, match=r"\{speed: fwd\}: unknown question 'speed'"):
        figures.fill("{speed: fwd}", evidence)
    with pytest.raises(ValueError, match=r"\{over: fwd\} is no question"):
        figures.fill("{over: fwd}", evidence)


def test_other_shapes_do_not_count():
    rows = [row(ms=1.0), row("fa3", 1.5)]
    shape = rows[0].shape | dict(batch=7)
    rows += [row(ms=9.0, shape=shape), row("fa3", 9.9, shape=shape)]
    assert figures.fill("{over fa3: fwd}, {ms: fwd}", collect(rows)) == "1.50, 1.00"


def test_several_shapes_have_no_one_rate(evidence):
    with pytest.raises(ValueError, match="is no question"):
        figures.fill("{rate: fwd D64}", evidence)


def test_the_report_has_the_page(evidence):
    section = figures.section(evidence)
    tables = [block for block in section.blocks if hasattr(block, "columns")]
    assert len(tables) > 10 and all(table.caption for table in tables)
    cells = [cell for table in tables for cells in table.rows for cell in cells]
    assert not any("{" in text for text in cells + section.blocks if isinstance(text, str))


def test_one_sequence_over_several_gpus():
    shape = dict(ranks=2, tokens=8192, causal=True, window=0, documents=0, direction="fwd")
    shape |= dict(nheads=32, nheads_k=8)
    one = row("one process", suite="distributed", shape=shape)
    other = row("tilewise:heads", suite="distributed", shape=shape | dict(window=64))
    mine = row("tilewise:heads", suite="distributed", shape=shape)
    mha = row("tilewise:heads", suite="distributed", shape=shape | dict(nheads_k=32))
    mine.extra["of_ideal"], other.extra["of_ideal"], mha.extra["of_ideal"] = 0.9, 0.1, 0.3
    ask = figures.experiments.distributed
    assert ask(collect([one, mine, other]), [], ["heads", "2", "8Ki", "fwd"]) == "0.90"
    assert ask(collect([one, mine, other]), [], ["heads", "4", "8Ki", "fwd"]) == "–"
    assert ask(collect([one, mine, other]), [], ["heads", "2", "8Ki", "fwd", "window"]) == "0.10"
    assert ask(collect([mine, mha]), [], ["heads", "2", "8Ki", "fwd"]) == "0.90"
    assert ask(collect([mine, mha]), [], ["heads", "2", "8Ki", "fwd", "MHA"]) == "0.30"
    stream = row("tilewise:stream", suite="distributed", shape=shape, ms=2 * mine.median_ms)
    assert ask(collect([mine, stream]), ["stream"], ["heads", "2", "8Ki", "fwd"]) == "2.00"
    assert ask(collect([mine, stream]), ["fa3"], ["heads", "2", "8Ki", "fwd"]) == "–"


STEP = dict(direction="decode", batch=32, seqlen_q=1, seqlen_k=8192, nheads=32, nheads_k=8)
STEP |= dict(headdim=128, headdim_v=128, causal=True, dtype="bfloat16", page_size=16)


def step(name="tilewise", ms=1.0, run="steps", device="NVIDIA H200", date="2026-01-01", **changed):
    """A row of a step of decoding."""
    shape = STEP | changed
    return row(name, suite="decode", shape=shape, ms=ms, run=run, device=device, date=date)


def test_a_step_of_decoding():
    # A later run without ours is compared with none of it
    rows = [step(ms=0.2), step("fa3", 0.3), step("fa3", 0.9, run="later", date="2100-01-01")]
    rows += [step(ms=0.1, run="alone", date="2100-01-01")]
    rows += [step(ms=0.4, device="NVIDIA H100 80GB HBM3"), step(ms=0.1, run="b", seqlen_q=4)]
    rows += [step("fa3", 0.3, device="NVIDIA H100 80GB HBM3"), step(ms=0.3, headdim=64)]
    rows += [step(ms=1.2, run="c", chunk=512, seqlen_k=32768), step(ms=0.1, cache="e4m3")]
    evidence = collect(rows)
    for asked, answer in {
        "{decode fa3: B32 q1 page16}": "1.50",
        "{decode fa3: B32 q1 page16 H100}": "**0.75**",
        "{step fa3 sdpa: B32 q1 page16}": "200 | 1.50 | –",
        "{decode fa3: B32 q1}, {decode sdpa: B32 q1 page16}": "–, –",
        "{us: B32 q4 page16}, {us: B32 q4 page16 H100}": "100, –",
        "{us: B32 q1 page16 32Ki chunk512}": "1,200",
        "{cache: B32 q1 page16 e4m3}, {cache: B32 q1 page16 int8}": "2.00, –",
    }.items():
        assert figures.fill(asked, evidence) == answer, asked


@pytest.mark.parametrize("card", [[], ["H100"]])
def test_every_step_with_rows_is_on_the_page(evidence, card):
    """The ones in which a peer is faster, too."""
    text = resources.files(figures.__name__).joinpath(figures.DOCS).read_text("utf-8")
    asked = [words.split() for words in re.findall(r"\{step [^{}]*: ([^{}]+)\}", text)]
    shown = {figures.steps.step_of(words) for words in asked if set(card) <= set(words)}
    for peer in ("fa3", "sdpa"):
        for of in figures.steps.ratios(evidence, peer, card):
            words = figures.steps.words_of(of)
            assert words in shown, f"docs.md of benchmarks/report/figures lacks {sorted(words)}"


def test_every_shape_has_a_cell():
    rows = [row(seqlen=1024), row("fa3", 1.5, 1024), row(seqlen=512, run="b")]
    rows += [row("fa3", 0.8, 512, run="b"), row("cudnn", 2.0, 512, run="b")]
    evidence = collect(rows)
    (said,) = (
        line
        for line in figures.fill("{grid over fa3 cudnn: fwd}", evidence).splitlines()
        if line.startswith("| D128 full")
    )
    assert said == "| D128 full | **0.80** / 2.00 | 1.50 / – |" + " – |" * 4
    assert len(figures.fill("{grid rate fa3: fwd H100}", evidence).splitlines()) == 6


def test_our_ways_and_cards_are_words():
    place = dict(device="NVIDIA H100 80GB HBM3")
    rows = [row(ms=1.0), row("tilewise:portable", 2.0), row("fa3", 1.5), row(ms=3.0, **place)]
    rows += [row("fa3", 2.7, **place), row(ms=9.0), row(ms=9.0)]
    evidence = collect(rows)
    for asked, answer in {
        "{card}, {card: H100}, {environment device: H100}": "H200, H100, NVIDIA H100 80GB HBM3",
        "{ratio fa3: portable fwd}": "**0.75**",
        "{ratio fa3 cudnn: fwd H100}": "**0.90** / –",
        "{behind fa3: fwd H100}, {behind cudnn: fwd}": "1 of 1, least 0.90, –",
        "{commits fa3: fwd}": "`abc`",
        "{stands fa3: fwd H100}": "**0.90**; below 1 in 1 of 1, least 0.90",
        "{bench} fwd": "python -m benchmarks bench fwd",
    }.items():
        assert figures.fill(asked, evidence) == answer, asked
    assert figures.fill("{card: H200}", collect([row(**place)])) == "–"


def test_pictures_are_drawn_from_any_rows(evidence):
    for draw in figures.picture.PICTURES.values():
        for rows in (evidence, collect([]), collect([row(), row("fa3", 1.5)])):
            text = draw(rows)
            drawn = ElementTree.fromstring(text)
            assert drawn.get("aria-label") and drawn.get("width") and drawn.get("height")
            assert "prefers-color-scheme: dark" in text and 'class="paper"' in text
