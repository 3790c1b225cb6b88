"""Reads and runs the lessons of tour/: their cells, and what a run leaves behind.

They run as on a machine without a GPU, on any machine.
"""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tour"
NAMES = [path.stem for path in sorted(FOLDER.glob("[0-9]*.py"))]
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

import lesson  # noqa: E402
from lesson_cells import Cell, cells_of  # noqa: E402

lesson.ON_GPU, lesson.DEVICE = False, "cpu"  # before a lesson's helpers read them


class Ran(NamedTuple):
    """What became of a lesson."""

    module: ModuleType
    printed: str
    pictures: list[Path]
    on_page: int  # pictures that a notebook would show: those left open


def source_of(name: str) -> str:
    """A lesson's text."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def lesson_cells(name: str) -> list[Cell]:
    """A lesson's cells, in order."""
    return cells_of(source_of(name))


def prose_of(name: str) -> str:
    """All the prose of a lesson."""
    return "\n\n".join(cell.text for cell in lesson_cells(name) if cell.is_prose)


def code_of(name: str) -> str:
    """All the code of a lesson, its code cells from the first to the last."""
    return "\n\n\n".join(cell.text for cell in lesson_cells(name) if not cell.is_prose) + "\n"


def number_of(name: str) -> str:
    """The number of a lesson, as 02 or 02b."""
    return name.partition("_")[0]


def helper(name: str, kind: str) -> ModuleType:
    """The module `lesson.pictures_NN` or `lesson.solutions_NN` of a lesson."""
    return importlib.import_module(f"lesson.{kind}_{number_of(name)}")


def run_in_new_process(name: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a lesson's code cells alone, with the answers to its exercises, in a process that has
    imported nothing; pictures go to `folder`. Triton reads kernels from their file, so the cells
    are in one.
    """
    cells = folder / f"cells_{name}.py"
    cells.write_text(code_of(name), encoding="utf-8")
    clean = {key: x for key, x in os.environ.items() if not key.startswith(("PYTHON", "TILEWISE"))}
    env = dict(TILEWISE_PICTURES=str(folder), MPLBACKEND="Agg", TOUR_ANSWERS="1") | env
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(FOLDER)])
    command = [sys.executable, str(cells)]
    return subprocess.run(command, env=clean | env, cwd=folder, capture_output=True, text=True)


def defined_in(name: str, what: str, folder: Path) -> ModuleType:
    """A lesson's first code cell and the one that defines `what`, as a module."""
    first, *others = [cell.text for cell in lesson_cells(name) if not cell.is_prose]
    (cell,) = [text for text in others if f"def {what}(" in text]
    path = folder / f"{name}_{what}.py"
    path.write_text(f"{first}\n\n\n{cell}\n", encoding="utf-8")
    return _execute(path, path.stem)[0]


def run_lesson(name: str, folder: Path, figures: type | None = None) -> Ran:
    """Runs a lesson as a module of this process, for tests of what it defines: its pictures in
    `folder`, with `figures` in place of lesson.Figures.
    """
    with _pictures_in(folder) as pyplot, _figures_of(figures):
        module, printed = _execute(FOLDER / f"{name}.py", f"tour_{name}")
        on_page = len(pyplot.get_fignums())
    return Ran(module, printed, sorted(folder.glob("*.png")), on_page)


def _execute(path: Path, called: str) -> tuple[ModuleType, str]:
    """A file as a module, and what it printed."""
    spec = importlib.util.spec_from_file_location(called, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # records look their module up
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        spec.loader.exec_module(module)
    return module, printed.getvalue()


@contextlib.contextmanager
def _pictures_in(folder: Path):
    """Figures are drawn without a screen, into `folder`, and closed afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    before, lesson.PICTURES = lesson.PICTURES, folder
    try:
        yield pyplot
    finally:
        lesson.PICTURES = before
        pyplot.close("all")


@contextlib.contextmanager
def _figures_of(figures: type | None):
    before = lesson.Figures
    lesson.Figures = figures or before
    try:
        yield
    finally:
        lesson.Figures = before


class Invented:
    """Stands for recorded figures, so that what a lesson does with them can be seen. A test's only:
    no lesson shows these.
    """

    machine = "invented by a test"

    def __init__(self, name: str) -> None:
        self.asked: list[dict] = []

    def times(self, shape, calls, *args, **options) -> dict[str, float]:
        """1 ms for the first call, 2 for the second."""
        self._ask(shape)
        return {name: 1.0 + number for number, name in enumerate(calls)}

    def value(self, shape, name, measure) -> float:
        """Any number but zero."""
        self._ask(shape)
        return 2.0

    def _ask(self, shape) -> None:
        assert json.loads(json.dumps(shape)) == shape, "rows are found again by their shape"
        self.asked.append(shape)


class Called(Invented):
    """Invented figures of calls that were made once, so that what a GPU will time is seen to run:
    interpreted, at the sizes that a machine without one has.
    """

    def times(self, shape, calls, *args, **options) -> dict[str, float]:
        """Calls what is callable here."""
        for call in calls.values():
            if call is not None:
                call()
        return super().times(shape, calls, *args, **options)
