"""What would happen to a call, and why: which backend serves it, its launches, its roofline.

No GPU is needed. Backends answer as they would on the GPU that is asked about, tuning gives the
tiles it gives there, and the compiler says what they need.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .. import dispatch
from ..errors import Avoidable, Slower
from ..kernels.common.arguments import aligned
from ..kernels.cpu import flash, tiles
from ..kernels.cpu.dense import make_dense
from ..ops.flops import visible_pairs
from ..problem import OPEN
from .call import Call, call_of
from .cards import Card, Roof, cpu_roof
from .launches import Built, Launch, at_once, built_of, launches_of
from .shapes import Shape
from .traffic import PASSES, Moved, moved, visited_tiles

CPU = "cpu"
MATMULS = {  # S again in the backward; the portable one has S and dP twice
    "hopper": {"fwd": 2, "bwd": 5},
    "portable": {"fwd": 2, "bwd": 7},
    "cpu": {"fwd": 2, "bwd": 5},
}
FEW_QUERIES = (
    "forward: few queries and many keys, so the portable split-KV kernels"
    " of attention with a KV cache; `tilewise explain --cache` shows them"
)
RELATIVE = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


class Answer(NamedTuple):
    """What a backend says to a problem; no reason: it serves it."""

    backend: str
    reason: str
    kind: str  # "serves", "slower", "avoidable" or "refuses"


class Launched(NamedTuple):
    """A launch; what the compiler made of it, or why it made nothing; and how it fills a card."""

    launch: Launch
    built: Built | None
    failed: str
    at_once: int  # programs

    @property
    def waves(self) -> float:
        """Tiles over the programs that run at once."""
        return self.launch.tiles / self.at_once

    @property
    def tail(self) -> float:
        """The share of the card's time that SMs are busy."""
        return self.waves / max(1, math.ceil(self.waves))


class Work(NamedTuple):
    """How much is to be done, and what it takes at least."""

    pairs: float  # of query and key that the mask keeps, over all heads
    flops: float  # of those: 4 D a pair forward, 2.5 times that backward
    done: float | None  # of the matmuls of the tiles that are visited, with what is recomputed
    moved: Moved
    roof: Roof

    @property
    def intensity(self) -> float:
        """FLOPs a byte, each tensor moved once."""
        return self.flops / self.moved.once

    @property
    def side(self) -> str:
        """Which roof is nearer."""
        return "compute" if self.intensity >= self.roof.ridge else "memory"

    @property
    def least_ms(self) -> float:
        """The time of that work at the roof."""
        return self.roof.milliseconds(self.flops, self.moved.once)


class Explanation(NamedTuple):
    """All of it. `backend` is "" where nothing serves the call."""

    shape: Shape
    target: str
    card: Card | None  # None: the CPU
    backend: str
    forced: bool
    answers: list[Answer]
    launches: list[Launched]
    how: str  # on the CPU, or with few queries: in which way
    work: Work | None  # None: of 8 bits


def explain(
    shape: Shape,
    target: str,
    card: Card | None,
    backend: str | None = None,
    deterministic: bool = False,
    with_compiler: bool = True,
) -> Explanation:
    """Explains a call on a card, or on the CPU, where there is none.

    ImportError where its kernels cannot be looked at for want of Triton.
    """
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    call = call_of(few, deterministic)  # the rest of the batch brings more tiles, and no others
    answers = answers_of(call, target)
    chosen = chosen_of(answers, backend)
    launches = []
    for launch in launches_of(call, chosen, target, PASSES[shape.direction]):
        built, failed = built_by(launch, target) if with_compiler else (None, "not asked")
        launch = launch._replace(tiles=launch.tiles * shape.batch // few.batch)
        launches.append(Launched(launch, built, failed, at_once(launch, built, card=card)))
    how = way_of_cpu(shape, deterministic) if chosen == "cpu" else ""
    if backend is None and target != CPU:
        from ..kernels.portable import few_queries

        how = FEW_QUERIES if few_queries.serves(call.problem, call.q, call.k) else how
    work = work_of(shape, chosen or "cpu", launches, card)
    return Explanation(
        shape, target, card, chosen, backend is not None, answers, launches, how, work
    )


def answers_of(call: Call, target: str) -> list[Answer]:
    """Each backend's, in the order in which they are asked."""
    device = torch.device("cpu" if target == CPU else "cuda")
    answers = []
    problem, q, k, v, extras, _ = call
    memory = all(map(aligned, (q, k, v))), dispatch.has_many(problem, q, k, extras)
    with standing_in(target):
        for name in dispatch.BACKENDS:
            reason = dispatch.ask(name, problem, device, *memory)
            reason_text = str(reason or dispatch.why_copied(name, problem, memory[0]))
            answers.append(Answer(name, reason_text, kind_of(reason)))
    return answers


def chosen_of(answers: list[Answer], backend: str | None) -> str:
    """The backend that is forced, or the first that serves; "" where it does not."""
    chosen = backend or next((x.backend for x in answers if x.kind == "serves"), "")
    is_refused = any(x.backend == chosen and x.kind in ("avoidable", "refuses") for x in answers)
    return "" if is_refused else chosen


def kind_of(reason: str | None) -> str:
    """What an answer amounts to."""
    kinds = {type(None): "serves", Slower: "slower", Avoidable: "avoidable"}
    return kinds.get(type(reason), "refuses")


@contextlib.contextmanager
def standing_in(target: str) -> Iterator[None]:
    """Backends answer as if such a GPU were there: the Hopper one asks the driver which it is."""
    from ..kernels import hopper

    real, hopper._is_hopper = hopper._is_hopper, lambda device: target == "sm90"
    try:
        yield
    finally:
        hopper._is_hopper = real


def built_by(launch: Launch, target: str) -> tuple[Built | None, str]:
    try:
        return built_of(launch.build(), target), ""
    except Exception as error:  # whatever the compiler raises is why there are no figures
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def way_of_cpu(shape: Shape, deterministic: bool = False) -> str:
    """Which of the CPU backend's ways takes the call."""
    alone = shape.alone(max(shape.sequences)) if shape.lengths else shape
    call = call_of(alone, deterministic)
    before = "sequence by sequence: " if shape.lengths else ""
    if flash.whole_mask(call.problem, call.q, call.k, call.scalars) is not None:
        return before + "torch's fused kernel, in one piece"
    dense = make_dense(call.problem, call.q, call.k, call.v, call.extras, call.scalars)
    if flash.serves(dense):
        return before + "torch's fused kernel, in pieces that are merged by their LSE"
    rows = tiles.block_m(dense)
    return f"{before}blockwise in plain torch, tiles of {rows} queries x {tiles.BLOCK_N} keys"


def work_of(shape: Shape, backend: str, launches: list[Launched], card: Card | None) -> Work:
    """FLOPs, bytes and the roof."""
    dtype = getattr(torch, shape.dtype)
    used = [one.launch for one in launches]
    done = None
    if used and not shape.modifier and not shape.lengths:
        done = _flops_of_tiles(shape, backend, launches=used)
    first, last = _blocks_of(used) if used else ((tiles.BLOCK_M, tiles.BLOCK_N),) * 2
    roof = card.roof(dtype.itemsize * 8) if card is not None else _cpu_roof(dtype)
    pack = used[0].pack if used else 1
    pairs = _pairs(shape) * shape.nheads
    flops = RELATIVE[shape.direction] * 2 * pairs * (shape.headdim + shape.headdim_v)
    return Work(pairs, flops, done, moved(shape, first, backend, last, pack), roof)


def _pairs(shape: Shape) -> float:
    """How many pairs the mask keeps, exactly, in one head of the batch."""
    if shape.modifier:
        return shape.pairs
    left, right = OPEN if shape.window is None else shape.window, 0 if shape.causal else OPEN
    lengths = [(n, n) for n in shape.sequences] if shape.lengths else [shape[2:4]]
    pairs = sum(visible_pairs(*of, left, right, "bottom_right") for of in lengths)
    return pairs * (1 if shape.lengths else shape.batch)


def _blocks_of(launches: list[Launch]) -> list[tuple[int, int]]:
    """The tiles of the first and of the last kernel."""
    return [(one.block_m, one.block_n) for one in (launches[0], launches[-1])]


@functools.cache
def _cpu_roof(dtype: torch.dtype) -> Roof:
    return cpu_roof(dtype)


def _flops_of_tiles(shape: Shape, backend: str, launches: list[Launch]) -> float:
    """FLOPs of whole tiles: a partial one is computed as a full one, columns are padded, and the
    backward recomputes.
    """
    passes = PASSES[shape.direction]
    total = 0.0
    for direction, launch in zip(passes, (launches[0], launches[-1])):
        blocks = launch.block_m, launch.block_n
        lengths = shape.seqlen_q, shape.seqlen_k
        visits = visited_tiles(*lengths, blocks, shape.causal, shape.window)
        scores = visits * blocks[0] * blocks[1] * shape.nheads * shape.batch
        total += MATMULS[backend][direction] * scores * launch.columns
    return total
