"""docs/serving-engines.md has the table that tests/engines wrote, and says what the plug-ins do."""

import re
import tomllib
from pathlib import Path

from engines import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = table.PAGE.read_text("utf-8")


def test_the_table_is_that_of_the_tests_that_ran():
    assert table.read() and table.filled(PAGE, table.read()) == PAGE


def test_versions_and_caches_are_those_of_the_plugin():
    """Read from its sources, as vLLM is not here."""
    backend, impl = (
        (ROOT / "src/tilewise/integrations/vllm" / name).read_text()
        for name in ("backend.py", "impl.py")
    )
    versions = re.search(r"^VERSIONS = (.*)$", backend, re.MULTILINE)[1]
    first, *_, last = re.findall(r"0\.\d+", versions)
    for version in re.findall(r"0\.\d+", versions):
        assert version in PAGE
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    minor = int(last.split(".")[1]) + 1
    assert extras["vllm"] == [f"vllm>={first},<0.{minor}"]  # and nothing that chooses a torch
    for name in re.findall(r'^    "(\w+)": torch\.', impl, re.MULTILINE):
        assert f"`{name}`" in PAGE


def test_versions_of_sglang_are_those_of_the_plugin():
    text = (ROOT / "src/tilewise/integrations/sglang/__init__.py").read_text()
    first, before = (
        re.findall(r"\d+", x) for x in re.search(r"= (\(.*?\)), (\(.*?\))", text).groups()
    )
    assert f"beside SGLang {'.'.join(first)}" in PAGE
    assert f"`{'.'.join(first)}` to `{first[0]}.{int(before[1]) - 1}.x`" in PAGE
