"""Host side of decoding on Hopper: describes the cache to TMA, allocates partial states, launches.
It knows no length.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....emulator.switch import emulator_seed
from ....hardware import SHARED_MEMORY
from ....problem import Problem
from ....tile.paging import batch_of, capacity
from ....tile.split_schedule import SplitSizes
from ....tile.types import SplitPipeline, Strided
from ...common import decode_step
from ...common.arguments import features_of, numbers_of, optionals_of
from ...common.building import first_launch, on_device
from ...common.cached import Cached, scales_of, strided_of
from ...common.packed import Packed
from ...common.relaunch import distinct_cached, relaunch_of
from .. import descriptors
from ..assembly import ASM
from ..compat import Descriptors, direct_of
from ..descriptors import GL_DTYPES, DescriptorFields
from ..tile_counter import counters_of, num_sms
from . import convert
from .kernel import hopper_decode_kernel
from .load import Table
from .rows import Output, States
from .scales import Scales
from .work import Counters

Tensor = torch.Tensor
ROWS = 64
WORKSPACE = 256 * 2**20  # bytes of partial states; with fewer, tiles are not divided
FEW_QUERIES = 8  # of a sequence: with as many a call waits for memory
HANDED_OUT = 32  # counters before those of tiles: see `work.fetch_next_tile`
SHORTEST_PAGE = 8  # rows after which the swizzle of shared memory repeats
OUTPUT, COUNTERS, SIZES = 4, 5, 7  # among a plan's arguments
K, V = 1, 2  # in a row of addresses
CACHES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}  # of 8 bits


class Plan(NamedTuple):
    """A launch."""

    programs: int
    args: tuple
    constants: dict


def refusal(cached: Cached) -> str | None:
    """Why these kernels do not serve a call, or None."""
    problem, k, v = cached.problem, cached.k, cached.v
    if problem.dtype.itemsize != 2:
        return "they multiply 16-bit elements, which the queries must have"
    if problem.group > ROWS:
        return f"{problem.group} query heads a key head are more than {ROWS} rows"
    if max(problem.headdim, problem.headdim_v) > 256:
        return "headdim is over 256"
    unit = 16 // k.itemsize
    if problem.headdim % unit or problem.headdim_v % unit:
        return f"TMA copies rows of a multiple of {unit} elements of {k.dtype}"
    block_n = tile_of(problem).BLOCK_N
    if cached.split_size % block_n:
        return f"split_size={cached.split_size} is no multiple of {block_n} keys"
    for x in (k, v):
        sides = zip(x.shape[:3], x.stride()[:3])
        if x.data_ptr() % 16 or any(n > 1 and (s % unit or s <= 0) for n, s in sides):
            return "TMA reads rows, heads and pages at multiples of 16 bytes"
    return None


def is_box(page_size: int, block_n: int) -> bool:
    """Whether blocks of keys are whole pages, or pages whole blocks, so that TMA copies them."""
    if page_size % block_n == 0:
        return True
    return page_size >= SHORTEST_PAGE and block_n % page_size == 0


@functools.lru_cache(maxsize=64)
def tile_of(
    problem: Problem,
    page_size: int = 0,
    kept: torch.dtype | None = None,
    row_scales: int = 0,
    warpgroups: int = 1,
) -> SplitPipeline:
    """One tile for a problem and its cache's dtype, whatever its lengths: a row's bits depend on
    it. How its keys are copied, they do not depend on. `row_scales` counts the sides, of keys and
    values, whose rows have their own scales.
    """
    block_d, block_dv = (
        max(64, triton.next_power_of_2(d)) for d in (problem.headdim, problem.headdim_v)
    )
    # Headdim 64 would be waiting for its exponentials, not for memory, by fewer keys at a time
    block_n = 128 if max(block_d, block_dv) == 64 else 64
    if warpgroups > 1:
        return shared_tile(problem, (block_n, block_d, block_dv), page_size, warpgroups)
    is_wide = block_dv > 128
    # With 8 bits the scores of two blocks are there at once, here of 128 keys
    in_shared = is_wide or (kept in CACHES and block_n == 128)
    q_stages = 1 if is_wide else 2
    used = 2 * q_stages * ROWS * block_d + 4 * ROWS * block_dv * in_shared + 1024
    room = SHARED_MEMORY["sm90"] - used
    elements = block_n * (block_d + block_dv)  # of a stage
    by_tma = is_box(page_size, block_n)
    shape = ROWS, block_n, block_d, block_dv
    if kept not in CACHES:
        return SplitPipeline(*shape, min(room // (2 * elements), 8), q_stages, by_tma, in_shared)
    scales = 4 * block_n * row_scales
    stages = 1 if is_wide else 2  # of what is converted: bytes in flight are those of the others
    cache_stages = (room - stages * (2 * elements + scales)) // (elements + scales)
    return SplitPipeline(
        *shape, stages, q_stages, by_tma, in_shared,
        COPY_WARPS=2,  # beside convert warps, four would leave too few registers
        CACHE=CACHES[kept],
        CACHE_STAGES=min(cache_stages, 8),
    )  # fmt: skip


def warpgroups_of(cached: Cached, batch: int, programs: int) -> int:
    """How many warpgroups share tiles of keys, which decides no bit: two where sequences have many
    queries, by their number on average, and tiles of two are as many as programs, or almost.
    """
    problem, queries = cached.problem, cached.q.shape[:-2].numel()
    if cached.k.dtype in CACHES or problem.headdim_v > 128:  # two have no registers for these
        return 1
    tiles = queries * problem.nheads / (2 * ROWS)
    return 2 if queries > FEW_QUERIES * batch and tiles > 0.75 * programs else 1


def shared_tile(
    problem: Problem, block: tuple[int, int, int], page_size: int, warpgroups: int
) -> SplitPipeline:
    """The same blocks for two warpgroups of rows: half the bytes of keys for as many products."""
    block_n, block_d, block_dv = block
    rows = ROWS // problem.group * problem.group
    room = SHARED_MEMORY["sm90"] - 1024
    stage = 2 * block_n * (block_d + block_dv)
    of_queries = 2 * warpgroups * ROWS * block_d
    q_stages = 2 if (room - 2 * of_queries) // stage > 3 else 1
    stages = min((room - q_stages * of_queries) // stage, 8)
    by_tma = is_box(page_size, block_n)
    return SplitPipeline(
        *(rows, *block, stages, q_stages, by_tma),
        STATE_IN_SHARED=False,
        COPY_WARPS=2,  # those that the load warp's group has room for
        WARPGROUPS=warpgroups,
    )


def plan_of(
    cached: Cached, out: Tensor, lse: Tensor, workspace: int = WORKSPACE, most: int | None = None
) -> Plan:
    """A launch for any lengths, of `most` programs; by default one for each SM."""
    problem, q, k, extras = cached.problem, cached.q, cached.k, cached.extras
    scales = Scales(*scales_of(cached.k_descale), *scales_of(cached.v_descale))
    row_scales = (scales.k_row is not None) + (scales.v_row is not None)
    page_size = 0 if cached.page_table is None else k.shape[1]
    batch, room = batch_of(q, extras.cu_seqlens_q), capacity(k, cached.page_table)
    if most is None:
        most = num_sms(q.device) if q.is_cuda else 4
    warpgroups = warpgroups_of(cached, batch, most)
    tile = tile_of(problem, page_size, k.dtype, row_scales, warpgroups)
    is_packed = extras.cu_seqlens_q is not None
    rows = q.shape[-3]
    reach = max(rows, room)
    numbers = numbers_of(cached.scalars, q[None] if is_packed else q, k)
    left, right = (min(side, reach) for side in cached.scalars[2:4])
    numbers = numbers._replace(left=left, right=right)
    tokens = ROWS // problem.group
    queries = q.shape[:-2].numel()
    tiles = problem.nheads_k * (triton.cdiv(rows, tokens) * (1 if is_packed else batch))
    tiles += problem.nheads_k * batch * is_packed
    pieces = triton.cdiv(room, cached.split_size)
    bound = tiles * max(pieces, 1)
    # Partial states of all pieces, or as many as there is memory for
    query_bytes = 4 * (problem.headdim_v + 2) * problem.nheads
    states = min(queries * pieces if pieces > 1 else 0, workspace // query_bytes, 2**25 - 1)
    counters = counters_of(q.device, HANDED_OUT + queries * problem.nheads_k)
    handed_out, by_tile = counters.split([HANDED_OUT, counters.numel() - HANDED_OUT])
    partials = partials_of(q, max(states, 1) * problem.nheads, problem.headdim_v)
    packed = batch if is_packed else 0
    sizes = SplitSizes(packed, problem.nheads_k, rows, room, batch, cached.split_size, states)
    args = (
        strided_of(q),
        *described(cached, tile),
        table_of(cached),
        Output(strided_of(out), lse, partials),
        Counters(handed_out, by_tile),
        optionals_of(extras, problem.mods),
        sizes,
        numbers,
        scales,
    )
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap)
    return Plan(min(bound, most), args, dict(FEATURES=features, TILE=tile, num_warps=4))


def partials_of(q: Tensor, rows: int, headdim_v: int) -> States:
    """Room for so many rows of partial states."""
    found = q.new_empty(rows * (headdim_v + 2), dtype=torch.float32)
    return States(*found.split([rows * n for n in (headdim_v, 1, 1)]))


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

    def __init__(self, cached: Cached, plan: Plan, out: Tensor, lse: Tensor) -> None:
        super().__init__(cached.q.device, out, lse, plan.args[OUTPUT].partials)
        self.counters = HANDED_OUT + plan.args[COUNTERS].tiles.numel()

    def launch(self, stream: int, row: list[Any]) -> None:
        """Launches it."""
        counters = counters_of(self.device, self.counters)
        at, moved = counters.data_ptr(), self.moved
        row[K], row[V] = moved(0, row[K]), moved(1, row[V])
        row += at, at + 4 * HANDED_OUT
        self.call(stream, row)


def step_of(
    cached: Cached, plan: Plan, out: Tensor, lse: Tensor, compiled: Any
) -> DecodeStep | None:
    """What was launched; None where it may not be again."""
    kernel = direct_of(compiled, plan.programs)
    if kernel is None:
        return None
    described = Descriptors(kernel, plan.args[1:3])
    q, k, v, *others = [x for x in cached.tensors if x is not None]
    gaps, operands = (object(), object()), []
    for which, (x, gap) in enumerate(zip((k, v), gaps)):
        first, *rest = described.at(which, x.data_ptr())
        operands += [(gap, *first[1:]) if isinstance(first, tuple) else gap, *rest]
    constants = plan.constants["FEATURES"], plan.constants["TILE"]
    args = plan.args[0], *operands, *plan.args[3:], *constants
    row = q, *gaps, *others, out, lse, *plan.args[OUTPUT].partials, *plan.args[COUNTERS]
    has_maps = None not in (described.moved(0, k.data_ptr()), described.moved(1, v.data_ptr()))
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
        from ....emulator.hopper import emulate

        seed = emulator_seed() or 0
        meanings = ASM | convert.ASM
        kernel = emulate(hopper_decode_kernel, seed=seed, asm=meanings)
        kernel[(plan.programs,)](*args, **plan.constants)
        return None
    with on_device(device):
        return first_launch(hopper_decode_kernel, plan.programs, *args, **plan.constants)
