"""The harness itself: what a page writes, asks for and does is seen."""

import pytest
from browser.chromium import Failed

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GOOD = """<!doctype html><title>good</title><meta name=viewport content=width=device-width>
<style>body { background: #fff } @media (prefers-color-scheme: dark) { body { background: #000 } }
</style><button onclick="count++">more</button><input onkeydown="keys.push(event.key)">
<script>let count = 0; const keys = []; console.log("ready", 3)</script>"""
BAD = """<!doctype html><title>bad</title><script src="https://cdn.example.org/x.js"></script>
<script>console.error("wrong"); fetch("http://example.org/y").catch(() => 0)</script>
<img src="none.png"><script>setTimeout(() => { throw new Error("late") })</script>"""


@pytest.fixture
def good(browser, tmp_path):
    (tmp_path / "good.html").write_text(GOOD)
    with browser.open_page(tmp_path / "good.html") as page:
        yield page


def test_a_page_that_stays_at_home(good):
    assert good.evaluate("document.title") == "good"
    assert good.console == [("log", "ready 3")]
    assert good.errors == [] and good.leaving == []
    assert [url.rsplit("/")[-1] for url in good.requests] == ["good.html"]


def test_what_goes_wrong_is_seen(browser, tmp_path):
    (tmp_path / "bad.html").write_text(BAD)
    with browser.open_page(tmp_path / "bad.html") as page:
        page.wait_for("document.readyState == 'complete'")
        assert page.leaving == ["https://cdn.example.org/x.js", "http://example.org/y"]
        text = "\n".join(page.errors)
        assert "wrong" in text and "Error: late" in text
        assert "ERR_FILE_NOT_FOUND" in text and "ERR_NAME_NOT_RESOLVED" in text


def test_a_reader_clicks_and_presses_keys(good):
    good.click("button")
    good.click("button")
    assert good.wait_for("count") == 2
    good.click("input")
    good.press("ArrowRight")
    good.press("a")
    assert good.evaluate("keys") == ["ArrowRight", "a"]
    assert good.evaluate("document.querySelector('input').value") == "a"
    with pytest.raises(Failed, match="there is no #nothing"):
        good.click("#nothing")
    with pytest.raises(Failed, match="ReferenceError"):
        good.evaluate("undefined_function()")


def test_light_and_dark_narrow_and_wide(good, tmp_path):
    colour = "getComputedStyle(document.body).backgroundColor"
    assert good.evaluate(colour) == "rgb(255, 255, 255)"
    good.prefer(dark=True)
    good.resize(390, 500)
    assert good.evaluate(colour) == "rgb(0, 0, 0)"
    assert good.evaluate("innerWidth") == 390 and not good.is_too_wide
    image = good.screenshot(tmp_path / "window.png", whole=False).read_bytes()
    assert image[:4] == b"\x89PNG"
    assert [int.from_bytes(image[at : at + 4]) for at in (16, 20)] == [390, 500]
    good.evaluate("document.body.style.width = '900px'")
    assert good.is_too_wide


def test_a_page_that_is_not_there(browser, tmp_path):
    with pytest.raises(Failed, match="ERR_FILE_NOT_FOUND"):
        browser.open_page(tmp_path / "none.html")
