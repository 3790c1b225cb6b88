"""python -m tests.integrations.sweep: rows of classes, and the page of the docs."""

from __future__ import annotations

import argparse
import collections
import time

from .page import PAGE, page
from .rows import load, outcomes, save
from .run import apart, warm
from .subjects import subjects


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.sweep")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes again")
    parser.add_argument("--task", help="classes for this task again")
    parser.add_argument("--all", action="store_true", help="all classes, whatever is known")
    asked = parser.parse_args()
    rows, every = load(), subjects()
    wanted = asked.only or [
        name
        for name, subject in every.items()
        if asked.all or subject.task == asked.task or (not asked.task and name not in rows)
    ]
    warm()
    for name in wanted:
        start = time.perf_counter()
        rows[name] = row = apart(every[name])
        counts = collections.Counter(outcomes(row))
        print(name, dict(counts) or row, f"{time.perf_counter() - start:.1f} s", flush=True)
        save([rows[name] for name in every if name in rows])
    known = [rows[name] for name in every if name in rows]
    PAGE.write_text(page(known), "utf-8")


if __name__ == "__main__":
    main()
