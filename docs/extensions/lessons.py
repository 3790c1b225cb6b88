"""The tour's lessons, which live in `tour/`, as pages of the site, in English and in Chinese.

They are written below docs/tour and docs/zh/tour, where Sphinx looks, and run there by myst-nb. A
Chinese page is the English lesson with the prose of `tour/zh` (`tour/lesson_cells.py`). What
lessons print is kept under a hash of everything that they can see: the library, what lessons share,
and the recorded figures. So a page is never older than the code, and a build after a change of
prose runs nothing; a Chinese page has the same code cells, so it finds what the English one
printed.

A lesson is a script, so its page shows what it prints and draws, and no value of a last line.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from languages import language_of
from lesson_cells import PATTERN, as_pages, lesson_table, pages_of
from sphinx.directives.other import TocTree

ROOT = Path(__file__).resolve().parents[2]
IPYTHON = """c = get_config()
c.InteractiveShell.ast_node_interactivity = "none"
c.IPKernelApp.log_level = 40
"""


def seen_by_lessons(tour: Path) -> list[Path]:
    """The files on which a lesson's output depends, itself aside; some take another's kernel."""
    library = sorted((ROOT / "src").rglob("*.py"))
    shared = sorted([tour / "lesson_cells.py", *tour.glob("lesson/*.py")])
    texts = [path.read_text(encoding="utf-8") for path in tour.glob(PATTERN)]
    used = {name for text in texts for name in re.findall(r'definitions_of\("(\w+)"\)', text)}
    lessons = [tour / f"{name}.py" for name in sorted(used)]
    return [*library, *shared, *lessons, ROOT / "benchmarks" / "results" / "h200.jsonl"]


def fingerprint(files: list[Path]) -> str:
    """A hash of names and contents; a file that is not there counts, too."""
    found = hashlib.sha256(IPYTHON.encode())
    for file in files:
        found.update(file.name.encode() + b"\0")
        found.update(file.read_bytes() if file.exists() else b"none")
    return found.hexdigest()[:16]


def write(tour: Path, docs: Path) -> None:
    """The pages of the lessons in `tour`, and no others; equal files keep their time."""
    pages = pages_of(tour)
    for folder in (docs / "tour", docs / "zh" / "tour"):
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob(PATTERN), folder / "puzzles.md"):
            if old.relative_to(docs).as_posix() not in pages:
                old.unlink(missing_ok=True)
    for name, text in pages.items():
        target = docs / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def prepare(app, config) -> None:
    """Before Sphinx looks for pages."""
    tour = Path(config.lessons_from) if config.lessons_from else ROOT / "tour"
    write(tour, Path(app.srcdir))
    outputs = Path(app.srcdir) / "_build" / "outputs"
    cache = outputs / fingerprint(seen_by_lessons(tour))
    for old in outputs.glob("*"):
        if old != cache:
            shutil.rmtree(old)
    config.nb_execution_cache_path = str(cache)
    profile = Path(app.srcdir) / "_build" / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_config.py").write_text(IPYTHON, encoding="utf-8")
    os.environ["IPYTHONDIR"] = str(profile.parent)


class Lessons(TocTree):
    """`{lessons}`: the table of lessons of the tour's README, in the page's language.

    They are in the sidebar, too. No lessons are no mistake.
    """

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        names = sorted(file.stem for file in folder.glob(PATTERN))
        if (folder / "puzzles.md").exists():
            names.insert(sum(name < "03" for name in names), "puzzles")
        self.options["maxdepth"] = 1
        self.options["hidden"] = True
        self.content = StringList(names, source=self.env.docname)
        # lessons come and go without a change of the page that lists them
        self.env.note_reread()
        return [*self.table(), *super().run()] if names else [nodes.paragraph("", "…")]

    def table(self) -> list[nodes.Node]:
        """The table of lessons, and what the README says about it."""
        tour = Path(self.config.lessons_from or ROOT / "tour")
        chinese = language_of(self.env.docname) == "zh-CN"
        readme = tour / "zh" / "README.md" if chinese else tour / "README.md"
        self.env.note_dependency(str(readme))
        text = as_pages(lesson_table(readme.read_text(encoding="utf-8")))
        box = nodes.container()
        lines = StringList(text.splitlines(), source=str(readme))
        self.state.nested_parse(lines, self.content_offset, box)
        return box.children


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("lessons", Lessons)
    app.add_config_value("lessons_from", "", "env", str)
    # before myst-nb reads its configuration
    app.connect("config-inited", prepare, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
