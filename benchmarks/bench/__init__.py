"""Speed, measured side by side: correctness first, then interleaved rounds, then rows of JSON.

A figure is a ratio taken within one run. Absolute times drift by several percent from run to run,
so nothing is compared across runs, and nothing is timed that was not right at that very shape.
"""

from tilewise.explain.shapes import Shape

from .row import Row, append, load
from .run import run_suite
from .shapes import SUITES
from .timer import time_interleaved

__all__ = ["SUITES", "Row", "Shape", "append", "load", "run_suite", "time_interleaved"]
