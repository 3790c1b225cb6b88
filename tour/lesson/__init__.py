"""What the lessons share: where kernels run, figures, checks of answers.

Every lesson runs on any machine. With a GPU its kernels are compiled, and its
figures measured there and then. Without one the kernels run in an interpreter, at
sizes that it computes in seconds, and the figures are those that an NVIDIA H200
gave: `benchmarks/results/h200.jsonl`.

    python tour/01_vector_add.py                        # either way
    TILEWISE_RECORD=rows.jsonl python tour/01_vector_add.py    # on a GPU: keep what
    it measures

`pictures_NN` measures and draws what lesson NN shows; `solutions_NN` has an answer
to each of its exercises, and the check of any answer.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tilewise.testing import interpret, use_interpreter
from tilewise.testing.tolerance import assert_within as assert_within

from .exercises import Exercises as Exercises
from .exercises import NotYet as NotYet
from .exercises import expect as expect
from .progress import definitions_of as definitions_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RECORDED = (
    Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200.jsonl"
)
PICTURES = Path(os.environ.get("TILEWISE_PICTURES", "tour-pictures"))


def here(kernel: Any) -> Any:
    """A kernel as it runs here: compiled on a GPU, else interpreted on CPU tensors.

    `here(add_kernel)[grid](x, y, BLOCK=128)` launches it.
    """
    return kernel if ON_GPU else interpret(kernel)


def library_here() -> contextlib.AbstractContextManager:
    """Within it the library's kernels run here: compiled or interpreted."""
    return contextlib.nullcontext() if ON_GPU else use_interpreter()


def listing(*functions: Any) -> None:
    """Prints the source of functions that lie in other files: change them there."""
    print(*(inspect.getsource(getattr(x, "fn", x)) for x in functions), sep="\n")


def show(figure: Any, name: str) -> None:
    """Keeps a Matplotlib figure as a PNG; a notebook shows it, too."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"picture: {path}")


def recorded_rows(suite: str) -> list[dict[str, Any]]:
    """The rows of one suite in RECORDED."""
    if not RECORDED.exists():
        return []
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["suite"] == suite]


def machine_of(rows: list[dict[str, Any]]) -> str:
    """Where recorded figures are from, for a picture's title."""
    if not rows:
        return "nothing recorded yet: run this lesson on a GPU"
    last = rows[-1]
    versions = f"torch {last['torch']}, Triton {last['triton']}"
    return f"{last['device']}, {versions}, recorded {last['date'][:10]}"


# Lessons that were part of another one when their figures were recorded
RECORDED_IN = {
    "02b_tile_order": "02_matmul",
    "04b_from_1_to_2": "04_flash_attention",
}


class Figures:
    """The figures of one lesson: measured here on a GPU, else recorded ones."""

    def __init__(self, name: str) -> None:
        self.suite = f"tour/{name}"
        suites = {name, RECORDED_IN.get(name, name)}
        rows = [row for suite in suites for row in recorded_rows(f"tour/{suite}")]
        self._known = [] if ON_GPU else rows

    @property
    def machine(self) -> str:
        """Whose figures these are, for a picture's title."""
        if ON_GPU:
            return f"{torch.cuda.get_device_name()}, measured here"
        return machine_of(self._known)

    def times(
        self,
        shape: dict[str, Any],
        calls: Mapping[str, Callable[[], object]],
        flops: float = 0.0,
        rounds: int = 5,
        round_ms: float = 30.0,
    ) -> dict[str, float]:
        """The median milliseconds of each call; of recorded ones those there are.

        `shape` says what was timed, and finds it again. `flops` is the work of one
        call, and makes recorded rows tell TFLOP/s.
        """
        if not ON_GPU:
            rows = [row for row in self._known if row["shape"] == shape]
            return {
                n: row["median_ms"]
                for n in calls
                for row in rows
                if row["provider"] == n
            }
        found = {}
        for name, times in time_in_rounds(calls, rounds, round_ms).items():
            found[name] = statistics.median(times)
            self._keep(shape, name, times, flops / found[name] * 1e-9)
        return found

    def value(
        self, shape: dict[str, Any], name: str, measure: Callable[[], float]
    ) -> float | None:
        """A number that is no time, like a size; None where none was recorded."""
        if not ON_GPU:
            rows = [
                r
                for r in self._known
                if r["shape"] == shape and r["provider"] == name
            ]
            return rows[-1]["extra"]["value"] if rows else None
        number = float(measure())
        self._keep(shape, name, [0.0], 0.0, {"value": number})
        return number

    def _keep(
        self,
        shape: dict[str, Any],
        name: str,
        times: list[float],
        tflops: float,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Appends a row to the file that TILEWISE_RECORD names."""
        path = os.environ.get("TILEWISE_RECORD")
        if not path:
            return
        from benchmarks.bench import row

        fifths = statistics.quantiles(times * 2, n=5, method="inclusive")
        fields = dict(
            row.stamp(self.suite, DEVICE),
            shape=shape,
            provider=name,
            rounds_ms=times,
        )
        fields |= dict(
            median_ms=statistics.median(times), p20_ms=fifths[0], p80_ms=fifths[-1]
        )
        fields |= dict(tflops=tflops, max_error=None, bound=None, extra=extra or {})
        row.append(path, [row.Row(**fields)])


def time_in_rounds(
    calls: Mapping[str, Callable[[], object]], rounds: int, round_ms: float
) -> dict[str, list[float]]:
    """Milliseconds of each call, a median per round; each round has another order.

    `do_bench` warms up and clears the L2 cache before each call.
    """
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            times[name].append(
                do_bench(calls[name], round_ms / 3, round_ms, return_mode="median")
            )
    return times
