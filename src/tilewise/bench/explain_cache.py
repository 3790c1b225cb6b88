"""What would happen to a step of decoding: which kernels, how many pieces, slots and bytes.

As `explain`, of calls with a cache; no GPU is needed, and no tensor is written.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .. import dispatch
from ..frontend.cache_checks import check_cached
from ..kernels.common.cached import Cached, lse_shape
from ..ops import kv_cache as cache_ops
from ..tile.paging import capacity
from ..tile.split_kv import pieces
from .caches import INT32, Decode
from .cards import Card, Roof, cpu_roof
from .explain import Answer, Launched, built_by, standing_in
from .launches import Launch, waves

FP32 = 4  # bytes


class Pieces(NamedTuple):
    """How the keys of a step are cut, and where their sums lie until they are folded."""

    split_size: int
    of_longest: int
    total: int  # over the batch
    room: int  # of a sequence: as many as the cache has room for
    slots: int  # states of a piece and row in the workspace; 0: one program walks all its pieces
    slot_bytes: int
    idle: int  # programs of the first launch that find no piece

    @property
    def workspace(self) -> int:
        """Bytes between the launches."""
        return self.slots * self.slot_bytes


class Moved(NamedTuple):
    """Bytes of a step."""

    kv: int  # keys and values in use
    others: int  # queries, out, LSE, lengths and page table
    partials: int  # states of pieces, written once and read once

    @property
    def total(self) -> int:
        return sum(self)


class CacheExplanation(NamedTuple):
    """All of it. `backend` is "" where nothing serves the call."""

    of: Decode
    target: str
    card: Card | None  # None: the CPU
    backend: str
    forced: bool
    answers: list[Answer]
    launches: list[Launched]
    pieces: Pieces
    moved: Moved
    roof: Roof

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.of.flops / self.moved.total

    @property
    def least_ms(self) -> float:
        """The time of that work at the roof."""
        return self.roof.milliseconds(self.of.flops, self.moved.total)


def explain_cache(
    of: Decode,
    target: str,
    card: Card | None,
    split_size: int | None = None,
    backend: str | None = None,
    with_compiler: bool = True,
) -> CacheExplanation:
    """Explains a step on a card, or on the CPU, where there is none."""
    cached = cached_of(of, split_size)
    answers = answers_of(cached, target)
    chosen = backend or next((x.backend for x in answers if x.kind == "serves"), "")
    if any(x.backend == chosen and x.kind == "refuses" for x in answers):
        chosen = ""
    plans = portable_plans(cached) if chosen == "portable" else []
    launches = []
    for plan in plans:
        launch = launch_of(plan, target)
        built, failed = built_by(launch, target) if with_compiler else (None, "not asked")
        launches.append(Launched(launch, built, failed, waves(launch, built, card)))
    cut = pieces_of(of, cached, plans)
    roof = card.roof(cached.q.itemsize * 8) if card is not None else cpu_roof(cached.q.dtype)
    where = chosen, backend is not None, answers, launches
    return CacheExplanation(of, target, card, *where, cut, moved(of, cached, cut), roof)


def cached_of(of: Decode, split_size: int | None) -> Cached:
    """The checked call, its tensors unwritten; RuntimeError where there is no room for them."""
    dtype = getattr(torch, of.dtype)
    q = torch.empty(of.batch, of.seqlen_q, of.nheads, of.headdim, dtype=dtype)
    shape, table = (of.batch, of.seqlen_k), None
    if of.page_size:
        pages = -(-of.seqlen_k // of.page_size)
        shape = of.batch * pages, of.page_size
        table = torch.zeros(of.batch, pages, dtype=INT32)
    k, v = (torch.empty(*shape, of.nheads_k, n, dtype=dtype) for n in (of.headdim, of.headdim_v))
    lengths = torch.tensor(of.sequences, dtype=INT32), None
    numbers = of.causal, None, None, None, split_size
    return check_cached(q, k, v, table, lengths, (None, None, None), numbers, "bshd")


def answers_of(cached: Cached, target: str) -> list[Answer]:
    """Each backend's that reads a cache, in the order in which they are asked."""
    device = torch.device("cpu" if target == "cpu" else "cuda")
    with standing_in(target):
        reasons = {name: dispatch.ask(name, cached.problem, device) for name in cache_ops.BACKENDS}
    return [
        Answer(name, str(reason or ""), "refuses" if reason else "serves")
        for name, reason in reasons.items()
    ]


def portable_plans(cached: Cached) -> list:
    """The launches of the portable backend, as it plans them."""
    from ..kernels.portable.decode_launch import plans_of

    return plans_of(cached, torch.empty_like(cached.q), torch.empty(lse_shape(cached.q)))


def launch_of(plan, target: str) -> Launch:
    """A plan as `explain` shows launches."""
    from ..testing import build

    tile = plan.constants["TILE"]

    def compiled():
        return build(plan.kernel, *plan.args, on=target, **plan.constants, **plan.options)

    sides = tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_D + tile.BLOCK_DV
    return Launch(plan.kernel.fn.__name__, *sides, plan.stages, plan.programs, False, compiled)


def pieces_of(of: Decode, cached: Cached, plans: list) -> Pieces:
    """Pieces by length; slots by what the host knows, which is the room alone."""
    size = cached.split_size
    each = [len(pieces(0, keys, size)) for keys in of.sequences]
    room = math.ceil(capacity(cached.k, cached.page_table) / size)
    slots = room * of.batch * of.seqlen_q * of.nheads if len(plans) == 2 else 0
    idle = 0
    if slots:  # as many tiles of queries for each piece that there is room for
        tiles = plans[0].programs // room
        idle = plans[0].programs - sum(each) * tiles // of.batch
    slot_bytes = (of.headdim_v + 2) * FP32
    return Pieces(size, max(each), sum(each), room, slots, slot_bytes, idle)


def moved(of: Decode, cached: Cached, cut: Pieces) -> Moved:
    """Bytes, each tensor once."""
    rows = of.batch * of.seqlen_q * of.nheads
    others = rows * ((of.headdim + of.headdim_v) * cached.q.itemsize + FP32) + of.batch * FP32
    if of.page_size:
        others += sum(-(-keys // of.page_size) for keys in of.sequences) * FP32
    states = cut.total * of.seqlen_q * of.nheads if cut.slots else 0
    return Moved(of.kv_bytes, others, 2 * states * cut.slot_bytes)
