"""python -m tests.fuzz: runs cases, and prints those that fail with what repeats them."""

from __future__ import annotations

import argparse
import collections
import sys
import time

from .cases import case
from .lanes import lane_of
from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--backend", choices=("hopper", "portable", "cpu"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    lane = lane_of(asked.backend, asked.device)
    one = asked.seed is not None
    seeds = [asked.seed] if one else range(asked.first, asked.first + asked.cases)
    counts = collections.Counter()
    start = time.perf_counter()
    for seed in seeds:
        outcome = run(case(seed, lane))
        became = "failed" if outcome.faults else "refused" if outcome.refused else "right"
        counts[became] += 1
        if outcome.faults or one:
            print(outcome, outcome.refused, flush=True)
        if sum(counts.values()) % 50 == 0:
            print(f"{sum(counts.values())} cases: {dict(counts)}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{lane.name}: {dict(counts)}, {seconds:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
