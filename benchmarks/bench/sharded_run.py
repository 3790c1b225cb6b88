"""Times one sequence over several processes, as `sharded` holds it to fp64 first.

A time is that of the slowest rank, of calls back to back. Ideal is the time of one process for the
whole sequence, which all ranks run at once in the same rounds, divided by the number of ranks.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import tilewise.distributed as td
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.wire import Wire

from .check import Verdict
from .peers import Absent
from .ranks import Tell
from .row import Row, Stamp, append, stamp
from .run import Outcome, reason_of
from .sharded import Inputs, Results, Sharded, judge, make_inputs, one_process, results_of
from .sharded_sides import OURS, side
from .table import aligned, spread_of, why_not
from .timer import HostClock, Spread, order_of, ratio

Tensor = torch.Tensor
ONE = "one process"
MOST_CALLS = 20  # of a side in a round
# Of calls whose host time is taken: few, as the driver queues about 1,000 launches and then waits
HOST_MS, HOST_CALLS = 200.0, 5
SLOW_MS = 1000.0


class Timing(NamedTuple):
    """How a run is timed."""

    sides: tuple[str, ...]
    device: str
    rounds: int = 5
    round_ms: float = 30.0
    save: str | None = None
    command: str = ""  # that this is a run of: ranks are processes of their own
    case_s: float = 0.0  # of the rounds of a case: fewer are made where they take longer; 0: any


class Ready(NamedTuple):
    """A side whose results are right."""

    call: Callable[[], object]
    verdict: Verdict | None
    extra: dict[str, Any]


def run_cases(tell: Tell, cases: Iterable[Sharded], timing: Timing) -> list[list[Outcome[Sharded]]]:
    """Checks and times the sides of each case, on each rank of the default group. Rows are appended
    as each case ends.
    """
    common = stamp("distributed", timing.device)
    common["command"] = timing.command
    versions = "torch {torch}, triton {triton}".format_map(common)
    tell(f"{dist.get_world_size()} x {common['device']}, {versions}, {timing.rounds} rounds")
    done = []
    for of in cases:
        outcomes = run_case(of, timing, common)
        if dist.get_rank() == 0 and timing.save is not None:
            append(timing.save, [x.row for x in outcomes if x.row is not None])
        for line in lines_of(of, outcomes):
            tell(line)
        done.append(outcomes)
    return done


def run_case(of: Sharded, timing: Timing, common: Stamp) -> list[Outcome[Sharded]]:
    """All sides of a case, one process's first."""
    if of.ranks != dist.get_world_size():
        raise ValueError(f"{of} on a group of {dist.get_world_size()} ranks")
    whole = make_inputs(of, timing.device)
    with contextlib.ExitStack() as stack:
        ready: dict[str, Ready | Outcome[Sharded]] = {}
        call = one_process(of, timing.device)
        one = results_of(of, call, whole)
        ready[ONE] = Ready(caller(of, call, whole), None, {})
        for name in timing.sides:
            ready[name] = prepared(name, of, timing.device, whole, one, stack)
        del one
        calls = {name: x.call for name, x in ready.items() if isinstance(x, Ready)}
        times = timed(calls, timing)
        host = host_times(calls, times, timing)
    outcomes = []
    for name, x in ready.items():
        if isinstance(x, Ready):
            ideal = [max(t / of.ranks, x.extra.get("network_ms", 0.0)) for t in times[ONE]]
            spread = ratio(times[name], ideal)
            share = 1 if name == ONE else of.ranks  # of the FLOPs, on each GPU
            extra = x.extra if name == ONE else {**x.extra, "of_ideal": spread.median}
            if name in host:
                extra = extra | host[name]
            more: Any = dict(flops=of.flops / share, extra=extra)
            row = Row.of(common, of, name, times[name], x.verdict, **more)
            x = Outcome(of, name, row, None if name == ONE else spread)
        outcomes.append(x)
    return outcomes


def prepared(
    name: str,
    of: Sharded,
    device: str,
    whole: Inputs,
    one: Results,
    stack: contextlib.ExitStack,
) -> Ready | Outcome[Sharded]:
    """A side, once it was asked and checked on all ranks, or why it is not timed."""
    found: Any = None
    mine: Any = None
    reason, wrong = "", ""
    try:
        found = side(name, of, device, stack)
        mine = Inputs(*(found.layout.shard(x) for x in whole))
    except Absent as absent:
        reason = str(absent)
    except Exception as error:  # whatever a peer raises is its reason
        reason = reason_of(error)
    if reasons := [x for x in agreed(reason) if x]:
        return Outcome(of, name, None, refused=reasons[0])
    verdict, extra = Verdict("", 0.0, 0.0, True), {}
    try:
        results = results_of(of, found.call, mine)
        verdict = judge(of, results, found.layout, whole, one)
        pairs = [(x, y) for x, y in zip(results, one) if x is not None and y is not None]
        equal = [torch.equal(x, found.layout.shard(y)) for x, y in pairs]
        del results, pairs
        wrong = "" if verdict.passes else f"rank {dist.get_rank()}: {verdict.what}"
        extra = dict(peak(of, found.call, mine, name, found.layout), equal=equal)
    except Exception as error:
        reason = reason_of(error)
    if reasons := [x for x in agreed(reason) if x]:
        return Outcome(of, name, None, refused=reasons[0])
    if wrongs := [x for x in agreed(wrong) if x]:
        return Outcome(of, name, None, wrong=wrongs[0])
    each: list[Any] = [None] * of.ranks
    dist.all_gather_object(each, (verdict, extra))
    worst = max((x for x, _ in each), key=lambda x: x.max_error / (x.bound or 1))
    names = ("out", "dq", "dk", "dv")
    same = [all(row) for row in zip(*(y.pop("equal") for _, y in each))]
    together: dict[str, Any] = {key: max(y[key] for _, y in each) for key in each[0][1]}
    together["equal_to_one"] = [name for name, is_same in zip(names, same) if is_same]
    return Ready(caller(of, found.call, mine), worst, together)


def peak(of: Sharded, call: Any, mine: Inputs, name: str, layout: td.Layout) -> dict[str, Any]:
    """Bytes of one call: the most that torch's allocator held beside the inputs, and of our methods
    what was pulled, what the arena has, and what came from other nodes, with NCCL's time for it.
    """
    device = mine.q.device
    arena: Arena | None = None
    if name in OURS and of.ranks > 1:
        arena = arena_of(layout.group, device)
    pulled, received = (0, 0) if arena is None else (arena.pulled, arena.received)
    held = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    results_of(of, call, mine)
    found: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    if arena is not None:
        found |= {"pulled_bytes": arena.pulled - pulled, "arena_bytes": 2 * arena.room}
        if arena.nodes is not None:
            each = slowest([arena.received - received])
            found |= {
                "received_bytes": each[0],
                "network_ms": network_ms(each[0], layout.group, device),
            }
    return found


def network_ms(nbytes: float, group: Any, device: torch.device) -> float:
    """Milliseconds in which all ranks send so many bytes to the next one, the median."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = torch.zeros(2, int(nbytes), dtype=torch.uint8, device=device).unbind(0)

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    exchange()
    times = [clock(exchange, 2, device.type) for _ in range(5)]
    return Spread.of(slowest(times)).median


def caller(of: Sharded, call: Any, tensors: Inputs) -> Callable[[], object]:
    """What is timed."""
    return lambda: results_of(of, call, tensors)


def timed(calls: Mapping[str, Callable[[], object]], timing: Timing) -> dict[str, list[float]]:
    """For each side a time a round, in milliseconds: the slowest rank's, of calls back to back.

    Calls were made before, for their results. One that takes longer than SLOW_MS is timed at once;
    others are warmed up once more, as TorchScript compiles at the second call.
    """
    names = list(calls)
    first = slowest([clock(calls[name], 1, timing.device) for name in names])
    if max(first) < SLOW_MS:
        first = slowest([clock(calls[name], 2, timing.device) for name in names])
    each = [max(ms, 1e-6) for ms in first]
    counts = [int(min(max(timing.round_ms / ms, 1), MOST_CALLS)) for ms in each]
    rounds = timing.rounds
    if timing.case_s:
        one_round = sum(map(operator.mul, each, counts))
        rounds = min(rounds, max(1, int(timing.case_s * 1e3 / one_round)))
    found: dict[str, list[float]] = {name: [] for name in names}
    if max(first) >= SLOW_MS:
        found = {name: [ms] for name, ms in zip(names, first)}
        rounds -= rounds > 1
    count = dict(zip(names, counts))
    for number in range(rounds):
        for name in order_of(names, number):
            found[name].append(clock(calls[name], count[name], timing.device))
    return {name: slowest(times) for name, times in found.items()}


def clock(call: Callable[[], object], count: int, device: str) -> float:
    """Milliseconds a call, of calls that all ranks begin at the same time."""
    if not device.startswith("cuda"):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def host_times(
    calls: Mapping[str, Callable[[], object]], times: Mapping[str, list[float]], timing: Timing
) -> dict[str, dict[str, float]]:
    """For each side the microseconds until a call returns, of calls behind each other on an idle
    GPU: the median, of the slowest rank; and, if hosts meet, without the time in which a host waits
    for the others. None of calls so long that too few could be made.
    """
    if not timing.device.startswith("cuda"):
        return {}
    found, clock_host = {}, HostClock(timing.device)
    for name, call in calls.items():
        if HOST_CALLS * min(times[name]) <= HOST_MS:
            dist.barrier()
            with HostWaits() as waits:
                whole = clock_host(waits.noting(call), HOST_CALLS)
            own = [ms - waited for ms, waited in zip(whole, waits.of_calls)]
            found[name] = [Spread.of(x).median * 1e3 for x in (whole, own)]
    whole, own = (slowest([x[i] for x in found.values()]) for i in range(2))
    named = {name: dict(host_us=us, host_own_us=less) for name, us, less in zip(found, whole, own)}
    return {
        name: x if x["host_own_us"] < x["host_us"] else dict(host_us=x["host_us"])
        for name, x in named.items()
    }


class HostWaits:
    """Milliseconds that this host waits for others at their barriers: from when it first finds that
    another has not come until it has.
    """

    def __init__(self) -> None:
        self.of_calls: list[float] = []
        self.ms, self.since = 0.0, 0.0

    def __enter__(self) -> HostWaits:
        hear = Wire.hear

        def timed(wire: Wire, rank: int, word: bytes) -> bytes | None:
            other = hear(wire, rank, word)
            if other is None:
                self.since = self.since or time.perf_counter()
            elif self.since:
                self.ms += (time.perf_counter() - self.since) * 1e3
                self.since = 0.0
            return other

        self.patch = mock.patch.object(Wire, "hear", timed)
        self.patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.stop()

    def noting(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, which notes what it has waited."""

        def noted() -> None:
            before = self.ms
            call()
            self.of_calls.append(self.ms - before)

        return noted


def slowest(times: Sequence[float]) -> list[float]:
    """The largest of all ranks at each place."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, list(times))
    return [max(row) for row in zip(*each)]


def agreed(what: str) -> list[str]:
    """What each rank has to say."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, what)
    return each


def lines_of(of: Sharded, outcomes: Sequence[Outcome[Sharded]]) -> list[str]:
    """The lines of a case; a rate is that of each GPU."""
    head = ("", "ms", "p20-p80", "TFLOP/s", "error", "bound", "same bits", "host us", "of ideal")
    rows: list[tuple[str, ...]] = [head]
    for outcome in outcomes:
        if (row := outcome.row) is None:
            rows.append((f"  {outcome.provider}", why_not(outcome)))
            continue
        own = Spread(row.median_ms, row.p20_ms, row.p80_ms)
        errors = ("", "") if row.bound is None else (f"{row.max_error:.2g}", f"{row.bound:.2g}")
        same = ",".join(row.extra.get("equal_to_one", ())) or "-"
        share = spread_of(outcome.ratio) if outcome.ratio else ""
        ms = f"{own.median:.4g}", f"{own.p20:.4g}-{own.p80:.4g}", f"{row.tflops:.4g}"
        host = f"{row.extra['host_us']:.0f}" if "host_us" in row.extra else "-"
        if "host_own_us" in row.extra:
            host += f" ({row.extra['host_own_us']:.0f} own)"
        rows.append((f"  {outcome.provider}", *ms, *errors, same, host, share))
    return [f"\n{of}", *aligned(rows)]
