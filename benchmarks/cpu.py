"""`python -m benchmarks cpu`: the public functions on the CPU, beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
import torch
import torch.nn.functional as F

import tilewise
from tilewise.cli.options import IntList, NameList
from tilewise.explain.shapes import Shape

from .bench import run_suite
from .bench.providers import Attend, Provider
from .bench.standings import summary
from .options import conclude, round_options, save_options, show_with

DTYPES = ("float32", "bfloat16", "float16")
SEQLENS = "64,256,1k,4k,16k"
OURS = ("tilewise", "tilewise:sdpa")
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


def shapes(seqlens: Iterable[int], dtypes: Iterable[str]) -> list[Shape]:
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


@click.command()
@click.option("--seqlen", "seqlens", type=IntList(), default=SEQLENS, show_default=True)
@click.option("--dtype", "dtypes", type=NameList(lambda: DTYPES), default=",".join(DTYPES))
@round_options
@save_options
def cpu(seqlens, dtypes, rounds, round_ms, save, as_json) -> None:
    """The public functions on the CPU, compared with F.scaled_dot_product_attention.

    `tilewise` is `attention`, `tilewise:sdpa` the drop-in with torch's signature. All take views of
    (batch, seqlen, nheads, headdim) memory, as a projection gives it. Results are held to fp64
    first; an idle machine gives the best figures.
    """
    torch.manual_seed(0)
    outcomes = run_suite(
        shapes(seqlens, dtypes),
        PROVIDERS,
        suite="cpu",
        rounds=rounds,
        round_ms=round_ms,
        save=save,
        show=show_with(as_json),
    )
    conclude(outcomes, [summary(outcomes)], as_json, OURS)
