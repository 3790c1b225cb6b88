"""The tour's lessons, which live in `tour/`, as pages of the site.

They are copied below docs/tour, where Sphinx looks, and run there by myst-nb. What they print is
kept under a hash of everything that they can see: the library, what lessons share, and the recorded
figures. So a page is never older than the code, and a build after a change of prose runs nothing.
A translation has the same code cells, so it finds what the original printed.

A lesson is a script, so its page shows what it prints and draws, and no value of a last line.
"""

import hashlib
import os
import shutil
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.directives.other import TocTree

ROOT = Path(__file__).resolve().parents[2]
PATTERN = "[0-9][0-9]_*.py"
IPYTHON = """c = get_config()
c.InteractiveShell.ast_node_interactivity = "none"
c.IPKernelApp.log_level = 40
"""


def seen_by_lessons(tour: Path) -> list[Path]:
    """The files on which a lesson's output depends, itself aside."""
    library = sorted(file for name in ("src", "benchmarks") for file in (ROOT / name).rglob("*.py"))
    shared = sorted(set(tour.glob("*.py")) - set(tour.glob(PATTERN)))
    return [*library, *shared, ROOT / "benchmarks" / "results" / "h200.jsonl"]


def fingerprint(files: list[Path]) -> str:
    """A hash of names and contents; a file that is not there counts, too."""
    found = hashlib.sha256(IPYTHON.encode())
    for file in files:
        found.update(file.name.encode() + b"\0")
        found.update(file.read_bytes() if file.exists() else b"none")
    return found.hexdigest()[:16]


def copy(tour: Path, to: Path) -> list[Path]:
    """Lessons as they stand in `tour`, and no others; equal files keep their time."""
    to.mkdir(exist_ok=True)
    wanted = {file.name: file for file in sorted(tour.glob(PATTERN))}
    for old in to.glob(PATTERN):
        if old.name not in wanted:
            old.unlink()
    for name, file in wanted.items():
        target = to / name
        if not target.exists() or target.read_bytes() != file.read_bytes():
            shutil.copyfile(file, target)
    return [to / name for name in wanted]


def prepare(app, config) -> None:
    """Before Sphinx looks for pages."""
    tour = Path(config.lessons_from) if config.lessons_from else ROOT / "tour"
    copy(tour, Path(app.srcdir) / "tour")
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
    """`{lessons}`: a toctree of the lessons beside a page; none is no mistake."""

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        names = sorted(file.stem for file in folder.glob(PATTERN))
        self.options["maxdepth"] = 1
        self.content = StringList(names, source=self.env.docname)
        # lessons come and go without a change of the page that lists them
        self.env.note_reread()
        return super().run() if names else [nodes.paragraph("", "…")]


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("lessons", Lessons)
    app.add_config_value("lessons_from", "", "env", str)
    # before myst-nb reads its configuration
    app.connect("config-inited", prepare, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
