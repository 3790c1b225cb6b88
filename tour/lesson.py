"""What the lessons share: where kernels run, how things are timed, where pictures go.

Every lesson runs on any machine. With a GPU its kernels are compiled, and its figures measured
there and then. Without one the kernels go through an interpreter, at sizes that it does in seconds,
and the figures are those that an NVIDIA H200 gave: `benchmarks/results/h200.jsonl`.

    python tour/01_vector_add.py                        # either way
    TILEWISE_RECORD=rows.jsonl python tour/01_vector_add.py    # on a GPU: keep what it measures
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tilewise.bench import row, timer
from tilewise.testing import interpret

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "h200.jsonl"
PICTURES = Path(os.environ.get("TILEWISE_PICTURES", "tour-pictures"))

sys.path.append(str(ROOT))  # of `benchmarks`, which two lessons import


def here(kernel: Any) -> Any:
    """A kernel as it runs here: compiled on a GPU, else interpreted on CPU tensors.

    `here(add_kernel)[grid](x, y, BLOCK=128)` launches it.
    """
    return kernel if ON_GPU else interpret(kernel)


class Figures:
    """The figures of one lesson: measured here if there is a GPU, else recorded ones."""

    def __init__(self, name: str) -> None:
        self.suite = f"tour/{name}"
        self._stamp = row.stamp(self.suite, "cuda") if ON_GPU else None
        self._clock = timer.clock_for("cuda") if ON_GPU else None
        known = row.load(RECORDED) if RECORDED.exists() else []
        self._known = [r for r in known if r.suite == self.suite]

    @property
    def machine(self) -> str:
        """Whose figures these are, for a picture's title."""
        if self._stamp:
            return f"{self._stamp['device']}, measured here"
        if not self._known:
            return "nothing recorded yet: run this lesson on a GPU"
        last = self._known[-1]
        return f"{last.device}, torch {last.torch}, Triton {last.triton}, recorded {last.date[:10]}"

    def times(
        self,
        shape: dict[str, Any],
        calls: Mapping[str, Callable[[], object]],
        flops: float = 0.0,
        rounds: int = 5,
        round_ms: float = 30.0,
    ) -> dict[str, float]:
        """The median milliseconds of each call, timed in turns; of recorded ones those there are.

        `shape` says what was timed, and finds it again. `flops` is the work of one call, and makes
        rows tell TFLOP/s.
        """
        if self._stamp is None:
            rows = [r for r in self._known if r.shape == shape]
            return {name: r.median_ms for name in calls for r in rows if r.provider == name}
        options = dict(clock=self._clock, rounds=rounds, round_ms=round_ms)
        found = {}
        for name, times in timer.time_interleaved(calls, **options).items():
            spread = timer.Spread.of(times)
            found[name] = spread.median
            self._keep(shape, name, spread, times, flops / spread.median * 1e-9)
        return found

    def value(self, shape: dict[str, Any], name: str, measure: Callable[[], float]) -> float | None:
        """A number that is no time (a size, a count, a share), or None where none was recorded."""
        if self._stamp is None:
            found = [r for r in self._known if r.shape == shape and r.provider == name]
            return found[-1].extra["value"] if found else None
        number = float(measure())
        self._keep(shape, name, timer.Spread(0.0, 0.0, 0.0), [0.0], 0.0, {"value": number})
        return number

    def _keep(self, shape, name, spread, rounds, tflops, extra=None) -> None:
        path = os.environ.get("TILEWISE_RECORD")
        if not path:
            return
        times = dict(median_ms=spread.median, p20_ms=spread.p20, p80_ms=spread.p80)
        fields = dict(shape=shape, provider=name, **times, rounds_ms=rounds, tflops=tflops)
        fields |= dict(max_error=None, bound=None, extra=extra or {})
        row.append(path, [row.Row(**self._stamp, **fields)])


def show(figure: Any, name: str) -> None:
    """Keeps a Matplotlib figure as a PNG; a notebook shows it, too."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"picture: {path}")
