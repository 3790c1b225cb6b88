"""What would happen to a step of decoding: which kernels, how many pieces, slots and bytes.

As `explain`, of calls with a cache; no GPU is needed, and no tensor is written.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from .. import dispatch
from ..frontend.cache_checks import check_cached
from ..kernels.common.cached import Cached, lse_shape
from ..problem import Extras
from ..tile.paging import capacity
from ..tile.split_kv import pieces
from .cards import Card, Roof, cpu_roof
from .dense import Answer, Launched, built_by, chosen_of, standing_in
from .launches import Launch, at_once, build_launch, hopper_launch, launch_of
from .steps import INT32, Decode

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
    are_all_used: bool  # or only those of tiles that several programs share
    written: int  # states of a row over the batch: one of the pieces that a program walks

    @property
    def workspace(self) -> int:
        """Bytes between the launches."""
        return self.slots * self.slot_bytes


class Moved(NamedTuple):
    """Bytes of a step."""

    kv: int  # keys and values in use
    others: int  # queries, out, LSE, lengths and page table
    partials: int  # states, written once and read once

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
    in_pieces: str  # why keys are summed in pieces; "" where each tile of queries walks them all

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
    chosen = chosen_of(answers, backend)
    in_pieces = why_in_pieces(chosen, cached)
    planned = planned_by(chosen, of, cached=cached, target=target, card=card, in_pieces=in_pieces)
    launches = []
    for launch in planned.launches:
        built, failed = built_by(launch, target) if with_compiler else (None, "not asked")
        launches.append(Launched(launch, built, failed, at_once(launch, built, card=card)))
    cut = pieces_of(of, cached, planned)
    roof = card.roof(cached.q.itemsize * 8) if card is not None else cpu_roof(cached.q.dtype)
    return CacheExplanation(
        of=of,
        target=target,
        card=card,
        backend=chosen,
        forced=backend is not None,
        answers=answers,
        launches=launches,
        pieces=cut,
        moved=moved(of, cached, cut),
        roof=roof,
        in_pieces=in_pieces,
    )


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
    extras = Extras(seqused_k=torch.tensor(of.sequences, dtype=INT32))
    return check_cached(Cached(q, k, v, table, extras), causal=of.causal, split_size=split_size)


def answers_of(cached: Cached, target: str) -> list[Answer]:
    """Each backend's that reads a cache, in the order in which they are asked."""
    device = torch.device("cpu" if target == "cpu" else "cuda")
    with standing_in(target):
        reasons = {name: dispatch.ask_cached(name, cached, device) for name in dispatch.BACKENDS}
    return [
        Answer(name, str(reason or ""), "refuses" if reason else "serves")
        for name, reason in reasons.items()
    ]


class Planned(NamedTuple):
    """The launches of a step, and the states that the host makes room for."""

    launches: list[Launch]
    slots: int
    are_all_used: bool
    lead: int = 1  # pieces of a block that one program walks, its first


def why_in_pieces(backend: str, cached: Cached) -> str:
    """Why a backend sums keys in pieces; "" where it does not."""
    if backend != "hopper":
        return "split_size is asked for" if cached.split_size else "this backend always does"
    from ..kernels.hopper.fwd.cached import why_in_pieces

    return why_in_pieces(cached, outputs_of(cached)[0]) or ""


def planned_by(
    backend: str, of: Decode, cached: Cached, target: str, card: Card | None, in_pieces: str
) -> Planned:
    """As a backend plans the step."""
    if not in_pieces:
        return Planned(chunk_launches(cached, target), 0, True)
    if backend == "portable":
        launches = portable_launches(cached, None if card is None else card.sms)
        partials = launches[0].args["partials"]
        slots = partials.m_i.numel() if len(launches) == 2 else 0
        shown = [portable_launch(launch, target) for launch in launches]
        return Planned(shown, slots, True, partials.lead or 1)
    if backend == "hopper" and card is not None:
        return hopper_plan(of, cached, card=card)
    return Planned([], 0, True)


def outputs_of(cached: Cached) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse`, unwritten."""
    q = cached.q
    return q.new_empty(*q.shape[:-1], cached.v.shape[3]), torch.empty(lse_shape(q))


def portable_launches(cached: Cached, sms: int | None = None) -> list:
    """The launches of the portable backend, on a GPU of so many SMs."""
    from ..kernels.common.decode_step import program_of
    from ..kernels.portable.decode_launch import launches_of

    launches = functools.partial(launches_of, sms=sms)
    return program_of(cached, *outputs_of(cached), launches).launches


def portable_launch(launch: Any, target: str) -> Launch:
    """A launch as `explain` shows it."""
    tile, stages = launch.constants["TILE"], launch.options["num_stages"]
    build = functools.partial(build_launch, launch, target)
    name, tiles = launch.kernel.__name__, launch.programs
    return launch_of(name, tile, stages=stages, tiles=tiles, build=build)


def chunk_launches(cached: Cached, target: str) -> list[Launch]:
    """Hopper's launch of a chunk, that of the training forward, and the fold of its parts."""
    from ..kernels.common.decode_step import program_of
    from ..kernels.hopper.fwd.cached import launches_of

    launch, *folds = program_of(cached, *outputs_of(cached), launches_of).launches
    shown = [hopper_launch(launch)]
    for fold in folds:
        tile, name = fold.constants["TILE"], fold.kernel.__name__
        build = functools.partial(build_launch, fold, target)
        shown.append(launch_of(name, tile, stages=1, tiles=fold.programs, build=build))
    return shown


def hopper_plan(of: Decode, cached: Cached, card: Card) -> Planned:
    """Hopper's one launch, whose tiles are counted by pieces: its programs divide these among them,
    by lengths that they read.
    """
    from ..kernels.common.decode_step import program_of
    from ..kernels.hopper.decode.launch import launches_of

    launches = functools.partial(launches_of, most=card.sms)
    (launch,) = program_of(cached, *outputs_of(cached), launches).launches
    tile, sizes = launch.constants["TILE"], launch.args["sizes"]
    rows = tile.ROWS * tile.WARPGROUPS
    tiles = math.ceil(sizes.seqlen_q / (rows // cached.problem.group)) * sizes.nheads
    count = sum(len(pieces(0, keys, split_size=cached.piece_size)) for keys in of.sequences)
    shown = Launch(
        kernel="hopper_decode_kernel",
        block_m=rows,
        block_n=tile.BLOCK_N,
        columns=tile.BLOCK_D + tile.BLOCK_DV,
        stages=tile.STAGES,
        tiles=tiles * count,
        is_persistent=True,
        build=functools.partial(build_launch, launch, "sm90"),
    )
    has_room = count * sizes.seqlen_q <= sizes.room  # else tiles are whole
    return Planned([shown], sizes.room * cached.problem.nheads * has_room, False)


def pieces_of(of: Decode, cached: Cached, planned: Planned) -> Pieces:
    """Pieces by length; slots by what the host knows, which is the room alone."""
    size = cached.piece_size
    counts = [len(pieces(0, keys, split_size=size)) for keys in of.sequences]
    room = math.ceil(capacity(cached.k, cached.page_table) / size)
    written = sum(max(n - planned.lead, 0) + (n > 0) for n in counts)
    idle = 0
    if planned.slots and planned.are_all_used:
        programs = planned.launches[0].tiles
        blocks = programs // (room - planned.lead + 1)
        idle = programs - written * blocks // of.batch
    return Pieces(
        split_size=size,
        of_longest=max(counts),
        total=sum(counts),
        room=room,
        slots=planned.slots,
        slot_bytes=(of.headdim_v + 2) * FP32,
        idle=idle,
        are_all_used=planned.are_all_used,
        written=written,
    )


def moved(of: Decode, cached: Cached, cut: Pieces) -> Moved:
    """Bytes, each tensor once."""
    rows = of.batch * of.seqlen_q * of.nheads
    small_bytes = rows * ((of.headdim + of.headdim_v) * cached.q.itemsize + FP32) + of.batch * FP32
    if of.page_size:
        small_bytes += sum(-(-keys // of.page_size) for keys in of.sequences) * FP32
    states = cut.written * of.seqlen_q * of.nheads if cut.slots and cut.are_all_used else 0
    return Moved(of.kv_bytes, small_bytes, 2 * states * cut.slot_bytes)
