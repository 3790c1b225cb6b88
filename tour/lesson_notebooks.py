"""Lessons as Jupyter notebooks, and the tour's drawings, in English and in Chinese.

A notebook has a lesson's cells without what they print, and one before them that
finds a checkout of the project. What only the site understands is replaced: an
answer's source for its name, a picture for a drawing's.

A drawing of `diagrams` is one SVG for both languages: `zh.json` has the Chinese for
each of its texts.
"""

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

from lesson_cells import cells_of

TOUR = Path(__file__).resolve().parent
TEXT = re.compile(r"(?<=>)[^<>\n]+(?=</(?:text|title)>)")
NO_WORDS = re.compile(r"[\dT… .]+|SM \d+|warp \d|[ABC]|tl\.dot\(.*\)")
ANSWER = re.compile(
    r"```\{literalinclude\} /\.\./tour/(\S+)\n"
    r":pyobject: (\w+)\n:language: python\n```"
)
DIAGRAM = re.compile(r"```\{diagram\} (\w+)\n```")
FIND = {
    "en": "# In a checkout of tilewise: start Jupyter in its folder `tour`.",
    "zh-CN": "# 需要一份 tilewise 的源码：请在它的 `tour` 目录里启动 Jupyter。",
}
SETUP = """
import sys
from pathlib import Path

TOUR = Path(".")
assert (TOUR / "lesson").is_dir(), f"{TOUR.resolve()} has no folder `lesson`"
sys.path[:0] = [str(TOUR.resolve()), str(TOUR.resolve().parent / "src")]"""


def svg_of(name: str, language: str) -> str:
    """A drawing; KeyError for a text without its Chinese."""
    drawing = (TOUR / "diagrams" / f"{name}.svg").read_text(encoding="utf-8")
    if language == "en":
        return drawing
    chinese = json.loads(
        (TOUR / "diagrams" / "zh.json").read_text(encoding="utf-8")
    )

    def translated(found: re.Match[str]) -> str:
        return found[0] if NO_WORDS.fullmatch(found[0]) else chinese[found[0]]

    return TEXT.sub(translated, drawing)


def standalone(name: str, language: str) -> str:
    """The same with its style and a white ground, for use outside of the site."""
    style = (TOUR / "diagrams" / "diagrams.css").read_text(encoding="utf-8")
    ground = '<rect width="100%" height="100%" fill="white"/>'
    head = f"<style>{style}</style>{ground}<title>"
    return svg_of(name, language).replace("<title>", head, 1)


def notebook_of(lesson: str, language: str) -> dict[str, Any]:
    """A lesson in Jupyter's format."""
    cells = [code(FIND[language] + SETUP)]
    cells += [
        prose(cell.text, language) if cell.is_prose else code(cell.text)
        for cell in cells_of(lesson)
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02}"
    kernel = dict(display_name="Python 3", language="python", name="python3")
    metadata = dict(kernelspec=kernel, language_info=dict(name="python"))
    return dict(nbformat=4, nbformat_minor=5, metadata=metadata, cells=cells)


def code(text: str) -> dict[str, Any]:
    """A cell of code that has not run."""
    cell = dict(cell_type="code", metadata={}, source=lines_of(text))
    return cell | dict(execution_count=None, outputs=[])


def prose(text: str, language: str) -> dict[str, Any]:
    """A cell of Markdown, with its drawings attached."""
    drawings = DIAGRAM.findall(text)
    text = DIAGRAM.sub(r"![\1](attachment:\1.svg)", ANSWER.sub(answer, text))
    cell = dict(cell_type="markdown", metadata={}, source=lines_of(text))
    if drawings:
        attached = {f"{name}.svg": attachment(name, language) for name in drawings}
        cell["attachments"] = attached
    return cell


def attachment(name: str, language: str) -> dict[str, str]:
    """A drawing as a notebook carries it."""
    drawing = standalone(name, language).encode("utf-8")
    return {"image/svg+xml": base64.b64encode(drawing).decode("ascii")}


def answer(found: re.Match[str]) -> str:
    """The source of a function, with its decorators."""
    lines = (TOUR / found[1]).read_text(encoding="utf-8").splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if getattr(node, "name", None) == found[2]:
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            source = lines[first - 1 : node.end_lineno]
            return "\n".join(["```python", *source, "```"])
    raise ValueError(f"{found[1]} has no {found[2]}")


def lines_of(text: str) -> list[str]:
    """A cell's text as the format has it: lines that keep their ends."""
    return text.splitlines(keepends=True)
