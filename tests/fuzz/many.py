"""python -m tests.fuzz.many: many cases on GPUs, a look at a time in each of many processes.

A look is what selects code, and compiling it takes longer than its cases: no two processes compile
the same one. A process whose GPU context is lost ends its look, and the others go on.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .cached_cases import CACHED_LANES, cached_case
from .cached_run import run_cached
from .cases import case
from .lanes import LANES
from .run import run

# Of each lane on a GPU, how many cases a look has: 1,000 dense ones and 500 over caches
DENSE = {"hopper-cuda": 17, "portable-cuda": 17, "choice-cuda": 15}
CACHED = {"hopper-cuda": 10, "portable-cuda": 10}
FIRST = 4000  # round of seeds: those before are the tests'


class Job(NamedTuple):
    """The cases of one look."""

    kind: str  # "dense" or "cached"
    lane: str
    seeds: range
    stop: float  # a time after which no case begins
    device: int = 0  # the GPU, by its number


def outcomes_of(job: Job) -> tuple[Job, collections.Counter[str], list[str]]:
    """How many cases were right, refused, wrong or not begun, and what was wrong."""
    counts: collections.Counter[str] = collections.Counter()
    faults = []
    for seed in job.seeds:
        if time.time() > job.stop:
            counts["not begun"] += 1
            continue
        try:
            if job.kind == "cached":
                outcome = run_cached(cached_case(seed, CACHED_LANES[job.lane]))
            else:
                outcome = run(case(seed, LANES[job.lane]))
        except Exception as error:
            counts["raised"] += 1
            faults.append(f"{job.kind} {job.lane} seed {seed}: {error!r}")
            if "CUDA" in repr(error):  # nothing else runs in this process
                break
            continue
        if outcome.faults:
            faults.append(str(outcome))
        refused = getattr(outcome, "refused", None)
        counts["wrong" if outcome.faults else "refused" if refused else "right"] += 1
    return job, counts, faults


def on_its_device(job: Job) -> tuple[Job, collections.Counter[str], list[str]]:
    """The same on the job's GPU, in a process that has not used CUDA yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(job.device)
    return outcomes_of(job)


def jobs_until(stop: float, round_of_seeds: int = FIRST) -> Iterable[Job]:
    """A job for each look of each lane, in a fixed shuffled order."""
    jobs: list[Job] = []
    devices = torch.cuda.device_count()
    for kind, lanes, cases in (("dense", LANES, DENSE), ("cached", CACHED_LANES, CACHED)):
        for name, count in cases.items():
            looks = lanes[name].looks
            for look in range(looks):
                first = look + looks * round_of_seeds
                seeds = range(first, first + looks * count, looks)
                jobs.append(Job(kind, name, seeds, stop, len(jobs) % max(devices, 1)))
    random.Random(1).shuffle(jobs)
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.many", description=__doc__)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no case begins")
    parser.add_argument("--first", type=int, default=FIRST, help="round of seeds")
    options = parser.parse_args()
    totals: dict[str, collections.Counter[str]] = {}
    begin = time.time()
    jobs = jobs_until(begin + options.seconds, options.first)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, maxtasksperchild=1) as pool:
        for job, counts, faults in pool.imap_unordered(on_its_device, jobs):
            totals.setdefault(f"{job.kind} {job.lane}", collections.Counter()).update(counts)
            for fault in faults:
                print(fault, flush=True)
            print(f"{time.time() - begin:.0f} s: {job.kind} {job.lane}: {dict(counts)}", flush=True)
    for name, counts in sorted(totals.items()):
        print(f"{name}: {dict(counts)}")
    return 1 if any(counts["wrong"] or counts["raised"] for counts in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
