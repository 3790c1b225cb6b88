"""The committed rows: one a class."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = Path(__file__).resolve().parent / "rows.jsonl"


def load() -> dict[str, dict]:
    """By the name of the class."""
    lines = ROWS.read_text("utf-8").splitlines() if ROWS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["name"]: row for row in rows}


def save(rows: list[dict]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    ROWS.write_text("".join(lines), "utf-8")


def outcomes(row: dict) -> list[str]:
    """By cell; empty if the class was not built."""
    return [cell["outcome"] for cell in row.get("cells", {}).values()]
