"""tilewise on the CPU beside `F.scaled_dot_product_attention`, through the public functions.

    python -m benchmarks.cpu                        # S 64 to 16 Ki; best on an idle machine
    python -m benchmarks.cpu --seqlen 64 256 --dtype float32 --rounds 15

Rows go to benchmarks/results/cpu.jsonl. `tilewise` is `attention`, `tilewise:sdpa` the drop-in with
torch's signature. All take views of (batch, seqlen, nheads, headdim) memory, as a projection gives
it. At each shape the results are held to fp64 before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise
from tilewise.explain.shapes import Shape

from .bench import run_suite
from .bench.providers import Attend, Provider
from .bench.standings import summary

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
DTYPES = ("float32", "bfloat16", "float16")
SEQLENS = (64, 256, 1024, 4096, 16384)
TOKENS = 1024  # in a batch of short sequences


def heads_first(function) -> Callable[[Shape, str], Attend]:
    """A function with torch's signature, on (batch, nheads, seqlen, headdim) views."""

    def prepare(shape: Shape, device: str) -> Attend:
        def attend(q, k, v):
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return function(q, k, v, is_causal=shape.causal).transpose(1, 2)

        return attend

    return prepare


def refuse(shape: Shape, device: str) -> str | None:
    return None


def refuse_slow_torch(shape: Shape, device: str) -> str | None:
    """torch's own backward in fp16 takes minutes at these lengths."""
    slow = shape.dtype == "float16" and shape.direction != "fwd" and shape.seqlen_q > 1024
    return "its fp16 backward takes minutes here" if slow else None


PROVIDERS = (
    "tilewise",
    Provider("tilewise:sdpa", refuse, heads_first(tilewise.scaled_dot_product_attention)),
    Provider("sdpa", refuse_slow_torch, heads_first(F.scaled_dot_product_attention)),
)


def shapes(seqlens: list[int], dtypes: list[str]) -> list[Shape]:
    """Self-attention of 8 heads of 64, and of 2 where the sequence is long."""
    return [
        Shape(
            direction=direction,
            batch=max(1, TOKENS // seqlen),
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            nheads=8 if seqlen <= 1024 else 2,
            nheads_k=8 if seqlen <= 1024 else 2,
            headdim=64,
            headdim_v=64,
            causal=causal,
            dtype=dtype,
        )
        for seqlen in seqlens
        for dtype in dtypes
        for causal in (False, True)
        for direction in ("fwd", "fwd+bwd")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, nargs="+", default=list(SEQLENS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=30.0)
    parser.add_argument("--save", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.manual_seed(0)
    outcomes = run_suite(
        shapes(asked.seqlen, asked.dtype),
        PROVIDERS,
        suite="cpu",
        device="cpu",
        rounds=asked.rounds,
        round_ms=asked.round_ms,
        save=asked.save,
    )
    print("\n" + summary(outcomes))


if __name__ == "__main__":
    main()
