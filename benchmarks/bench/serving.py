"""Times the steps of a server: every provider runs each step of one schedule, on one paged cache.

A step is what an engine waits for: its tensors are copied to the device, its layers are computed,
and the device is waited for. On a GPU a step of decodes is the replay of a CUDA graph for the next
size of batch; steps with chunks of prompts are launched one by one. The host's planning, which all
providers share, is done before. Providers follow each other step by step, in balanced orders.

First every provider runs the schedule once and is held to fp64 wherever a step's shape is new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from tilewise import attention_reference
from tilewise.integrations.engines import Step as Call
from tilewise.testing import tolerance

from .caches import CHECKED
from .check import Verdict
from .graphs import Replayed
from .peers import Absent
from .row import Row
from .run import Outcome, Run, reason_of
from .servers import Pages, Server, ServerKind
from .serving_steps import Plan, Serving, Step, padded, plan_of
from .standings import counted
from .table import aligned, why_not
from .timer import order_of

Tensor = torch.Tensor


class Weights(NamedTuple):
    """A layer's matrices."""

    qkv: Tensor
    o: Tensor
    up: Tensor  # gate and up
    down: Tensor


class Last(NamedTuple):
    """What the last layer of a step was given, and its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class Model:
    """What providers share: weights, the paged cache of each layer, and the tensors of a step."""

    def __init__(self, of: Serving, plan: Plan, device: str) -> None:
        self.of, self.device, self.on_gpu = of, device, device.startswith("cuda")
        dtype = getattr(torch, of.dtype)
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int, size: float = 1.0) -> Tensor:
            x = torch.empty(shape, dtype=dtype, device=device)
            return x.normal_(std=size, generator=generator)

        def weights() -> Weights:
            wide = (of.nheads + 2 * of.nheads_k) * of.headdim
            sizes = (of.hidden, wide), (of.hidden, of.hidden), (of.hidden, 2 * of.intermediate)
            matrices = [normal(*size, size=of.hidden**-0.5) for size in sizes]
            down = normal(of.intermediate, of.hidden, size=of.intermediate**-0.5)
            return Weights(*matrices, down=down)

        self.weights = [weights() for _ in range(of.layers if of.part == "model" else 0)]
        # K and V of a row side by side, as vLLM keeps them
        shape = plan.pages, of.page_size, of.nheads_k, 2 * of.headdim
        pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(of.layers)]
        self.caches = [Pages(*pool.split(of.headdim, -1)) for pool in pools]
        tokens = max(of.chunk, max(step.rows for step in plan.steps))
        self.tokens = normal(tokens, of.hidden)
        heads = of.nheads + 2 * of.nheads_k
        self.heads = normal(tokens, heads, of.headdim)

    def step(self, server: Server, call: Call, slots: Tensor) -> Last:
        """All layers; without weights each has the same queries, keys and values."""
        of, tokens = self.of, len(slots)
        x, heads = self.tokens[:tokens], self.heads[:tokens]
        counts = [of.nheads, of.nheads_k, of.nheads_k]
        last = None
        for cache, weights in zip_longest(self.caches, self.weights):
            if weights is not None:
                heads = (F.rms_norm(x, x.shape[-1:]) @ weights.qkv).unflatten(-1, (-1, of.headdim))
            q, k, v = heads.split(counts, 1)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            server.append(cache, k, v, slots)
            server.attend(q, cache, call, out)
            if weights is not None:
                x = x + out.flatten(1) @ weights.o
                gate, up = (F.rms_norm(x, x.shape[-1:]) @ weights.up).chunk(2, -1)
                x = x + (F.silu(gate) * up) @ weights.down
            last = Last(q, k, v, out)
        return cast(Last, last)


class Inputs:
    """A step's tensors on the device, which a graph reads."""

    def __init__(self, like: Step, device: str) -> None:
        self.tensors = [torch.empty_like(x, device=device) for x in like[:4]]
        starts, used, table, self.slots = self.tensors
        asked = dict(seqused_k=used, page_table=table, max_seqlen_q=like.most_queries)
        self.call = Call(starts, **cast(dict[str, Any], asked))

    def fill(self, step: Step) -> None:
        """Copies a step from the host, and does not wait for it."""
        for x, given in zip(self.tensors, step[:4]):
            x.copy_(given, non_blocking=True)


class Loop:
    """A provider's steps: graphs of decodes by their size, and steps that are launched."""

    def __init__(self, model: Model, server: Server) -> None:
        self.model, self.server = model, server
        self.graphs: dict[int, tuple[Inputs, Callable[[], Sequence[Last]]]] = {}

    @torch.no_grad()
    def run(self, step: Step) -> Last:
        """The step, launched; rows that fill a graph have results, too."""
        if not self.model.on_gpu or not step.is_decode:
            inputs = Inputs(step, self.model.device)
            inputs.fill(step)
            return self.model.step(self.server, inputs.call, inputs.slots)
        if step.rows not in self.graphs:
            self.graphs[step.rows] = self.captured(step)
        inputs, replay = self.graphs[step.rows]
        inputs.fill(step)
        return replay()[0]

    def captured(self, step: Step) -> tuple[Inputs, Callable[[], Sequence[Last]]]:
        """The graph of as many requests. What it writes before it is replayed for a step is what
        that step writes.
        """
        inputs = Inputs(step, self.model.device)
        inputs.fill(step)
        call: Any = lambda: self.model.step(self.server, inputs.call, inputs.slots)  # noqa: E731
        replay: Any = Replayed([call])
        return inputs, replay

    def time(self, step: Step) -> float:
        """Milliseconds until the device has done it."""
        begun = time.perf_counter()
        self.run(step)
        if self.model.on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e3


def sizes_of(steps: Iterable[Step]) -> list[int]:
    """Sizes of the graphs of decodes: powers of two, up to 8 in each."""
    most = max((step.rows for step in steps if step.is_decode), default=1)
    return [1, 2, 4, *range(8, most + 8, 8)]


def ready(step: Step, sizes: Sequence[int], *, on_gpu: bool) -> Step:
    """The step as it is copied: on a GPU, decodes fill a graph, and memory is pinned."""
    if not on_gpu:
        return step
    if step.is_decode:
        step = padded(step, next(size for size in sizes if size >= step.rows))
    return Step(*(x.pin_memory() for x in step[:4]), most_queries=step.most_queries)


def check(loop: Loop, step: Step, real: Step, is_ours: bool) -> Verdict:
    """Runs a step: what the last layer wrote to its cache, and its result beside fp64 for the
    requests with the most and the fewest keys.
    """
    cache, slots = loop.model.caches[-1], real.slots.to(loop.model.device)
    rows = [x.flatten(0, 1) for x in cache]
    for x in rows:
        x[slots] = 0
    last = loop.run(step)
    for x, given in zip(rows, (last.k, last.v)):
        if not torch.equal(x[slots], given[: len(slots)]):
            return Verdict("append: a row is not what was given", 1.0, 0.0, False)
    used, starts = real.used.tolist(), real.starts.tolist()
    found = []
    for row in {used.index(max(used)), used.index(min(used))}:
        begin = max(starts[row], starts[row + 1] - CHECKED)
        q, out = (x[begin : starts[row + 1]].unsqueeze(0) for x in (last.q, last.out))
        table = real.table[row, : -(-used[row] // loop.model.of.page_size)].long()
        k, v = (x[table.to(x.device)].flatten(0, 1)[None, : used[row]] for x in cache)
        exact = attention_reference(q.double(), k.double(), v.double(), causal=True)
        plain = attention_reference(q, k, v, causal=True, upcast=False)
        held = tolerance.judge(out, cast(Tensor, exact), cast(Tensor, plain))
        passes = held.ok if is_ours else held.max_error <= held.max_bound
        found.append(Verdict(f"out: {held}", held.max_error, held.max_bound, passes))
    return max(found, key=lambda one: (not one.passes, one.max_error / (one.bound or 1)))


def checked(loop: Loop, steps: Sequence[Step], real: Sequence[Step], is_ours: bool) -> Verdict:
    """Runs all steps and returns the worst verdict. Shapes that are checked: each size of a graph,
    the first chunk, the last step, and each that has more rows or more queries than those before.
    """
    worst, seen, rows, queries = None, set(), 0, 0
    for number, (step, own) in enumerate(zip(steps, real, strict=True)):
        is_new = step.rows not in seen if step.is_decode else own.rows > rows
        is_new |= step.most_queries > queries or number == len(steps) - 1
        if not is_new:
            loop.run(step)
            continue
        if step.is_decode:
            seen.add(step.rows)
        else:
            rows = max(rows, own.rows)
        queries = max(queries, step.most_queries)
        verdict = check(loop, step, own, is_ours)
        if not verdict.passes:
            return verdict
        if worst is None or verdict.max_error / verdict.bound > worst.max_error / worst.bound:
            worst = verdict
    return cast(Verdict, worst)


def run_serving(
    cases: Iterable[Serving],
    kinds: Sequence[ServerKind],
    *,
    device: str = "cpu",
    rounds: int = 3,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Outcome[Serving]]:
    """Checks and times each load. Rows are appended to `save` as each ends."""
    run = Run("serving", device, save, show)
    run.begin(rounds)
    outcomes = []
    for of in cases:
        done = list(run_case(of, kinds, run, device, rounds))
        run.keep(done, lines_of(done))
        outcomes += done
    return outcomes


def run_case(
    of: Serving, kinds: Sequence[ServerKind], run: Run, device: str, rounds: int
) -> Iterator[Outcome[Serving]]:
    """An outcome for each provider."""
    plan = plan_of(of)
    model = Model(of, plan, device)
    sizes = sizes_of(plan.steps)
    steps = [ready(step, sizes, on_gpu=model.on_gpu) for step in plan.steps]
    run.show(f"\n{of}: {len(steps)} steps, {plan.tokens:,} tokens")
    loops: dict[str, Loop] = {}
    verdicts: dict[str, Verdict] = {}
    for kind in kinds:
        begun = time.perf_counter()
        try:
            loop = Loop(model, kind.prepare(of, device))
            verdict = checked(loop, steps, plan.steps, kind.is_ours)
        except Absent as absent:
            yield Outcome(of, kind.name, None, refused=str(absent))
        except Exception as error:  # whatever a peer raises is its reason
            yield Outcome(of, kind.name, None, refused=reason_of(error))
        else:
            if verdict.passes:
                loops[kind.name], verdicts[kind.name] = loop, verdict
                seconds = time.perf_counter() - begun
                run.show(f"  {kind.name}: compiled and checked in {seconds:.0f} s")
            else:
                yield Outcome(of, kind.name, None, wrong=verdict.what)
    times = time_steps(loops, steps, rounds, show=run.show)
    for name, each in times.items():
        extra = {**figures_of(each, plan), "graphs": sorted(loops[name].graphs)}
        totals = [sum(one) for one in each]
        yield Outcome(of, name, Row.of(run.common, of, name, totals, verdicts[name], extra=extra))


def time_steps(
    loops: dict[str, Loop], steps: Sequence[Step], rounds: int, *, show: Callable[[str], object]
) -> dict[str, list[list[float]]]:
    """Milliseconds of each step in each round, providers one after the other at every step."""
    times: dict[str, list[list[float]]] = {name: [] for name in loops}
    for number in range(rounds):
        for each in times.values():
            each.append([])
        for place, step in enumerate(steps):
            for name in order_of(list(loops), number * len(steps) + place):
                times[name][number].append(loops[name].time(step))
        show(f"  round {number + 1} of {rounds}")
    return times


def figures_of(times: Sequence[Sequence[float]], plan: Plan) -> dict[str, Any]:
    """Tokens per second, and percentiles of steps over all rounds: of decodes, and of those with
    chunks of prompts.
    """
    seconds = statistics.median(map(sum, times)) / 1e3
    found: dict[str, Any] = dict(
        steps=len(plan.steps),
        tokens_per_s=plan.tokens / seconds,
        answered_per_s=plan.answered / seconds,
    )
    for name, is_decode in (("decode", True), ("mixed", False)):
        places = [n for n, step in enumerate(plan.steps) if step.is_decode is is_decode]
        own = sorted(one[place] for one in times for place in places)
        found[f"{name}_steps"] = len(places)
        if own:
            found[f"{name}_p50_ms"] = statistics.median(own)
            found[f"{name}_p99_ms"] = own[min(len(own) - 1, round(0.99 * len(own)))]
    return found


def lines_of(done: Sequence[Outcome[Serving]]) -> list[str]:
    """A line a provider: rates, percentiles of steps, and the load's time over the first one's."""
    head = ["", "tokens/s", "answered/s", "decode p50", "p99", "mixed p50", "p99", "error", "bound"]
    first = next((one.row for one in done if one.row is not None), None)
    rows = [[*head, f"time / {first.provider}" if first else ""]]
    for outcome in done:
        if (row := outcome.row) is None or first is None:
            rows.append([f"  {outcome.provider}", why_not(outcome)])
            continue
        rates = [f"{row.extra[name]:,.0f}" for name in ("tokens_per_s", "answered_per_s")]
        steps = [
            f"{row.extra[name]:.3g}" if (name := f"{kind}_{at}_ms") in row.extra else "-"
            for kind in ("decode", "mixed")
            for at in ("p50", "p99")
        ]
        errors = f"{row.max_error:.1g}", f"{row.bound:.1g}"
        beside = f"{row.median_ms / first.median_ms:.3f}"
        rows.append([f"  {outcome.provider}", *rates, *steps, *errors, beside])
    return [f"\n{done[0].shape}", *aligned(rows)]


def summary(done: Sequence[Outcome[Serving]]) -> list[str]:
    """How many rows there are."""
    return [counted(done)]
