"""Rows of eight GPUs (or of fewer), in one command of less than eight minutes.

    PYTHONPATH=src python -m benchmarks.eight_gpus --save rows.jsonl

First what GPUs alone can show: the memory that they share, its kind and its bandwidth, the barrier,
and the bits of `out` beside one GPU's. Then the rows that are asked for, in order of their weight,
each held to fp64 slices; no row begins after the time that is given. `--dry-run` does all of it on
CPU processes, on tiny sequences.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.exchange import publish_rows

from .bench.ranks import Tell, run_ranks, size_under_torchrun
from .bench.run import Outcome
from .bench.sharded import Sharded
from .bench.sharded_run import Timing, agreed, clock, run_cases, slowest

LIMIT_S = 420.0  # of the rows, so that the command ends within 8 minutes
OURS = ("tilewise:heads", "tilewise:stream")
RINGS = ("ring-flash-attn", "ring-flash-attn:fa3")
SIDES = (*OURS, *RINGS, "torch-cp")
OF_DOCUMENTS = (*OURS, *RINGS, "ring-flash-attn:by-head")
MIB = 1 << 20
TIMES = 10  # calls of one reading
SLOW_RATE = 5e14  # FLOPs a second of one H200, fewer than it makes


def cases_of(ranks: int, is_dry: bool) -> list[tuple[Sharded, tuple[str, ...]]]:
    """What is timed, and beside which sides."""
    dtype, unit = ("float32", 1) if is_dry else ("bfloat16", 1024)
    wide = (ranks, ranks // 2 or 1, 16) if is_dry else (64, 8, 128)
    heads = (2 * ranks, ranks, 16) if is_dry else (32, 8, 128)
    found = []
    for direction in ("fwd", "fwd+bwd"):
        more: dict[str, Any] = dict(direction=direction, dtype=dtype)
        each = (Sharded(ranks, tokens * unit, *heads, **more) for tokens in (8, 16, 64))
        found += [(of, SIDES) for of in each]
        packed = max(32, 256 // ranks) if is_dry else 8192
        documents = Sharded(ranks, packed, *wide, documents=16, **more)
        window = 64 // ranks if is_dry else (256 << 10) // ranks
        near = Sharded(ranks, window, *heads, window=4 if is_dry else 4096, **more)
        found += [(documents, OF_DOCUMENTS), (near, OURS)]
    for direction in ("fwd", "fwd+bwd"):
        tokens = 128 // ranks if is_dry else (1 << 20) // ranks
        whole = Sharded(ranks, tokens, *heads, direction=direction, dtype=dtype)
        found.append((whole, OURS))
    return found


def measure(tell: Tell, timing: Timing, limit_s: float, is_dry: bool) -> dict[str, Any]:
    """On each rank: the checks, then the rows."""
    begun, ranks = time.monotonic(), dist.get_world_size()
    found: dict[str, Any] = {"memory": checked_memory(tell, timing.device, is_dry)}
    found["wrong"] = checked_bits(tell, timing.device, is_dry)
    outcomes: list[list[Outcome[Sharded]]] = []
    for of, sides in cases_of(ranks, is_dry):
        left = limit_s - (time.monotonic() - begun)
        # One process's call is the longest: once for its results, and timed at least once
        needed = 0 if is_dry else 3 * of.flops / SLOW_RATE + 5
        if any(agreed("" if left > needed else "late")):
            tell(f"\n{of}: left out, {left:.0f} s are left and {needed:.0f} may be needed")
            continue
        how = timing._replace(sides=sides, case_s=max(left / 4, 1))
        outcomes += run_cases(_all_but_the_first(tell), [of], how)
    found["wrong"] += [f"{x.shape} {x.provider}: {x.wrong}" for y in outcomes for x in y if x.wrong]
    found["rows"] = [dataclasses.asdict(x.row) for y in outcomes for x in y if x.row is not None]
    tell(f"\n{len(found['rows'])} rows in {time.monotonic() - begun:.0f} s")
    return found


def _all_but_the_first(tell: Tell) -> Tell:
    """Where it runs is said once."""
    said: list[str] = []

    def told(line: str) -> None:
        if said:
            tell(line)
        said.append(line)

    return told


def checked_memory(tell: Tell, device: str, is_dry: bool) -> dict[str, Any]:
    """What the ranks' memory is, how fast it is pulled, and how long a barrier takes."""
    group, here = dist.group.WORLD, torch.device(device)
    if here.type == "cuda":
        here = torch.device("cuda", torch.cuda.current_device())
    arena = arena_of(group, here)
    ranks, rows = dist.get_world_size(), {}
    for mib in (1, 4) if is_dry else (4, 64, 256):
        x = torch.full((mib * MIB // 4,), float(dist.get_rank()), device=here)
        published = publish_rows(arena, f"{mib} MiB", [x], [x.numel()] * ranks)
        peers = [(dist.get_rank() - step) % ranks for step in range(1, ranks)] or [0]
        into = torch.empty_like(x)

        def pull(published=published, into=into, peers=peers) -> None:
            with arena.copying():
                for peer in peers:
                    into.copy_(published.pull(peer, 0))
                mark = arena.mark()
            arena.arrive(mark)

        pull()
        ms = clock(pull, TIMES, here.type)
        assert (into == peers[-1]).all(), "a peer's memory was not what it has published"
        rows[f"pull_{mib}_mib_gb_s"] = len(peers) * mib * MIB / slowest([ms])[0] / 1e6
    arena.meet("a barrier")
    ms = clock(lambda: arena.meet("a barrier"), TIMES, here.type)
    rows["barrier_us"] = slowest([ms])[0] * 1e3
    host = time.perf_counter()
    for _ in range(20):
        arena.meet("a barrier")
    rows["barrier_host_us"] = slowest([(time.perf_counter() - host) / 20 * 1e6])[0]
    rows["kind"] = type(arena.memory).__name__
    tell(", ".join(f"{k} {v:.4g}" if type(v) is float else f"{k} {v}" for k, v in rows.items()))
    return rows


def checked_bits(tell: Tell, device: str, is_dry: bool) -> list[str]:
    """`out` and `lse` of every method and layout beside one GPU's, to the bit, under causal masks
    and windows, with heads that share keys; and what is not.
    """
    ranks, wrong = dist.get_world_size(), []
    unit = 16 if is_dry else 4096
    dtype = torch.float32 if is_dry else torch.bfloat16
    seqlen, heads, headdim = 2 * ranks * unit, (2 * ranks, ranks), 16 if is_dry else 128
    draw = torch.Generator(device=device).manual_seed(1)
    shape: Any = dict(generator=draw, device=device)
    q = torch.randn(1, seqlen, heads[0], headdim, **shape).to(dtype)
    k, v = (torch.randn(1, seqlen, heads[1], headdim, **shape).to(dtype) for _ in range(2))
    layouts = td.zigzag(seqlen), td.contiguous(seqlen), td.striped(seqlen, block=unit // 2)
    window = (unit + unit // 3, 0)
    asked: list[dict[str, Any]] = [dict(causal=True), dict(causal=True, window=window), {}]
    for options in asked:
        expected = tilewise.attention(q, k, v, return_lse=True, **options)
        for layout in layouts:
            mine = [layout.shard(x) for x in (q, k, v)]
            for method in ("stream", "heads"):
                what = f"{method}, {layout.kind}, {options}"
                try:
                    given = dict(layout=layout, method=method, return_lse=True, **options)
                    found = td.attention(*mine, **given)
                    wanted = layout.shard(expected[0]), layout.shard(expected[1], 2)
                    same = list(map(torch.equal, found, wanted))
                    error = "" if all(same) else f"{what}: out, lse have one GPU's bits: {same}"
                except (RuntimeError, ValueError) as problem:
                    error = f"{what}: {type(problem).__name__}: {problem}"
                wrong += [f"rank {rank}: {x}" for rank, x in enumerate(agreed(error)) if x]
    tell("the same bits as one process" if not wrong else "\n".join(wrong[:12]))
    return wrong


@click.command()
@click.option("--ranks", type=click.IntRange(1), help="[default: the GPUs; in a dry run 8]")
@click.option("--dry-run", is_flag=True, help="On CPU processes.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--round-ms", default=100.0, show_default=True)
@click.option("--limit-s", default=LIMIT_S, show_default=True)
@click.option("--save", type=click.Path(dir_okay=False), help="Append the rows to this JSONL file.")
@click.option("--summary", type=click.Path(dir_okay=False), help="Write all that was found, JSON.")
def main(ranks, dry_run, rounds, round_ms, limit_s, save, summary) -> None:
    """Check, then measure one sequence over all GPUs of a machine. Exit code 1 where a result of
    ours is wrong.
    """
    on_gpu = torch.cuda.is_available() and not dry_run
    ranks = size_under_torchrun() or ranks or (torch.cuda.device_count() if on_gpu else 8)
    timing = Timing((), "cuda" if on_gpu else "cpu", rounds, round_ms, save)
    if not on_gpu and not dry_run:
        raise click.UsageError("no GPU is here: --dry-run takes CPU processes")
    found = run_ranks(measure, ranks, timing.device, timing, limit_s, dry_run, tell=click.echo)
    if found is None:
        return
    if summary:
        Path(summary).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ours = [x for x in found["wrong"] if "ring-flash-attn" not in x and "torch-cp" not in x]
    if ours:
        click.echo("\n".join(["", "wrong:", *ours[:20]]))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
