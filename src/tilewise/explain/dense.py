"""What would happen to a call, and why: which backend serves it, its launches, its roofline.

No GPU is needed. Backends answer as they would on the GPU that is asked about, tuning gives the
tiles it gives there, and the compiler says what they need.
"""

from __future__ import annotations

import torch

from .. import dispatch
from ..kernels.common.arguments import aligned
from ..kernels.cpu import flash, tiles
from ..kernels.cpu.dense import make_dense
from ..ops.flops import visible_pairs
from ..problem import OPEN
from .answers import CPU, Answer, Explanation, Work, answers_of, chosen_of, compiled, standing_in
from .call import Call, call_of
from .cards import Card, cpu_roof
from .launches import Launch, launches_of
from .shapes import FP8, RELATIVE, Shape
from .traffic import PASSES, moved, visited_tiles

MATMULS = {  # S again in the backward; the portable one has S and dP twice
    "hopper": {"fwd": 2, "bwd": 5},
    "portable": {"fwd": 2, "bwd": 7},
    "cpu": {"fwd": 2, "bwd": 5},
}
FEW_QUERIES = (
    "forward: few queries and many keys, so the portable split-KV kernels"
    " of attention with a KV cache; `tilewise explain --cache` shows them"
)
DEQUANTISED = "the products do not run in FP8 there: q, k and v are dequantised"


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
    if shape.dtype == FP8:
        return explain_fp8(shape, target, card, backend)
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    call = call_of(few, deterministic)  # the rest of the batch brings more tiles, and no others
    answers = answers_of_call(call, target)
    chosen = chosen_of(answers, backend)
    launches = []
    for launch in launches_of(call, chosen, target, PASSES[shape.direction]):
        launch = launch._replace(tiles=launch.tiles * shape.batch // few.batch)
        launches.append(compiled(launch, target, card=card, with_compiler=with_compiler))
    how = way_of_cpu(shape, deterministic) if chosen == "cpu" else ""
    if backend is None and target != CPU:
        from ..kernels.portable import few_queries

        how = FEW_QUERIES if few_queries.serves(call.problem, call.q, call.k) else how
    work = work_of(shape, chosen or "cpu", launches, card)
    forced = backend is not None
    return Explanation(shape, target, card, chosen, forced, answers, launches, how, work=work)


def explain_fp8(
    shape: Shape, target: str, card: Card | None, backend: str | None = None
) -> Explanation:
    """Explains a forward of e4m3 tensors on a card, or on the CPU, where there is none: which
    backend serves it, and whether its products run in 8 bits there.
    """
    few = shape if shape.lengths else shape._replace(batch=min(shape.batch, 2))
    problem = call_of(few).problem

    def ask(name: str, device: torch.device) -> str | None:
        return dispatch.ask_fp8(name, problem, device, torch.bfloat16)

    answers = answers_of(target, ask)
    chosen = chosen_of(answers, backend)
    how = products_of(chosen, target) if chosen else ""
    return Explanation(shape, target, card, chosen, backend is not None, answers, [], how)


def products_of(backend: str, target: str) -> str:
    """Whether Q K^T and P V of a backend are products of 8 bits on a target, in words."""
    if backend == "hopper":
        return "the products run in FP8, on the tensor cores"
    if backend == "portable":
        from ..kernels.portable.fp8_launch import has_product

        if has_product(target):
            return "the products run in FP8, by Triton's dot"
        return f"{DEQUANTISED} to bfloat16, tile by tile"
    return f"{DEQUANTISED} to float32"


def answers_of_call(call: Call, target: str) -> list[Answer]:
    """Each backend's, with what a backend that serves copies."""
    problem, q, k, v, extras, _ = call
    is_aligned = all(map(aligned, (q, k, v)))
    has_many = dispatch.has_many(problem, q, k, extras)

    def ask(name: str, device: torch.device) -> str | None:
        return dispatch.ask(name, problem, device, is_aligned, has_many)

    answers = answers_of(target, ask)
    with standing_in(target):
        copies = [dispatch.why_copied(x.backend, problem, is_aligned) for x in answers]
    return [x._replace(reason=x.reason or why) for x, why in zip(answers, copies)]


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


def work_of(shape: Shape, backend: str, used: list[Launch], card: Card | None) -> Work:
    """FLOPs, bytes and the roof."""
    dtype = getattr(torch, shape.dtype)
    done = None
    if used and not shape.modifier and not shape.lengths:
        done = _flops_of_tiles(shape, backend, used)
    first, last = _blocks_of(used) if used else ((tiles.BLOCK_M, tiles.BLOCK_N),) * 2
    roof = card.roof(dtype.itemsize * 8) if card is not None else cpu_roof(dtype)
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
    pairs = sum(visible_pairs(m, n, left, right, "bottom_right") for m, n in lengths)
    return pairs * (1 if shape.lengths else shape.batch)


def _blocks_of(launches: list[Launch]) -> list[tuple[int, int]]:
    """The tiles of the first and of the last kernel."""
    return [(one.block_m, one.block_n) for one in (launches[0], launches[-1])]


def _flops_of_tiles(shape: Shape, backend: str, launches: list[Launch]) -> float:
    """FLOPs of whole tiles: a partial one is computed as a full one, columns are padded, and the
    backward recomputes.
    """
    passes = PASSES[shape.direction]
    total = 0.0
    for direction, launch in zip(passes, (launches[0], launches[-1])):
        blocks = launch.block_m, launch.block_n
        m, n = shape.seqlen_q, shape.seqlen_k
        visits = visited_tiles(m, n, blocks, shape.causal, shape.window)
        scores = visits * blocks[0] * blocks[1] * shape.nheads * shape.batch
        total += MATMULS[backend][direction] * scores * launch.columns
    return total
