"""Reads and runs the lessons of tour/: cells, exercises, and what a run leaves behind.

They run as on a machine without a GPU, on any machine.
"""

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "tour"
NAMES = [path.stem for path in sorted(FOLDER.glob("[0-9]*.py"))]
CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)
FOLDED = re.compile(r"<details><summary>Solution</summary>(.*?)</details>", re.DOTALL)
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Cell(NamedTuple):
    """One cell of a lesson; prose without its comment signs."""

    is_prose: bool
    text: str


class Ran(NamedTuple):
    """What became of a lesson."""

    module: ModuleType
    printed: str
    pictures: list[Path]


def source_of(name: str) -> str:
    """A lesson's text."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def cells_of(name: str) -> list[Cell]:
    """A lesson's cells, in order."""
    _, *parts = CELL.split(source_of(name))
    cells = []
    for mark, text in zip(parts[::2], parts[1::2]):
        is_prose = mark.strip() == "[markdown]"
        if is_prose:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        cells.append(Cell(is_prose, text.strip()))
    return cells


def prose_of(name: str) -> str:
    """All the prose of a lesson."""
    return "\n\n".join(cell.text for cell in cells_of(name) if cell.is_prose)


def code_of(name: str) -> str:
    """All the code of a lesson."""
    return "\n\n".join(cell.text for cell in cells_of(name) if not cell.is_prose)


def solutions_of(name: str) -> list[str]:
    """The code of each hidden solution, its fenced blocks joined."""
    return ["\n\n".join(FENCED.findall(folded + "\n")) for folded in FOLDED.findall(prose_of(name))]


def run_lesson(name: str, folder: Path, figures: type | None = None) -> Ran:
    """Runs a lesson, its pictures in `folder`; with `figures` in place of lesson.Figures."""
    with _pictures_in(folder), _figures_of(figures):
        module, printed = execute(FOLDER / f"{name}.py", f"tour_{name}")
    return Ran(module, printed, sorted(folder.glob("*.png")))


def solve(name: str, number: int, namespace: dict, folder: Path) -> str:
    """Runs a solution after its lesson and says what it printed.

    It goes through a file, because Triton reads the source of what it compiles.
    """
    path = folder / f"{name}_{number}.py"
    path.write_text(solutions_of(name)[number], encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _pictures_in(folder):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), dict(namespace))
    return printed.getvalue()


def execute(path: Path, called: str) -> tuple[ModuleType, str]:
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
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    import lesson
    import matplotlib

    lesson.ON_GPU, lesson.DEVICE = False, "cpu"  # tests see the same on any machine
    matplotlib.use("Agg")
    from matplotlib import pyplot

    before, lesson.PICTURES = lesson.PICTURES, folder
    try:
        yield
    finally:
        lesson.PICTURES = before
        pyplot.close("all")


@contextlib.contextmanager
def _figures_of(figures: type | None):
    import lesson

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
