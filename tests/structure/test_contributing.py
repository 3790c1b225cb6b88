"""What CI runs are targets of the Makefile, and what CONTRIBUTING.md names is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture
def jobs():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def test_jobs_are_targets_of_make(jobs):
    run = set()
    for job in jobs.values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job["steps"]:
            if "run" in step:
                command = step["run"].split()
                assert command[0] == "make"
                run |= set(targets) if "matrix.target" in step["run"] else {command[1]}
    assert run <= TARGETS
    assert run >= {
        "test",
        "test-lowest",
        "test-newest",
        "test-bare",
        "test-gpu",
        "test-engines",
        "lint",
        "docs",
    }


def test_jobs_have_every_python(jobs):
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [x.split(" :: ")[-1] for x in classifiers if re.search(r":: 3\.\d+$", x)]
    assert jobs["cpu"]["strategy"]["matrix"]["python"] == supported


def test_the_gpu_job_is_skipped_without_a_runner(jobs):
    assert "GPU_RUNNER" in jobs["gpu"]["if"] and "GPU_RUNNER" in jobs["gpu"]["runs-on"]


def test_contributing_names_files_and_targets_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"(?<![\w/])((?:src|tests|docs|\.github)/[\w./-]+\w)", text))
    made = {"docs/_build/html", "tests/FOLDER"}
    assert len(paths) > 20 and {x for x in paths if not (ROOT / x).exists()} <= made
    targets = set(re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE))
    assert {one or other for one, other in targets} <= TARGETS
