"""`{used-by} bounds`: the files that import a module of `tilewise.tile`, read from their syntax."""

import ast
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "src" / "tilewise"


def importers(module: str) -> dict[str, list[str]]:
    """Files of the library that import tile/<module>, and what they take, by path."""
    found = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        package = file.relative_to(LIBRARY).parts[:-1]
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                if (*base, *(node.module or "").split(".")) == ("tile", module):
                    names |= {alias.name for alias in node.names}
        if names:
            found[file.relative_to(LIBRARY).as_posix()] = sorted(names)
    return found


class UsedBy(SphinxDirective):
    """A list, a line a file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        items = nodes.bullet_list(classes=["used-by"])
        for path, names in importers(self.arguments[0]).items():
            self.env.note_dependency(str(LIBRARY / path))
            line = nodes.paragraph()
            line += nodes.literal(text=path)
            line += nodes.Text(": ")
            for place, name in enumerate(names):
                if place:
                    line += nodes.Text(", ")
                line += nodes.literal(text=name)
            items += nodes.list_item("", line)
        if not items:
            raise self.error(f"no kernel imports tile/{self.arguments[0]}.py")
        return [items]


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("used-by", UsedBy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
