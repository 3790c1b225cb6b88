"""How long the first call of a process takes: with an empty kernel cache, and with a warm one.

    PYTHONPATH=src python benchmarks/cold.py --save benchmarks/results/cold.jsonl

Each round is a process of its own. The clock starts when torch is imported, the GPU and autograd
are awake and the inputs are there, and stops when the results are: importing tilewise and Triton is
in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tilewise.bench.row import Row, append, stamp
from tilewise.bench.shapes import square
from tilewise.bench.timer import Spread

CHILD = """
import json, time, torch
shape = (1, 1024, 16, 128)
q, k, v = (
    torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
)
torch.ones(8, device="cuda", requires_grad=True).add(1).sum().backward()
torch.cuda.synchronize()
times = [time.perf_counter()]
import tilewise
out = tilewise.attention(q, k, v, causal=True)
torch.cuda.synchronize()
times.append(time.perf_counter())
torch.autograd.grad(out, (q, k, v), out)
torch.cuda.synchronize()
times.append(time.perf_counter())
print(json.dumps([(b - a) * 1e3 for a, b in zip(times, times[1:])]))
"""


def first_calls(cache: str) -> list[float]:
    """Milliseconds of the first forward and the first backward of a new process."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save")
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {"empty": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            times["empty"].append(first_calls(cache))
            times["warm"].append(first_calls(cache))
    common = stamp("cold", "cuda")
    for cache, rounds in times.items():
        for place, direction in enumerate(("fwd", "bwd")):
            own = [pair[place] for pair in rounds]
            spread = Spread.of(own)
            print(f"{cache} cache, first {direction}: {spread.median / 1e3:.2f} s")
            row = Row(
                **common,
                shape=square(direction, 1024, 128, True, tokens=1024)._asdict(),
                provider="tilewise",
                median_ms=spread.median,
                p20_ms=spread.p20,
                p80_ms=spread.p80,
                rounds_ms=own,
                tflops=0.0,
                max_error=None,
                bound=None,
                extra={"cache": cache},
            )
            if options.save:
                append(options.save, [row])


if __name__ == "__main__":
    main()
