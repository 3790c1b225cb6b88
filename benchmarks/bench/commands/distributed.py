"""`python -m benchmarks bench distributed`: one sequence over several processes."""

from __future__ import annotations

from typing import Any

import click

from tilewise.cli.options import DTYPES, IntList, NameList

from ...options import MASKS, HeadList, conclude, pass_option, run_options, show_with
from ..row import command

GPU = dict(tokens=(8192, 16384, 65536), heads=((32, 8, 128),), dtype="bf16")
CPU = dict(tokens=(64,), heads=((4, 2, 16),), dtype="fp32")


def _peers() -> tuple[str, ...]:
    from ..sharded_sides import PEERS

    return PEERS


@click.command()
@click.option(
    "--ranks", type=click.IntRange(1), help="Processes.  [default: the number of GPUs; on a CPU 2]"
)
@click.option("--tokens", type=IntList(), help="Per rank.  [default: 8k,16k,64k; on a CPU 64]")
@click.option("--heads", type=HeadList(), help="[default: 32:8x128; on a CPU 4:2x16]")
@click.option("--causal", type=click.Choice(list(MASKS)), default="yes", show_default=True)
@click.option(
    "--window", type=click.IntRange(0), default=0, help="Visible keys before a query's own."
)
@click.option("--documents", type=click.IntRange(0), default=0, help="How many, with Zipf lengths.")
@pass_option("fwd,fwd+bwd")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bf16; on a CPU fp32]")
@click.option(
    "--methods",
    type=NameList(lambda: ("heads", "stream", "ring", "nodes", "pairs"), may_be_empty=False),
    default="heads,stream",
    show_default=True,
)
@click.option(
    "--cache", type=IntList(), help="Decode over a cache of so many keys on all ranks instead."
)
@click.option(
    "--against",
    type=NameList(_peers),
    default="ring-flash-attn,torch-cp",
    show_default=True,
)
@run_options
def distributed(
    ranks, causal, window, documents, passes, methods, cache, against, device, as_json, **asked
) -> None:
    """Time attention for one sequence that is sharded across several processes.

    Starts one process per rank, or runs under torchrun. Times are for back-to-back calls on the
    slowest rank. "of ideal" is one process's time for the whole sequence, measured in the same
    rounds on all ranks at once, divided by the number of ranks times this time. Each result is
    checked against fp64 first; "same bits" names results bitwise equal to one process's.

    The method "nodes" is stream with each rank as a node of its own, between which keys travel by
    NCCL or gloo; "pairs" has two ranks in a node. Their ideal is no shorter than such a transfer
    takes alone.

    --cache decodes one query over a KV cache on all ranks (`CacheShards`), beside the whole cache
    on each: on GPUs in CUDA graphs.

    --documents splits the sequence into packed documents with Zipf lengths: proportional to
    1 / rank, in the same order in every run.

    ring-flash-attn is that package's zigzag ring over tilewise's kernel; with --documents it is its
    llama3 method for all key heads at once, and ring-flash-attn:by-head is that method head by
    head. ring-flash-attn:fa3 runs the package over FlashAttention-3. torch-cp is torch's
    context_parallel with cuDNN. On GPUs, NVLink multicast is off.
    """
    import torch

    from ..ranks import run_ranks, size_under_torchrun
    from ..sharded import Sharded
    from ..sharded_cache import ShardedCache, run_caches
    from ..sharded_run import Timing, run_cases

    on_gpu = device.startswith("cuda")
    ranks = size_under_torchrun() or ranks or (torch.cuda.device_count() if on_gpu else 2)
    usual: dict[str, Any] = GPU if on_gpu else CPU
    sizes = {name: asked.pop(name) or value for name, value in usual.items()}
    dtype = DTYPES[sizes["dtype"]]
    cases = [
        Sharded(
            *(ranks, tokens, nheads, nheads_k, headdim),
            *(is_causal, window, documents, direction, dtype),
        )
        for nheads, nheads_k, headdim in sizes["heads"]
        for tokens in sizes["tokens"]
        for is_causal in MASKS[causal]
        for direction in passes
    ]
    if wrong := [of for of in cases if of.direction == "bwd"]:
        raise click.UsageError(
            f"--pass, {wrong[0]}: a backward alone is not timed here; use fwd,fwd+bwd"
        )
    try:
        for of in cases:
            _ = of.starts
    except ValueError as error:
        raise click.UsageError(f"--documents {documents}: {error}") from error
    sides = (*(f"tilewise:{name}" for name in methods), *against)
    how = Timing(sides, "cuda" if on_gpu else "cpu", command=command(), **asked)
    show, run = show_with(as_json), run_cases
    if cache:
        heads = sizes["heads"]
        cases = [ShardedCache(ranks, keys, *x, dtype=dtype) for x in heads for keys in cache]
        run = run_caches
    done = run_ranks(run, ranks, how.device, cases, how, tell=show) or []
    outcomes = [outcome for each in done for outcome in each]
    conclude(outcomes, (), as_json, [name for name in sides if name.startswith("tilewise")])
