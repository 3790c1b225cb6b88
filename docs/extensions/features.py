"""`{feature-table}`: which backend supports what, by each backend's `supports` at this build.

The backends for GPUs are asked as on a GPU: the interpreter and the emulator stand in for one, and
what these serve is what the kernels serve.
"""

import torch
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from tilewise import dispatch
from tilewise.cli.features import problems
from tilewise.errors import Slower
from tilewise.testing import use_emulator, use_interpreter

# heading -> backend and the dtype in which it is asked
COLUMNS = {
    "CPU": ("cpu", torch.float32),
    "any GPU (Triton)": ("portable", torch.bfloat16),
    "Hopper (Gluon)": ("hopper", torch.bfloat16),
}


def answers() -> dict[str, list[str | None]]:
    """For each feature, None or the reason why not, by the order of COLUMNS."""
    found: dict[str, list[str | None]] = {}
    with use_interpreter(), use_emulator():
        for backend, dtype in COLUMNS.values():
            for feature, problem in problems(dtype).items():
                reason = dispatch.ask(backend, problem, torch.device("cpu"))
                found.setdefault(feature, []).append(reason)
    return found


def row(cells: list[nodes.Node]) -> nodes.row:
    """A row of a table."""
    made = nodes.row()
    for cell in cells:
        made += nodes.entry("", nodes.paragraph("", "", cell))
    return made


class FeatureTable(SphinxDirective):
    """A table, and below it the reasons by number."""

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        reasons: list[str] = []
        body = nodes.tbody()
        for feature, found in answers().items():
            cells: list[nodes.Node] = [nodes.Text(feature)]
            for reason in found:
                text = "yes"
                if reason is not None:
                    if reason not in reasons:
                        reasons.append(reason)
                    said = "left to others" if isinstance(reason, Slower) else "no"
                    text = f"{said} ({reasons.index(reason) + 1})"
                cells.append(nodes.Text(text))
            body += row(cells)
        group = nodes.tgroup(cols=len(COLUMNS) + 1)
        for _ in range(len(COLUMNS) + 1):
            group += nodes.colspec(colwidth=1)
        group += nodes.thead("", row([nodes.Text(x) for x in ("", *COLUMNS)]))
        group += body
        listed = nodes.enumerated_list(enumtype="arabic", prefix="", suffix=".")
        for reason in reasons:
            listed += nodes.list_item("", nodes.paragraph("", reason))
        return [nodes.table("", group, classes=["features"]), listed]


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("feature-table", FeatureTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
