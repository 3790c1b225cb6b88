"""The site, built once for all tests, and a Chromium to look at it; without either, they skip."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.waits import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NEEDED = ("furo", "jupytext", "latex2mathml", "matplotlib", "myst_nb", "sphinx")


class Site(NamedTuple):
    """Where the pages are, what Sphinx said, and how long it took."""

    html: Path
    log: str


@pytest.fixture(scope="session")
def site():
    for module in NEEDED:
        pytest.importorskip(module, reason="`make docs` installs what builds the site")
    build = DOCS / "_build"
    build.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), before]))
    with (build / "lock").open("w") as lock:  # workers build one after the other; the rest is quick
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [*command, DOCS, build / "html"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            timeout=4 * DEADLINE,
        )
    assert done.returncode == 0, done.stdout[-4000:]
    return Site(build / "html", done.stdout)


@pytest.fixture(scope="module")
def browser():
    chromium = pytest.importorskip("browser.chromium")
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.Browser() as opened:
        yield opened
