"""The site as a reader meets it: it builds without a warning, loads nothing, its pieces work."""

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]
PIECES = ("online_softmax", "tile_walk", "tile_schedule")
TEXT = "document.querySelector('.interactive {}').textContent"


def test_builds_without_a_warning(site):
    assert "build succeeded" in site.log and "WARNING" not in site.log


def test_no_page_names_another_host(site):
    """Links may lead away, but nothing is loaded from elsewhere."""
    loads = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"(?:https?:)?//")
    for page in site.html.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page


def test_features_are_those_of_the_backends(site):
    page = (site.html / "features.html").read_text(encoding="utf-8")
    assert page.count("<tr") > 20
    assert "the gradients of a block mask are added in no fixed order there" in page


def test_the_report_is_there(site):
    links = re.findall(
        r"href=\"([^\"]*report/index.html)\"", (site.html / "index.html").read_text()
    )
    assert links and all((site.html / link).exists() for link in links)


def test_pages_are_quiet_and_narrow_enough(site, browser):
    for path in sorted(site.html.rglob("*.html")):
        if path.stem == "py-modindex" or "_modules" in path.parts:
            continue
        with browser.open_page(path, width=360) as page:
            assert page.errors == [], path
            assert page.leaving == [], path
            assert not page.is_too_wide, path


def test_no_code_of_a_lesson_is_cut(site, browser):
    """84 columns fit beside the sidebar and the contents, in a window of 1400 pixels."""
    cut = """[...document.querySelectorAll(".cell_input pre")]
        .filter((one) => one.scrollWidth > one.clientWidth).length"""
    lessons = sorted(site.html.rglob("tour/[0-9]*.html"))
    assert len(lessons) > 20
    for path in lessons:
        with browser.open_page(path, width=1400) as page:
            assert page.evaluate(cut) == 0, path
            assert not page.is_too_wide, path


def test_lessons_have_notebooks_and_drawings(site, browser):
    for path in sorted(site.html.rglob("tour/[0-9]*.html")):
        text = path.read_text(encoding="utf-8")
        (notebook,) = re.findall(r"<a href='(\w+\.ipynb)' download>", text)
        assert (path.parent / notebook).exists() and notebook == f"{path.stem}.ipynb"
    drawn = "getComputedStyle(document.querySelector('.diagram text')).fill"
    path = site.html / "tour" / "00_gpu.html"
    with browser.open_page(path) as light, browser.open_page(path, dark=True) as dark:
        assert light.evaluate(drawn) != dark.evaluate(drawn), "in the theme's colours"


@pytest.fixture
def see(site, browser):
    opened = []

    def open_piece(name, **options):
        opened.append(browser.open_page(site.html / "see" / f"{name}.html", **options))
        opened[-1].wait_for("document.querySelector('.interactive svg') !== null")
        return opened[-1]

    yield open_piece
    for page in opened:
        assert page.errors == []
        page.close()


def enter(page, label, text):
    """Writes into the control with this label, as a reader would: every event is told."""
    found = page.evaluate(
        f"""(() => {{
            const label = [...document.querySelectorAll(".interactive label")]
                .find((one) => one.textContent.startsWith({label!r}));
            const control = document.getElementById(label.htmlFor) || label.querySelector("input");
            if (control.type === "checkbox") {{ control.click(); return true; }}
            control.value = {text!r};
            control.dispatchEvent(new Event("input", {{ bubbles: true }}));
            control.dispatchEvent(new Event("change", {{ bubbles: true }}));
            return control.value === {text!r};
        }})()"""
    )
    assert found


def press(page, text):
    """Presses the button with this text."""
    page.evaluate(
        f"""[...document.querySelectorAll(".interactive button")]
            .find((one) => one.textContent === {text!r}).click()"""
    )


def test_online_softmax_steps(see):
    page = see("online-softmax")
    press(page, "Start")
    assert "Before the first block" in page.evaluate(TEXT.format(".said"))
    press(page, "Next")
    assert "the first maximum is 3.000" in page.evaluate(TEXT.format(".said"))
    press(page, "End")
    assert "the difference is 0" in page.evaluate(TEXT.format(".said"))
    page.click(".interactive input[type=range]")
    page.press("ArrowLeft")
    assert page.evaluate(TEXT.format(".place")) != "5 / 5"


def test_online_softmax_takes_other_scores(see):
    page = see("online-softmax")
    enter(page, "Scores", "-inf, -inf, 1000, 1001")
    assert "4 scores and 8 values" in page.evaluate(TEXT.format(".problem"))
    enter(page, "A value", "1, 2, 3, 4")
    assert page.evaluate(TEXT.format(".problem")) == ""
    press(page, "Start")
    press(page, "Next")
    assert "every score is masked" in page.evaluate(TEXT.format(".said"))
    press(page, "End")
    assert "lse 1001.313" in page.evaluate(TEXT.format("table"))
    enter(page, "Scores", "1, two")
    assert '"two"' in page.evaluate(TEXT.format(".problem"))


def test_tile_walk_counts(see):
    page = see("tile-walk")
    tiles = "document.querySelectorAll('.interactive .tile.{}').length"
    assert page.evaluate(tiles.format("full")) == 28
    assert page.evaluate(tiles.format("partial")) == page.evaluate("Math.sqrt(64)")
    press(page, "End")
    assert page.evaluate(TEXT.format(".place")) == "36 / 36"
    assert "2.50 MiB" in page.evaluate(TEXT.format("table"))  # Q, and 36 times K and V
    enter(page, "Mask", "full")
    assert page.evaluate(tiles.format("skipped")) == 0
    assert "64 without" in page.evaluate(TEXT.format(".counters"))
    enter(page, "BLOCK_M", "256")
    assert page.evaluate("document.querySelectorAll('.interactive .tile').length") == 32


@pytest.mark.parametrize("path", ["index", "see/online-softmax", "see/tile-schedule"])
def test_a_piece_speaks_the_language_of_its_page(site, browser, path):
    """No two words of English in a row, at the start, on the way and at the end."""
    with browser.open_page(site.html / "zh" / f"{path}.html") as page:
        page.wait_for("document.querySelector('.interactive svg') !== null")
        for place in (None, 0, 2, 3):  # as it is; then the buttons: start, next, end
            if place is not None:
                page.evaluate(f"document.querySelectorAll('.stepper button')[{place}].click()")
            said = page.evaluate("document.querySelector('.interactive').innerText")
            labels = page.evaluate("document.querySelector('.interactive svg').ariaLabel")
            assert not re.search(r"[A-Za-z]{3,} [a-z]{2,}", said + labels), said
            assert re.search(r"[\u4e00-\u9fff]{2}", said) and re.search(r"[\u4e00-\u9fff]", labels)


def test_what_surrounds_a_page_is_in_its_language(site):
    for path, words, others in (
        ("quickstart", ("Understand", "Next"), ("下一页", "故障排查")),
        ("zh/quickstart", ("理解", "下一页", "故障排查"), ("Understand<", ">Next<", ">Install<")),
    ):
        page = (site.html / f"{path}.html").read_text(encoding="utf-8")
        assert all(word in page for word in words), path
        assert not any(word in page for word in others), path


def test_tile_schedule_is_the_worked_example(see):
    """The one of docs/design/schedule.md."""
    page = see("tile-schedule")
    for label, text in (("Lengths", "160, 300"), ("SMs", "2"), ("causal", "")):
        enter(page, label, text)
    assert page.evaluate(TEXT.format(".place")) == "10 / 10"
    table = page.evaluate(TEXT.format("table"))
    assert "static13100.0 %1.00" in table and "dynamic13100.0 %1.00" in table
    press(page, "Back")
    assert "Tile 8 (sequence b, head 1" in page.evaluate(TEXT.format(".said"))
    assert page.evaluate("document.querySelectorAll('.interactive .run').length") == 2 * 9
    enter(page, "Lengths", "0, 0")
    assert "every sequence is empty" in page.evaluate(TEXT.format(".problem"))


@pytest.mark.parametrize("name", [piece.replace("_", "-") for piece in PIECES])
def test_pieces_are_accessible(see, name):
    """Every control has a name, and every picture a description."""
    page = see(name, width=360, dark=True)
    nameless = """[...document.querySelectorAll(".interactive :is(input, select, button)")]
        .filter((one) => !(one.textContent || one.ariaLabel || one.labels?.length)).length"""
    assert page.evaluate(nameless) == 0
    described = "document.querySelector('.interactive svg[role=img]').ariaLabel.length"
    assert page.evaluate(described) > 20
    assert not page.is_too_wide
    page.resize(1280)
    assert page.wait_for("document.querySelector('.interactive svg').clientWidth > 300")
