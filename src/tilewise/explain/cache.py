"""What would happen to a step of decoding: which kernels, how many pieces, slots and bytes.

As `explain`, of calls with a cache; no GPU is needed, and no tensor is written.
"""

from __future__ import annotations

import functools
import math

import torch

from .. import dispatch
from ..frontend.cached import check_cached
from ..frontend.scalars import Numbers
from ..kernels.common.cached import Cached
from ..kernels.common.decode_step import program_of
from ..ops.kv_cache import empty_outputs
from ..problem import Extras
from ..tile.paging import capacity
from ..tile.split_kv import pieces
from .answers import Explanation, Work, answers_of, chosen_of, compiled
from .cards import Card, cpu_roof
from .launches import Launch, build_launch, hopper_launch, shown
from .steps import FP32_BYTES, INT32, Decode, Pieces
from .traffic import Moved


def explain_cache(
    step: Decode,
    target: str,
    card: Card | None,
    split_size: int | None = None,
    backend: str | None = None,
    with_compiler: bool = True,
) -> Explanation:
    """Explains a step on a card, or on the CPU, where there is none."""
    cached = cached_of(step, split_size)

    def ask(name: str, device: torch.device) -> str | None:
        reason = dispatch.ask_cached(name, cached, device)
        return reason and str(reason)

    answers = answers_of(target, ask)
    chosen = chosen_of(answers, backend)
    how = why_in_pieces(chosen, cached)
    launches, cut = planned_by(chosen, step, cached=cached, target=target, card=card, in_pieces=how)
    launches = [compiled(x, target, card=card, with_compiler=with_compiler) for x in launches]
    roof = card.roof(cached.q.itemsize * 8) if card is not None else cpu_roof(cached.q.dtype)
    nbytes = step.kv_bytes + step.other_bytes + cut.state_bytes(step)
    work = Work(step.pairs, step.flops, None, Moved(nbytes, nbytes), roof)
    forced = backend is not None
    return Explanation(step, target, card, chosen, forced, answers, launches, how, work, pieces=cut)


def cached_of(step: Decode, split_size: int | None) -> Cached:
    """The checked call, its tensors unwritten; RuntimeError where there is no room for them."""
    dtype = getattr(torch, step.dtype)
    q = torch.empty(step.batch, step.seqlen_q, step.nheads, step.headdim, dtype=dtype)
    shape, table = (step.batch, step.seqlen_k), None
    if step.page_size:
        pages = -(-step.seqlen_k // step.page_size)
        shape = step.batch * pages, step.page_size
        table = torch.zeros(step.batch, pages, dtype=INT32)
    shape = *shape, step.nheads_k
    k, v = (torch.empty((*shape, n), dtype=dtype) for n in (step.headdim, step.headdim_v))
    extras = Extras(seqused_k=torch.tensor(step.sequences, dtype=INT32))
    return check_cached(
        Cached(q, k, v, table, extras), Numbers(causal=step.causal), split_size=split_size
    )


def why_in_pieces(backend: str, cached: Cached) -> str:
    """Why a backend sums keys in pieces; "" where it does not."""
    if backend != "hopper":
        return "split_size is asked for" if cached.split_size else "this backend always does"
    from ..kernels.hopper.fwd.cached import why_in_pieces

    return why_in_pieces(cached, empty_outputs(cached)[0]) or ""


def planned_by(
    backend: str, step: Decode, cached: Cached, target: str, card: Card | None, in_pieces: str
) -> tuple[list[Launch], Pieces]:
    """The launches of a step as a backend plans it, and how keys are cut."""
    if not in_pieces:
        return chunk_launches(cached, target), pieces_of(step, cached)
    if backend == "portable":
        launches = portable_launches(cached, None if card is None else card.sms)
        partials, programs = launches[0].args["partials"], launches[0].programs
        slots = partials.m_i.numel() if len(launches) == 2 else 0
        cut = pieces_of(step, cached, slots, lead=partials.lead or 1, programs=programs)
        return [shown(x, target) for x in launches], cut
    if backend == "hopper" and card is not None:
        return hopper_plan(step, cached, card=card)
    return [], pieces_of(step, cached)


def portable_launches(cached: Cached, sms: int | None = None) -> list:
    """The launches of the portable backend, on a GPU of so many SMs."""
    from ..kernels.portable.decode_launch import launches_of

    out, lse = empty_outputs(cached)
    return program_of(cached, out, lse, functools.partial(launches_of, sms=sms)).launches


def chunk_launches(cached: Cached, target: str) -> list[Launch]:
    """Hopper's launch of a chunk, that of the training forward, and the fold of its parts."""
    from ..kernels.hopper.fwd.cached import launches_of

    out, lse = empty_outputs(cached)
    launch, *folds = program_of(cached, out, lse, launches_of).launches
    return [hopper_launch(launch), *(shown(x, target)._replace(stages=1) for x in folds)]


def hopper_plan(step: Decode, cached: Cached, card: Card) -> tuple[list[Launch], Pieces]:
    """Hopper's one launch, whose tiles are counted by pieces: its programs divide these among them,
    by lengths that they read.
    """
    from ..kernels.hopper.decode.launch import launches_of

    out, lse = empty_outputs(cached)
    launches = functools.partial(launches_of, most=card.sms)
    (launch,) = program_of(cached, out, lse, launches).launches
    tile, sizes = launch.constants["TILE"], launch.args["sizes"]
    rows = tile.ROWS * tile.WARPGROUPS
    tiles = math.ceil(sizes.seqlen_q / (rows // cached.problem.group)) * sizes.nheads
    count = sum(len(pieces(0, keys, split_size=cached.piece_size)) for keys in step.sequences)
    one = Launch(
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
    slots = sizes.room * cached.problem.nheads * has_room
    return [one], pieces_of(step, cached, slots, are_all_used=False)


def pieces_of(
    step: Decode,
    cached: Cached,
    slots: int = 0,
    are_all_used: bool = True,
    lead: int = 1,
    programs: int = 0,
) -> Pieces:
    """Pieces by length; slots by what the host knows, which is the room alone. One program walks
    the `lead` first pieces of a block; so many `programs` are launched where slots are all used.
    """
    size = cached.piece_size
    counts = [len(pieces(0, keys, split_size=size)) for keys in step.sequences]
    room = math.ceil(capacity(cached.k, cached.page_table) / size)
    written = sum(max(n - lead, 0) + (n > 0) for n in counts)
    idle = 0
    if slots and are_all_used:
        idle = programs - written * (programs // (room - lead + 1)) // step.batch
    return Pieces(
        split_size=size,
        of_longest=max(counts),
        total=sum(counts),
        room=room,
        slots=slots,
        slot_bytes=(step.headdim_v + 2) * FP32_BYTES,
        idle=idle,
        are_all_used=are_all_used,
        written=written,
    )
