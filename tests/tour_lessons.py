"""Lessons as modules: loaded, and their hidden solutions run behind them."""

import contextlib
import importlib.util
import io
import linecache
import re
import sys
import types
from pathlib import Path

import matplotlib

TOUR = Path(__file__).resolve().parents[1] / "tour"
matplotlib.use("Agg")


def load(name: str, pictures: Path, recorded: Path | None = None) -> tuple[types.ModuleType, str]:
    """A lesson as a module, and what it prints. `recorded` are rows in place of the recorded."""
    if str(TOUR) not in sys.path:
        sys.path.insert(0, str(TOUR))
    import lesson
    import matplotlib.pyplot as plt

    spec = importlib.util.spec_from_file_location(f"tour_{name}", TOUR / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = lesson.PICTURES, lesson.RECORDED
    lesson.PICTURES, lesson.RECORDED = pictures, recorded or lesson.RECORDED
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            spec.loader.exec_module(module)
    finally:
        lesson.PICTURES, lesson.RECORDED = before
        plt.close("all")
    return module, said.getvalue()


def solutions(name: str) -> list[str]:
    """The code of a lesson's hidden solutions."""
    lines = (TOUR / f"{name}.py").read_text(encoding="utf-8").splitlines()
    prose = "\n".join(re.sub(r"^# ?", "", line) for line in lines if line.startswith("#"))
    found = re.findall(
        r"<summary>Solution</summary>\n\n```python\n(.*?)```\n</details>", prose, re.S
    )
    assert len(found) == prose.count("<details>")
    return found


def solve(module: types.ModuleType, code: str, name: str) -> str:
    """Runs a solution in the lesson's namespace, and returns what it prints."""
    file = f"<solution of {name}>"
    linecache.cache[file] = len(code), None, code.splitlines(True), file  # kernels want source
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, file, "exec"), dict(vars(module)))
    return said.getvalue()
