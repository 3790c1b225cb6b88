"""python -m tests.fuzz: runs cases, and prints those that fail with what repeats them."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable

from .cached_cases import cached_case, cached_lane_of
from .cached_run import run_cached
from .cases import case
from .fp8_cases import fp8_case, run_fp8
from .lanes import lane_of
from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--backend", choices=("hopper", "portable", "cpu"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cache", action="store_true", help="calls with a KV cache")
    kind.add_argument("--fp8", action="store_true", help="calls with FP8 products")
    asked = parser.parse_args()
    if (asked.cache or asked.fp8) and asked.backend is None:
        parser.error("--cache and --fp8 want a --backend")
    outcome_of = _outcomes(asked)
    one = asked.seed is not None
    seeds = [asked.seed] if one else range(asked.first, asked.first + asked.cases)
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for seed in seeds:
        became, text = outcome_of(seed)
        counts[became] += 1
        if became == "failed" or one:
            print(text, flush=True)
        if sum(counts.values()) % 50 == 0:
            print(f"{sum(counts.values())} cases: {dict(counts)}", flush=True)
    print(f"{dict(counts)}, {time.perf_counter() - start:.0f} s")
    return 1 if counts["failed"] else 0


def _outcomes(asked: argparse.Namespace) -> Callable[[int], tuple[str, str]]:
    """What says what became of a seed's case, and prints it."""

    def of_fp8(seed: int) -> tuple[str, str]:
        one = fp8_case(seed, f"{asked.backend}-{asked.device}")
        faults = run_fp8(one)
        return ("failed" if faults else "right"), "\n    ".join(faults or [str(one)])

    def of_cache(seed: int) -> tuple[str, str]:
        outcome = run_cached(cached_case(seed, cached_lane_of(asked.backend, asked.device)))
        return ("failed" if outcome.faults else "right"), str(outcome)

    def of_training(seed: int) -> tuple[str, str]:
        outcome = run(case(seed, lane_of(asked.backend, asked.device)))
        became = "failed" if outcome.faults else "refused" if outcome.refused else "right"
        return became, f"{outcome} {outcome.refused}"

    return of_fp8 if asked.fp8 else of_cache if asked.cache else of_training


if __name__ == "__main__":
    sys.exit(main())
