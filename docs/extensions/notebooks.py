"""Beside each lesson's page its notebook, linked under the title; `{diagram} NAME` in a lesson.

A drawing of `tour/diagrams` becomes part of the page, so that it has the theme's colours.
"""

import json
import re
from pathlib import Path

from docutils import nodes
from languages import language_of
from lesson_cells import pages_of
from lesson_notebooks import TOUR, notebook_of, svg_of
from sphinx.util.docutils import SphinxDirective

LINE = {
    "en": "{link}This lesson as a notebook</a>, to run in a checkout · {glossary}Glossary</a>",
    "zh-CN": "{link}本课的笔记本</a>，在一份源码里运行 · {glossary}术语表（英文）</a>",
}


class Diagram(SphinxDirective):
    """A drawing in a box that scrolls where the window is narrow."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        name = self.arguments[0]
        for file in (f"{name}.svg", "zh.json"):
            self.env.note_dependency(str(TOUR / "diagrams" / file))
        drawing = svg_of(name, language_of(self.env.docname))
        return [nodes.raw("", f'<div class="diagram-box">{drawing}</div>', format="html")]


def export(app, exception) -> None:
    """Writes the notebooks when the site is made."""
    if exception or app.builder.format != "html":
        return
    for page, lesson in pages_of(Path(app.config.lessons_from or TOUR)).items():
        if page.endswith(".py"):
            target = Path(app.outdir, page).with_suffix(".ipynb")
            target.parent.mkdir(parents=True, exist_ok=True)
            notebook = notebook_of(lesson, language_of(page))
            text = json.dumps(notebook, ensure_ascii=False, indent=1)
            target.write_text(text + "\n", encoding="utf-8")


def link(app, doctree) -> None:
    """A line under a lesson's title: its notebook, the glossary."""
    page = app.env.docname
    if not re.search(r"(^|/)tour/\d\d\w*$", page):
        return
    name, up = page.rpartition("/")[2], "../" * page.count("/")
    line = LINE[language_of(page)].format(
        link=f"<a href='{name}.ipynb' download>", glossary=f"<a href='{up}glossary.html'>"
    )
    title = next(iter(doctree.findall(nodes.title)))
    place = title.parent.index(title) + 1
    title.parent.insert(place, nodes.raw("", f"<p class='lesson-links'>{line}</p>", format="html"))


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("diagram", Diagram)
    app.connect("doctree-read", link)
    app.connect("build-finished", export)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
