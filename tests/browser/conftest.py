"""One Chromium for all tests of a file; without one they are skipped."""

import pytest
from browser import chromium


@pytest.fixture(scope="module")
def browser():
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.Browser() as opened:
        yield opened
