"""The report in a browser: quiet, alone, and as wide as the screen."""

from pathlib import Path

import pytest

from benchmarks.bench.row import load
from benchmarks.report import write

pytestmark = [pytest.mark.slow, pytest.mark.browser]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def page_of_rows(tmp_path_factory):
    rows = [row for file in sorted(RESULTS.glob("*.jsonl")) for row in load(file)]
    return write(rows, tmp_path_factory.mktemp("report"))[0]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_is_quiet_and_fits(browser, page_of_rows, width, dark):
    with browser.open_page(page_of_rows, width=width, dark=dark) as page:
        assert not page.errors and not page.leaving
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('svg').length") > 10
