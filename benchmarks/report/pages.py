"""The figures of the docs and both READMEs, and their pictures."""

from __future__ import annotations

from pathlib import Path

from ..bench.row import load
from .evidence import Evidence, collect
from .figures import CHINESE, DOCS, README, page, picture

SECTIONS = {"README.md": ("Speed", README), "README.zh-CN.md": ("速度", CHINESE)}


def committed(root: Path) -> Evidence:
    """The rows of a clone."""
    files = sorted((root / "benchmarks" / "results").glob("*.jsonl"))
    return collect([row for file in files for row in load(file)])


def pages(root: Path) -> dict[Path, str]:
    """Both READMEs, the docs' page and the pictures as they should be."""
    evidence = committed(root)
    found = {root / "docs" / "figures.md": page(DOCS, evidence)}
    for name, draw in picture.PICTURES.items():
        found[root / "docs" / "_static" / name] = draw(evidence)
    for name, (heading, section) in SECTIONS.items():
        whole = (root / name).read_text("utf-8")
        before, title, rest = whole.partition(f"\n## {heading}\n")
        after = rest[rest.index("\n## ") :]
        found[root / name] = f"{before}{title}\n{page(section, evidence)}{after}"
    return found
