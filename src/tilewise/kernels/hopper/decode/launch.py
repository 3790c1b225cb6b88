"""Host side of decoding on Hopper: describes the cache to TMA, allocates partial states, launches.
It knows no length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....emulation import emulate
from ....hardware import REGISTERS
from ....tile.paging import batch_of, capacity
from ....tile.split_schedule import SplitSizes
from ....tile.types import SplitPipeline, Strided, Table
from ...common import decode_step
from ...common.alignment import ALIGNMENT, CACHE, misplaced
from ...common.arguments import features_of, numbers_of, optionals_of
from ...common.building import first_launch, num_sms, on_device
from ...common.cached import Cached, scales_of, strided_of
from ...common.packed import Packed
from ...common.relaunch import distinct_cached, relaunch_of
from .. import descriptors
from ..assembly import ASM
from ..compat import Descriptors, direct_of
from ..descriptors import GL_DTYPES, DescriptorFields
from ..tile_counter import counters_of
from . import eight_bits
from .kernel import hopper_decode_kernel
from .rows import Output, States
from .scales import Scales
from .tiles import CACHES, ROWS, tile_of
from .work import Counters

Tensor = torch.Tensor
FEWEST_ROWS = 8  # that wgmma takes as columns, and a swizzle repeats after
WORKSPACE = 256 * 2**20  # bytes of partial states; with fewer, tiles are not divided
FEW_QUERIES = 8  # of a sequence: with as many a call waits for memory
HANDED_OUT = 64  # counters before those of tiles: see `work.fetch_next_tile`
OF_CHUNKS = 32  # of these, where those of a launch of chunks begin, which runs at the same time
TOKENS = 4  # of a tile of decodes that run at the same time as chunks
OUTPUT, COUNTERS, SIZES = 4, 5, 7  # among a plan's arguments
K, V = 1, 2  # in a row of addresses


class Plan(NamedTuple):
    """A launch."""

    programs: int
    args: tuple
    constants: dict


def refusal(cached: Cached) -> str | None:
    """Why these kernels do not serve a call, or None."""
    problem, k = cached.problem, cached.k
    if problem.dtype.itemsize != 2:
        return "they multiply 16-bit elements, which the queries must have"
    if problem.group > ROWS:
        return f"{problem.group} query heads per key head are more than {ROWS} rows"
    if max(problem.headdim, problem.headdim_v) > 256:
        return "headdim is over 256"
    unit = ALIGNMENT // k.itemsize
    if problem.headdim % unit or problem.headdim_v % unit:
        return f"TMA copies rows of a multiple of {unit} elements of {k.dtype}"
    block_n = tile_of(problem).BLOCK_N
    if cached.piece_size % block_n:
        return f"split_size={cached.piece_size} is not a multiple of {block_n} keys"
    return misplaced(CACHE["hopper"], q=cached.q, k=k, v=cached.v)


def rows_of(cached: Cached, batch: int, chunk: int = 0) -> int:
    """Rows of a tile, which decide no bit: of as many queries as a sequence has on average, or of
    few where long sequences are chunks, and other launches'.
    """
    group = cached.problem.group
    queries = max(triton.cdiv(cached.q.shape[:-2].numel(), batch), 1)
    queries = min(queries, TOKENS) if chunk else queries
    # Of 8 bits two programs share an SM to 32 rows, and are faster than one of 64: only where a
    # group is as many
    most = ROWS if cached.k.dtype not in CACHES or group > 32 else 32
    return min(max(triton.next_power_of_2(queries * group), FEWEST_ROWS), most)


def warpgroups_of(cached: Cached, batch: int, programs: int) -> int:
    """How many warpgroups share tiles of keys, which decides no bit: two where sequences have many
    queries, by their number on average, and tiles of two are as many as programs, or almost.
    """
    problem, queries = cached.problem, cached.q.shape[:-2].numel()
    if cached.k.dtype in CACHES or problem.headdim_v > 128:  # two have no registers for these
        return 1
    tiles = queries * problem.nheads / (2 * ROWS)
    return 2 if queries > FEW_QUERIES * batch and tiles > 0.75 * programs else 1


def plan_of(
    cached: Cached,
    out: Tensor,
    lse: Tensor,
    workspace: int = WORKSPACE,
    most: int | None = None,
    chunk: int = 0,
) -> Plan:
    """A launch for any lengths, for `most` SMs; by default all. With `chunk`, sequences of so many
    queries are computed by another launch.
    """
    problem, q, k, extras = cached.problem, cached.q, cached.k, cached.extras
    scales = Scales(*scales_of(cached.k_descale), *scales_of(cached.v_descale))
    row_scales = (scales.k_row is not None) + (scales.v_row is not None)
    page_size = 0 if cached.page_table is None else k.shape[1]
    batch, room = batch_of(q, extras.cu_seqlens_q), capacity(k, cached.page_table)
    if most is None:
        most = num_sms(q.device) if q.is_cuda else 4
    warpgroups = 1 if chunk else warpgroups_of(cached, batch, most)
    counts = dict(row_scales=row_scales, warpgroups=warpgroups, rows=rows_of(cached, batch, chunk))
    tile = tile_of(problem, page_size, kept=k.dtype, **counts)
    is_packed = extras.cu_seqlens_q is not None
    rows = q.shape[-3]
    reach = max(rows, room)
    numbers = numbers_of(cached.scalars, q[None] if is_packed else q, k)
    left, right = cached.scalars.left, cached.scalars.right
    numbers = numbers._replace(left=min(left, reach), right=min(right, reach))
    tokens = tile.ROWS // problem.group
    queries = q.shape[:-2].numel()
    tiles = problem.nheads_k * (triton.cdiv(rows, tokens) * (1 if is_packed else batch))
    tiles += problem.nheads_k * batch * is_packed
    pieces = triton.cdiv(room, cached.piece_size)
    bound = tiles * max(pieces, 1)
    # Partial states of all pieces, or as many as there is memory for
    query_bytes = 4 * (problem.headdim_v + 2) * problem.nheads
    states = min(queries * pieces if pieces > 1 else 0, workspace // query_bytes, 2**25 - 1)
    counters = counters_of(q.device, HANDED_OUT + queries * problem.nheads_k)
    handed_out, by_tile = counters.split([HANDED_OUT, counters.numel() - HANDED_OUT])
    partials = partials_of(q, max(states, 1) * problem.nheads, problem.headdim_v)
    packed = batch if is_packed else 0
    sizes = SplitSizes(packed, problem.nheads_k, rows, room, batch, cached.piece_size, states)
    args = (
        strided_of(q),
        *described(cached, tile),
        table_of(cached),
        Output(strided_of(out), lse, partials, strided_of(out) if cached.clears_tail else None),
        Counters(handed_out, by_tile),
        optionals_of(extras, problem.mods),
        sizes,
        numbers,
        scales,
    )
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap, CHUNK=chunk)
    constants = dict(FEATURES=features, TILE=tile, num_warps=4)
    if tile.PROGRAMS > 1:  # of 8 warps each, whose registers setmaxnreg then divides
        constants["maxnreg"] = REGISTERS // (tile.PROGRAMS * 8 * 32)
    return Plan(min(bound, most * tile.PROGRAMS), args, constants)


def partials_of(q: Tensor, rows: int, headdim_v: int) -> States:
    """Room for so many rows of partial states."""
    memory = q.new_empty(rows * (headdim_v + 2), dtype=torch.float32)
    return States(*memory.split([rows * n for n in (headdim_v, 1, 1)]))


def described(cached: Cached, tile: SplitPipeline) -> list[DescriptorFields | Strided]:
    """Keys and values as TMA takes them, (pages, nheads_k, page_size, headdim), in boxes of a block
    of keys or of a page, whichever is shorter; or as threads do.
    """
    k, v = (x.view(torch.int8) if tile.CACHE else x for x in cached[1:3])
    if not tile.BY_TMA:
        return [strided_of(x) for x in (k, v)]
    page_size = tile.BLOCK_N
    if cached.page_table is not None:
        page_size = min(page_size, cached.k.shape[1])
    return [
        by_head(x, [1, 1, page_size, block], gl.int8 if tile.CACHE else GL_DTYPES[x.dtype])
        for x, block in ((k, tile.BLOCK_D), (v, tile.BLOCK_DV))
    ]


def by_head(x: Tensor, block: list[int], element: Any) -> DescriptorFields:
    """A cache in boxes of one head."""
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return descriptors.by_head(x, block, layout)


def table_of(cached: Cached) -> Table:
    """Where pages lie; without a table a sequence is a page."""
    table, k = cached.page_table, cached.k
    if table is None:
        return Table(None, 0, *k.shape[:2])
    table = table if table.stride(1) == 1 else table.contiguous()
    return Table(table, table.stride(0), *k.shape[:2])


class DecodeStep(decode_step.DecodeStep):
    """The launch of a decode step."""

    call: Any  # with the stream and a row
    moved: Any  # what of K (0) and V (1) moves, from an address
    chunks: Any = None  # the program of long sequences, which runs at the same time

    def __init__(self, cached: Cached, plan: Plan, out: Tensor, lse: Tensor) -> None:
        inputs = [x for x in cached.tensors if x is not None]
        super().__init__(cached.q.device, inputs, out, lse, plan.args[OUTPUT].partials)
        self.counters = HANDED_OUT + plan.args[COUNTERS].tiles.numel()

    def launch(self, stream: int, row: list[Any]) -> None:
        """Launches it."""
        counters = counters_of(self.device, self.counters)
        address, moved, chunk = counters.data_ptr(), self.moved, None
        if self.chunks is not None:
            chunk = row[: -len(self.starts)]
        row[K], row[V] = moved(0, row[K]), moved(1, row[V])
        row += address, address + 4 * HANDED_OUT
        self.call(stream, row)
        if chunk is not None:
            self.chunks.launch(stream, [*chunk, address + 4 * OF_CHUNKS])


def step_of(
    cached: Cached, plan: Plan, out: Tensor, lse: Tensor, compiled: Any
) -> DecodeStep | None:
    """What was launched; None where it may not be again."""
    kernel = direct_of(compiled, plan.programs)
    if kernel is None:
        return None
    described = Descriptors(kernel, plan.args[1:3])
    q, k, v, *optionals = [x for x in cached.tensors if x is not None]
    gaps, operands, has_maps = described.opened([k.data_ptr(), v.data_ptr()])
    constants = plan.constants["FEATURES"], plan.constants["TILE"]
    args = plan.args[0], *operands, *plan.args[3:], *constants
    row = q, *gaps, *optionals, out, lse, *plan.args[OUTPUT].partials, *plan.args[COUNTERS]
    call = relaunch_of(kernel, args, row, has_maps)
    if call is None:
        return None
    step = DecodeStep(cached, plan, out, lse)
    step.call, step.moved = call, described.moved if isinstance(call, Packed) else described.first
    return step


def forward(cached: Cached, out: Tensor, lse: Tensor) -> DecodeStep | None:
    """Writes `out` and `lse` of all queries that belong to a sequence. Returns how it is done
    again, where the call has an entry.
    """
    if not out.numel() or not batch_of(cached.q, cached.extras.cu_seqlens_q):
        return None
    if cached.entry is not None:
        cached, out = distinct_cached(cached), out.detach()
    plan = plan_of(cached, out, lse)
    compiled = run(plan, cached.q.device)
    if cached.entry is None or compiled is None:
        return None
    return step_of(cached, plan, out, lse, compiled)


def run(plan: Plan, device: torch.device) -> Any:
    """Launches; on CPU tensors in the emulator."""
    args = descriptors.checked(plan.args)
    if device.type == "cpu":
        emulated = emulate(hopper_decode_kernel, ASM | eight_bits.ASM)
        emulated[(plan.programs,)](*args, **plan.constants)
        return None
    with on_device(device):
        return first_launch(hopper_decode_kernel, plan.programs, *args, **plan.constants)
