"""Host side of appends: one launch, whatever the lengths, and whatever attention reads of it."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from ...tile.quantize import LIMITS, by_row
from ..common.alignment import ALIGNMENT
from ..common.appended import NAMES, TENSORS, Append, AppendedCall
from ..common.arguments import contiguous_of
from ..common.operand import operands_of
from ..common.program import Launch, Program, checked
from ..common.shared_memory import span_of
from ..common.workspace import Workspace, allocator_of
from .append import (
    ROWS_PER_PROGRAM,
    SEQUENCES_PER_GROUP,
    NewKeys,
    Prologue,
    Widths,
    cache_append_kernel,
)
from .decode_launch import STAGES, WARPS, cache_of, strided_of

Tensor = torch.Tensor
QUERY_ELEMENTS = 2048  # that a program rotates


class AppendStep:
    """An append that was launched before, for other tensors of the same signature: no checks but
    that of memory, as only it depends on addresses. Holds no tensor.
    """

    reads: Callable[..., tuple]  # of all addresses those that the decode step takes

    def __init__(
        self,
        program: Any,
        tensors: Sequence[Tensor],
        written: Sequence[int],
        parts: Sequence[Tensor],
    ) -> None:
        """`tensors` are those of a call that are not None, as the `Program` has them, of which some
        are `written`; `parts` are of one memory.
        """
        self.program, self.written = program, written
        spans = [span_of(x) if x.numel() else (0, 0) for x in tensors]
        self.sizes = [stop - first for first, stop in spans]
        self.overlaps = self.overlaps_of([x.data_ptr() for x in tensors])
        self.starts = [x.storage_offset() * x.itemsize for x in parts]
        if parts:
            size, empty = parts[0].untyped_storage().nbytes(), allocator_of(parts[0].device)
            self.new_parts = functools.partial(empty, (size,), (1,), torch.uint8)

    def overlaps_of(self, row: Sequence[int]) -> list[tuple[int, int]]:
        """Tensors whose memory may be that of one that is written, and how far they are from it."""
        overlaps = []
        for n in self.written:
            first = row[n]
            stop = first + self.sizes[n]
            for place, size in enumerate(self.sizes):
                address = row[place]
                if address < stop and first < address + size:
                    overlaps.append((place, address - first))
        return overlaps

    def repeats(self, row: Sequence[int]) -> bool:
        """Whether it could be launched by the addresses of tensors and parts."""
        return self.overlaps_of(row) == self.overlaps and self.program.again_at(row)

    def before(self, decode: Any, reads: Sequence[str]) -> Any:
        """A decode step that launches this first. `reads` are the names of what the decode step
        takes, in its order, as far as it is there.
        """
        places = {name: place for place, name in enumerate(self.program.names)}
        self.reads = operator.itemgetter(*[places[name] for name in reads if name in places])
        decode.append = self
        return decode


def append(new: Append, is_kept: bool = False) -> AppendStep | None:
    """Writes k and v to the caches; rotary tables rotate k first. Returns how it is done again,
    where that is to be kept.
    """
    if not (new.k_cache.numel() and new.k.numel()):
        return None
    named = dict(zip(NAMES, new.tensors))
    planned = new.of_tensors(list(operands_of(NAMES, new.tensors).values()))
    return run(launch_of(planned), new, named=named, is_kept=is_kept)


def prepare(call: AppendedCall, is_kept: bool) -> tuple[Prologue, AppendStep | None]:
    """The append of a call, and what attention reads of it."""
    fields, parts = AppendedCall._fields[:TENSORS], parts_of(call)
    operands = operands_of(fields, call[:TENSORS])
    planned = call._replace(**operands)
    written = operands_of(tuple(parts), tuple(parts.values()))
    launch = launch_of(planned.append, planned, prologue_of(planned, written))
    named = dict(zip(fields, call))
    step = run(launch, call.append, named=named, is_kept=is_kept, parts=parts)
    return prologue_of(call, parts), step


def run(
    launch: Launch,
    new: Append,
    named: dict[str, Tensor | None],
    is_kept: bool,
    parts: dict[str, Tensor] | None = None,
) -> AppendStep | None:
    """Launches for tensors of these names, and new ones for `parts` of what attention reads.
    Returns the launch for other tensors where that is to be kept, and may be done again.
    """
    present, written_parts = {name: x for name, x in named.items() if x is not None}, parts or {}
    program = Program([*present, *written_parts], [launch], Workspace(new.k.device))
    program([*present.values(), *written_parts.values()])
    if not is_kept or program.again is None or program.copied:
        return None
    by_rows = [name for name in ("k_descale", "v_descale") if by_row(getattr(new, name))]
    written = [n for n, x in enumerate(present) if x in ("k_cache", "v_cache", *by_rows)]
    return AppendStep(program, list(present.values()), written, parts=[*written_parts.values()])


def rotated_dims(new: Append) -> int:
    """Half of them; 0 where nothing is rotated."""
    return 0 if new.rotary is None or not new.rotary.cos.numel() else new.rotary.cos.shape[1]


def parts_of(call: AppendedCall) -> dict[str, Tensor]:
    """New memory for what attention reads, in one."""
    q, batch = call.q, call.before.shape[0]
    shapes = {"used": (tuple(call.before.shape), torch.int32)}
    if rotated_dims(call.append):
        shapes["rotated"] = tuple(q.shape), q.dtype
    if call.cache_leftpad is not None:
        shapes["padded_table"] = (batch, call.k_cache.shape[1]), torch.int32
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    starts = list(itertools.accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0))
    memory = q.new_empty(starts[-1], dtype=torch.uint8)
    return {
        name: memory[start : start + size].view(dtype).view(shape)
        for start, size, (name, (shape, dtype)) in zip(starts, sizes, shapes.items())
    }


def prologue_of(call: AppendedCall, parts: dict[str, Any]) -> Prologue:
    """The kernel's arguments for what attention reads."""
    leftpad, rows = map(contiguous_of, (call.cache_leftpad, call.rows))
    rotated = parts.get("rotated")
    prologue = Prologue(used=parts["used"], leftpad=leftpad, table=parts.get("padded_table"))
    prologue = prologue._replace(rows=None if leftpad is None else rows)
    if rotated is None:
        return prologue
    return prologue._replace(
        q=strided_of(call.q),
        rotated=strided_of(rotated),
        cu_seqlens_q=contiguous_of(call.cu_seqlens_q),
        total_q=call.q.shape[:-2].numel(),
        seqlen_q=call.q.shape[-3],
    )


def launch_of(
    new: Append, call: AppendedCall | None = None, prologue: Prologue | None = None
) -> Launch:
    """A program for each new key, then those that prepare what attention reads."""
    k, v, rotary = new.k, new.v, new.rotary
    total = k.shape[:-2].numel()
    used, starts = (contiguous_of(x) for x in (new.seqused_k, new.cu_seqlens_q))
    if k.dim() == 3 and starts is None:  # keys by slots alone
        used = None
    batch = k.shape[0] if starts is None else starts.shape[0] - 1
    half = rotated_dims(new)
    cos = sin = None
    if rotary is not None and half:
        cos, sin = map(contiguous_of, rotary[:2])
    positions = 0 if cos is None else cos.shape[0]
    before, base = (None, None) if call is None else (call.before, call.rotary_seqlens)
    keys = NewKeys(
        strided_of(k),
        strided_of(v),
        seqused_k=used,
        cu_seqlens=starts,
        slots=contiguous_of(new.slots),
        batch=batch,
        seqlen=k.shape[-3],
        cos=cos,
        sin=sin,
        positions=positions,
        before=contiguous_of(before),
        rotary_seqlens=contiguous_of(base) if half else None,
    )
    nheads_k, headdim, headdim_v = *k.shape[-2:], v.shape[-1]
    has_bytes = new.k_cache.dtype != k.dtype
    block_d = triton.next_power_of_2(headdim)
    widths = Widths(
        NHEADS=nheads_k,
        D=headdim,
        DV=headdim_v,
        BLOCK_H=triton.next_power_of_2(nheads_k),
        BLOCK_D=block_d,
        BLOCK_DV=triton.next_power_of_2(headdim_v),
        HALF=half,
        INTERLEAVED=rotary is not None and bool(rotary.interleaved),
        LIMIT=LIMITS[new.k_cache.dtype] if has_bytes else 0.0,
    )
    k_cache, v_cache = new.k_cache, new.v_cache
    if k_cache.dtype == torch.float8_e4m3fn:  # written by its bits
        k_cache, v_cache = (x.view(torch.uint8) for x in (k_cache, v_cache))
    scales = dict(k_scale=new.k_descale, v_scale=new.v_descale)
    cache = cache_of(k_cache, v_cache, table=new.page_table, **scales)
    programs = total
    if call is not None and prologue is not None:
        widths = widths._replace(PREPARES=True)
        programs += triton.cdiv(batch, SEQUENCES_PER_GROUP.value)
        if prologue.table is not None:
            programs += batch * triton.cdiv(new.k_cache.shape[1], ROWS_PER_PROGRAM.value)
        if prologue.q is not None:
            nheads = call.q.shape[-2]
            block = max(1, min(triton.next_power_of_2(nheads), QUERY_ELEMENTS // block_d))
            programs += prologue.total_q * triton.cdiv(nheads, block)
            of_q: dict[str, Any] = dict(NHEADS_Q=nheads, BLOCK_Q=block)
            widths = widths._replace(AT_FIRST=call.is_at_first, **of_q)
    # Products and their sum are rounded apart, as `tile.rotary.rotate` and the CPU round them
    options = dict(num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False)
    args = dict(new=keys, cache=cache, prologue=prologue, total=total)
    return checked(Launch(cache_append_kernel, programs, args, dict(WIDTHS=widths), options))
