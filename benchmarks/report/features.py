"""The table of docs/features.md: which backend supports what, as each backend's `supports` answers.

The backends for GPUs are asked as on a GPU: the interpreter and the emulator take its place, and
what they run is what the kernels run.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tilewise import dispatch
from tilewise.cli.info import problems
from tilewise.errors import Slower
from tilewise.testing import use_emulator, use_interpreter

# heading -> backend and the dtype of its problems
COLUMNS = {
    "CPU": ("cpu", torch.float32),
    "any GPU (Triton)": ("portable", torch.bfloat16),
    "Hopper (Gluon)": ("hopper", torch.bfloat16),
}
START, END = "<!-- make figures -->\n", "<!-- end -->\n"


def answers() -> dict[str, list[str | None]]:
    """For each feature, None or the reason why not, by the order of COLUMNS."""
    found: dict[str, list[str | None]] = {}
    with use_interpreter(), use_emulator():
        for backend, dtype in COLUMNS.values():
            for feature, problem in problems(dtype).items():
                reason = dispatch.ask(backend, problem, torch.device("cpu"))
                found.setdefault(feature, []).append(reason)
    return found


def table() -> str:
    """The table in Markdown, and below it the reasons by number."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|---|---|---|"]
    for feature, found in answers().items():
        cells = [feature]
        for reason in found:
            if reason is None:
                cells.append("yes")
                continue
            if reason not in reasons:
                reasons.append(reason)
            said = "left to others" if isinstance(reason, Slower) else "no"
            cells.append(f"{said} ({reasons.index(reason) + 1})")
        lines.append(f"| {' | '.join(cells)} |")
    numbered = [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *numbered, ""])


def pages(root: Path) -> dict[Path, str]:
    """The page as it should be."""
    page = root / "docs" / "features.md"
    before, rest = page.read_text("utf-8").split(START)
    after = rest.split(END)[1]
    return {page: f"{before}{START}\n{table()}\n{END}{after}"}
