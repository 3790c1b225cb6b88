"""Times steps of decoding: each is held to fp64, then those of a case are interleaved.

On a GPU a step is the replay of a CUDA graph, as a server runs it. Its bytes come from memory and
not from the L2 cache: a graph holds one call for each of several caches, which together are larger
(`rotate`), or one call, and the L2 cache is flushed before it (`flush`). The flush leaves lines
behind that have to be written back while the call reads. On a CPU a step is a plain call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from tilewise import attention_reference
from tilewise.explain.steps import Decode
from tilewise.testing import tolerance

from .bandwidth import bandwidth
from .caches import (
    Cache,
    appended,
    appending,
    by_head,
    copies_of,
    is_cold,
    make_cache,
    make_queries,
    paged,
    quantised,
    queries_of,
)
from .check import Verdict
from .decode_table import lines_of
from .decoders import Absent, Decoder
from .graphs import Replayed
from .row import Row, Stamp
from .run import Outcome, Run, reason_of
from .timer import CallFailed, Clock, CudaClock, HostClock, Spread, cpu_clock, time_interleaved

Tensor = torch.Tensor
COLD = ("rotate", "flush")


class Plan(NamedTuple):
    """How a run is timed."""

    device: str
    rounds: int
    round_ms: float
    cold: str = COLD[0]

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def copies(self, of: Decode) -> int:
        """How many caches a call rotates over."""
        return copies_of(of) if self.on_gpu and self.cold == "rotate" else 1

    def coldness(self, of: Decode) -> str:
        """How the L2 cache was kept cold, for a row: "warm" where it was not; "none" on a CPU."""
        if not self.on_gpu:
            return "none"
        return "warm" if self.cold == "rotate" and not is_cold(of) else self.cold

    def clock(self, copies: int) -> Clock:
        """Milliseconds of one step, where a call is `copies` of them."""
        flush = {} if self.cold == "flush" else {"flush_bytes": 0}
        clock = CudaClock(self.device, **flush) if self.on_gpu else cpu_clock
        return lambda call, calls: [ms / copies for ms in clock(call, calls)]


class Ready(NamedTuple):
    """A step whose results are right, what is timed, and one eager call."""

    call: Callable[[], object]
    eager: Callable[[], Tensor]
    verdict: Verdict


Name = tuple[Decode, str]  # a step, and its decoder
Tried = dict[Name, Ready | Outcome[Decode]]


class Truth(NamedTuple):
    """The rows of a sequence in fp64 and as plain torch gives them in the inputs' precision."""

    row: int
    exact: Tensor
    plain: Tensor


class Stage:
    """The inputs that the steps of a case share: all have one batch, lengths, heads and dtype."""

    def __init__(self, of: Decode, plan: Plan, copies: int) -> None:
        self.of, self.plan, self.copies = of, plan, copies
        self.first = make_cache(of, plan.device)
        self.queries: dict[tuple[int, int], Tensor] = {}
        self.expected: dict[tuple[tuple[int, int], str], list[Truth]] = {}
        self.stored: dict[str, Cache] = {"": self.first}
        self.caches: dict[tuple[str, int, bool, int], list[Cache]] = {}

    def without_pages(self, kind: str) -> Cache:
        """The cache, or what it is in 8 bits."""
        if kind not in self.stored:
            self.stored[kind] = quantised(self.first, kind)
        return self.stored[kind]

    def cached(self, of: Decode, is_by_head: bool) -> list[Cache]:
        """The caches that a call rotates over."""
        key = of.cache, of.page_size, is_by_head, of.seqlen_q * of.appends
        if key not in self.caches:
            cache = self.without_pages(of.cache)
            cache = appending(cache.copy(), of) if of.appends else cache  # which calls write to
            cache = paged(cache, of.page_size) if of.page_size else cache
            cache = by_head(cache) if is_by_head else cache
            self.caches[key] = [cache, *(cache.copy() for _ in range(self.copies - 1))]
        return self.caches[key]

    def asked(self, of: Decode) -> tuple[Tensor, list[Truth]]:
        """Queries, and what is to come of them and of what the cache holds."""
        counts = of.seqlen_q, of.chunk
        if counts not in self.queries:
            self.queries[counts] = make_queries(of, self.plan.device)
        q, key = self.queries[counts], (counts, of.cache)
        if key not in self.expected:
            cache, seen = self.without_pages(of.cache), q
            if of.appends:
                seen, cache = appended(q, appending(cache, of))
            self.expected[key] = truth(of, seen, cache)
        return q, self.expected[key]


def truth(of: Decode, q: Tensor, cache: Cache) -> list[Truth]:
    """The first, the last, the longest and the shortest sequence, if they have queries."""
    lengths = of.sequences
    ends = max(lengths), min(lengths)
    found = []
    for row in sorted({0, of.batch - 1, *map(lengths.index, ends)}):
        if not of.queries[row]:
            continue
        asked, here = queries_of(of, q, row), (slice(row, row + 1), slice(lengths[row]))
        k, v = cache.k[here], cache.v[here]
        k_scale, v_scale = (
            x if x is None or x.dim() == 1 else x[here] for x in (cache.k_descale, cache.v_descale)
        )
        wide = (k, v) if of.cache else (k.double(), v.double())
        exact = attention_reference(
            asked.double(), *wide, causal=True, k_descale=k_scale, v_descale=v_scale
        )
        plain = attention_reference(
            *(asked, k, v), causal=True, k_descale=k_scale, v_descale=v_scale, upcast=False
        )
        found.append(Truth(row, cast(Tensor, exact), cast(Tensor, plain)))
    return found


def judge(of: Decode, outs: Iterable[Tensor], expected: list[Truth], is_ours: bool) -> Verdict:
    """Every result beside the truth. Peers are not held to our bound on the mean error."""
    verdicts = []
    for out in outs:
        for row, exact, plain in expected:
            held = tolerance.judge(queries_of(of, out, row), exact, plain)
            passes = held.ok if is_ours else held.max_error <= held.max_bound
            verdicts.append(Verdict(f"out: {held}", held.max_error, held.max_bound, passes))
    failed = [verdict for verdict in verdicts if not verdict.passes]
    return max(failed or verdicts, key=lambda one: one.max_error / (one.bound or 1))


def ready(of: Decode, decoder: Decoder, stage: Stage) -> Ready | Outcome[Decode]:
    """A step once it has been asked and checked, or why it is not timed."""
    try:
        attend = decoder.prepare(of, stage.plan.device)
        if of.cache and not decoder.has_eight_bits:
            raise Absent("it reads no cache of 8 bits beside queries of 16")
        q, expected = stage.asked(of)
        calls = [without_grad(attend, q, cache) for cache in stage.cached(of, decoder.by_head)]
        timed = Replayed(calls) if stage.plan.on_gpu else lambda: [call() for call in calls]
        verdict = judge(of, timed(), expected, decoder.is_ours)
    except Absent as absent:
        return Outcome(of, decoder.name, None, refused=str(absent))
    except Exception as error:  # whatever a peer raises is its reason
        return Outcome(of, decoder.name, None, refused=reason_of(error))
    if not verdict.passes:
        return Outcome(of, decoder.name, None, wrong=verdict.what)
    return Ready(timed, calls[0], verdict)


def without_grad(attend, q: Tensor, cache: Cache) -> Callable[[], Tensor]:
    """The call, where no gradient is wanted."""

    def call() -> Tensor:
        with torch.no_grad():
            return attend(q, cache)

    return call


def run_decode(
    cases: Iterable[Sequence[Decode]],
    decoders: Sequence[Decoder],
    *,
    device: str = "cpu",
    rounds: int = 5,
    round_ms: float = 30.0,
    cold: str = COLD[0],
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[list[Outcome[Decode]]]:
    """Checks and times the steps of each case, which differ in queries and pages alone. Rows are
    appended to `save` as each case ends.
    """
    plan, run = Plan(device, rounds, round_ms, cold), Run("decode", device, save, show)
    rates = bandwidth(device, rounds, round_ms)
    run.begin(rounds, "".join(f", {name} {rate:,.0f} GB/s" for name, rate in rates.items()))
    if not plan.on_gpu:
        show("a CPU: plain calls, host time among it, and a small cache stays in the CPU's own")
    done = []
    for steps in cases:
        outcomes = run_case(list(steps), decoders, plan, run.common, max(rates.values()))
        run.keep(outcomes, lines_of(outcomes, most_copies(steps, plan)))
        done.append(outcomes)
    return done


def most_copies(steps: Sequence[Decode], plan: Plan) -> int:
    """How many caches every call of a case rotates over: enough of the smallest."""
    return max(map(plan.copies, steps))


def run_case(
    steps: list[Decode], decoders: Sequence[Decoder], plan: Plan, common: Stamp, rate: float
) -> list[Outcome[Decode]]:
    """All steps of every decoder, in interleaved rounds; `rate` is the measured GB/s of memory."""
    if plan.on_gpu:
        torch.cuda.empty_cache()
    copies = most_copies(steps, plan)
    stage = Stage(steps[0]._replace(page_size=0, cache=""), plan, copies)
    tried: Tried = {}
    for decoder in decoders:
        own = steps if decoder.has_pages else [of._replace(page_size=0) for of in steps]
        for of in dict.fromkeys(own):
            tried[of, decoder.name] = ready(of, decoder, stage)
    times = time_steps(tried, "call", plan.clock(copies), plan)
    host = time_steps(tried, "eager", HostClock(plan.device), plan) if plan.on_gpu else {}
    outcomes = []
    for (of, name), one in tried.items():
        if isinstance(one, Ready):
            row = make_row(of, name, times[of, name], one.verdict, common, rate)
            extra = {**row.extra, "cold": plan.coldness(of)}
            if (of, name) in host:
                extra["host_us"] = Spread.of(host[of, name]).median * 1e3
            one = Outcome(of, name, dataclasses.replace(row, extra=extra))
        outcomes.append(one)
    return outcomes


def time_steps(tried: Tried, what: str, clock: Clock, plan: Plan) -> dict[Name, list[float]]:
    """Milliseconds by round of each that is ready; one that raises is left out, with the reason."""
    while True:
        calls = {key: getattr(one, what) for key, one in tried.items() if isinstance(one, Ready)}
        try:
            return time_interleaved(calls, clock=clock, rounds=plan.rounds, round_ms=plan.round_ms)
        except CallFailed as failed:
            of, name = failed.name
            tried[failed.name] = Outcome(of, name, None, refused=reason_of(failed.error))


def make_row(
    of: Decode, name: str, times: list[float], verdict: Verdict, common: Stamp, rate: float
) -> Row:
    """A step's row."""
    moved = of.kv_bytes / Spread.of(times).median * 1e-6
    extra = {"kv_bytes": of.kv_bytes, "gb_per_s": moved, "of_measured": moved / rate}
    return Row.of(common, of, name, times, verdict, flops=of.flops, extra=extra)
