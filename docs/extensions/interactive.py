"""`{interactive} online_softmax`: a piece of a page that a reader can play with.

The pieces are ES modules in docs/interactive: NAME.js computes and knows no page, NAME_view.js
draws. Browsers load no module for a page that is read from disk, so the build joins a view with
what it imports into one plain script.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).resolve().parents[1] / "interactive"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (function|const|class) (\w+)", re.MULTILINE)


def imported_by(name: str) -> list[str]:
    """The modules that one needs, itself last, each once."""
    text = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
    before = [found for _, needed in IMPORT.findall(text) for found in imported_by(needed)]
    return list(dict.fromkeys([*before, name]))


def as_function(name: str) -> str:
    """A module as the call of a function that returns what it exports."""
    text = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
    names = [exported for _, exported in EXPORT.findall(text)]
    text = IMPORT.sub(r"const {\1} = modules.\2;\n", text)
    text = EXPORT.sub(r"\1 \2", text)
    return f"modules.{name} = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();\n"


def bundle(piece: str) -> str:
    """One script that brings a piece to life wherever the page has it."""
    view = f"{piece}_view"
    modules = "\n".join(map(as_function, imported_by(view)))
    return f"""(() => {{
"use strict";
const modules = {{}};
{modules}
for (const root of document.querySelectorAll("[data-piece={piece}]")) {{
  modules.{view}.mount(root);
}}
}})();
"""


class Interactive(SphinxDirective):
    """Where a piece goes; the text in the directive stands there for readers without scripts."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        piece = self.arguments[0]
        if not (FOLDER / f"{piece}_view.js").exists():
            raise self.error(f"there is no {piece}_view.js in {FOLDER.name}")
        for module in imported_by(f"{piece}_view"):
            self.env.note_dependency(str(FOLDER / f"{module}.js"))
        opening = f'<div class="interactive" data-piece="{piece}">\n<div class="without-script">'
        parts: list[nodes.Node] = [nodes.raw("", opening, format="html")]
        parts += self.parse_content_to_nodes()
        closing = f"</div>\n</div>\n<script>\n{bundle(piece)}</script>\n"
        return [*parts, nodes.raw("", closing, format="html")]


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("interactive", Interactive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
