"""A KV cache over several processes beside the whole one on each of them: one query decoded, which
is held to fp64 first. On GPUs a call is a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise import attention_reference
from tilewise.testing import tolerance
from tilewise.tile.split_kv import default_split_size

from .check import Verdict
from .ranks import Tell
from .row import Row, append, stamp
from .run import Outcome
from .sharded_run import ONE, Timing, agreed, timed
from .timer import ratio

Tensor = torch.Tensor
SHARDS = "tilewise:cache-shards"
PIECES = "tilewise:cache-shards:pieces"  # with the bits of one process
PAGE, PIECE = 16, 1024  # keys


class ShardedCache(NamedTuple):
    """A sequence of `keys`, a multiple of those of all ranks' pieces."""

    ranks: int
    keys: int
    nheads: int
    nheads_k: int
    headdim: int
    dtype: str = "bfloat16"
    direction: str = "decode"


def run_caches(
    tell: Tell, cases: Sequence[ShardedCache], timing: Timing
) -> list[list[Outcome[ShardedCache]]]:
    """Checks and times both sides of each case, on each rank of the default group."""
    common = stamp("distributed", timing.device)
    common["command"] = timing.command
    done = []
    for of in cases:
        calls = calls_of(of, timing.device)
        verdicts = {name: judge(of, call(), timing.device) for name, call in calls.items()}
        wrong = {
            name: [x for x in agreed("" if v.passes else v.what) if x]
            for name, v in verdicts.items()
        }
        times = timed(calls, timing)
        outcomes = []
        for name, ms in times.items():
            if wrong[name]:
                outcomes.append(Outcome(of, name, None, wrong=wrong[name][0]))
                continue
            share = ratio(times[ONE], ms)  # of one process's time
            extra = {} if name == ONE else {"of_one": share.median}
            row = Row.of(common, of, name, ms, verdicts[name], extra=extra)
            outcomes.append(Outcome(of, name, row, None if name == ONE else share))
        if dist.get_rank() == 0 and timing.save is not None:
            append(timing.save, [x.row for x in outcomes if x.row is not None])
        for x in outcomes:
            tell(f"{of.keys} keys, {of.ranks} ranks, {x.provider}: {said(x)}")
        done.append(outcomes)
    return done


def said(outcome: Outcome[ShardedCache]) -> str:
    """The time of a side, and what it is of one process's; or why there is none."""
    if outcome.row is None:
        return outcome.wrong or ""
    share = "" if outcome.ratio is None else f", {outcome.ratio.median:.3f} of one process"
    return f"{outcome.row.median_ms * 1e3:.1f} us{share}"


def calls_of(of: ShardedCache, device: str) -> dict[str, Callable[[], Tensor]]:
    """The call of one process, and that of all."""
    shards = td.CacheShards(PIECE)
    q, *whole = tensors_of(of, device)
    used = torch.tensor([of.keys], dtype=torch.int32, device=device)
    mine = [x.view(-1, PIECE, *x.shape[2:])[shards.rank :: of.ranks].flatten(0, 1) for x in whole]
    pages = [[x.view(-1, PAGE, *x.shape[-2:]) for x in kept] for kept in (whole, mine)]
    tables = [torch.arange(len(k), dtype=torch.int32, device=device)[None] for k, _ in pages]

    def one() -> Any:
        (k, v), table = pages[0], tables[0]
        return tilewise.attention(q, k, v, seqused_k=used, page_table=table, causal=True)

    def sharded(split_size: int | None = None) -> Any:
        (k, v), table = pages[1], tables[1]
        options: Any = dict(seqused_k=used, page_table=table, split_size=split_size)
        return shards.attention(q, k, v, causal=True, **options)

    in_pieces = functools.partial(sharded, default_split_size(of.nheads // of.nheads_k))
    calls = {ONE: one, SHARDS: sharded, PIECES: in_pieces}
    return {name: captured(x) for name, x in calls.items()} if device == "cuda" else calls


def captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of a call, once it was made. NCCL's other threads ask the driver meanwhile."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()

    def replay(kept: Any = (graph, call)) -> Tensor:
        kept[0].replay()
        return out

    return replay


def tensors_of(of: ShardedCache, device: str) -> list[Tensor]:
    """A query, and keys and values, the same on every rank."""
    draw = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, of.dtype)
    sizes = (1, of.nheads), (of.keys, of.nheads_k), (of.keys, of.nheads_k)
    return [
        torch.randn(1, rows, heads, of.headdim, generator=draw, device=device).to(dtype)
        for rows, heads in sizes
    ]


def judge(of: ShardedCache, out: Tensor, device: str) -> Verdict:
    """The error of `out` beside its bound, at the first key head's query heads."""
    group = of.nheads // of.nheads_k
    q, k, v = tensors_of(of, device)
    own = [q[:, :, :group], k[:, :, :1], v[:, :, :1]]
    exact: Any = attention_reference(*(x.double() for x in own))
    plain: Any = attention_reference(*own, upcast=False)
    held = tolerance.judge(out[:, :, :group], exact, plain)
    return Verdict(f"out: {held}", held.max_error, held.max_bound, held.ok)
