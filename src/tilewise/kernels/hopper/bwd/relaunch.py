"""Relaunches of a backward: its compiled kernels without Triton's front end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....problem import Between, Extras, Grads, Problem, Saved
from ...common.alignment import ALIGNMENT
from ...common.direct import Relaunch
from ...common.relaunch import (
    Launched,
    Pattern,
    addresses_of,
    pattern_of,
    relaunches_of,
)
from ..compat import Descriptors, Direct, direct_of
from ..padded import empty_rows
from ..tile_counter import counter
from .bias_pairs import clear_unseen, sum_scores, target_of

Tensor = torch.Tensor
NOTHING = Between(lambda: None, lambda _: None)
NO_PAIRS: list[list] = [[None], [None]]  # descriptors of the bias and its gradient


class Scratch(NamedTuple):
    """Temporary memory of a backward; or its shapes."""

    dq: Any  # (batch, nheads, padded, BLOCK_D), fp32
    stats: Any  # (batch, nheads, 2, padded)
    delta: Any  # as lse, where the gradient of the bias takes a kernel; else None
    dq_semaphore: Any  # (batch, nheads, m_blocks, 2), int32, the semaphores of ordered accumulation
    lost: Any  # as lse: what that has lost, where a bias or a score function adds to scores
    parts: Any  # (batch, nheads, m_blocks) of the gradient of the sinks
    ds: Any  # (batch, nheads, seqlen_q, padded seqlen_k), where a sum of it is the bias' gradient
    dout: Any  # with `lost`, dO scaled by it


class Ready(NamedTuple):
    """What backwards after the first need. It holds no tensor."""

    problem: Problem
    device: int
    plan: Any
    shapes: Scratch
    starts: list[int | None]  # of dq to `lost` in one memory, in bytes
    floats: int  # of that
    has_extras: bool
    before: list[Relaunch]
    main: Direct
    described: Descriptors  # q, dout, k, v, stats, dk, dv, the bias and its gradient
    places: tuple[int, ...]  # in the row of addresses, of the first seven
    accumulated: Pattern  # of the main kernel, behind its first descriptors
    args: Pattern  # and behind the others
    after: list[Relaunch]  # dQ and the gradient of the bias


def shapes_of(problem: Problem, plan: Any, lse: Tensor, m_blocks: int, ds: tuple | None) -> Scratch:
    """The shapes of a backward's memory, for that many blocks of queries a head."""
    heads = lse.shape[:2]
    padded = m_blocks * plan.edge.BLOCK_M
    has_rest = problem.has_bias or problem.mods.score
    return Scratch(
        (*heads, padded, plan.tile.BLOCK_D),
        (*heads, 2, padded),
        lse.shape if problem.has_bias_grad and not plan.tile.BIAS_GRAD else None,
        (*heads, m_blocks, 2) if plan.tile.ORDERED else None,
        lse.shape if has_rest else None,
        (*heads, m_blocks) if problem.has_sinks else None,
        ds,
        (lse.shape[0], lse.shape[2], lse.shape[1], problem.headdim_v) if has_rest else None,
    )


def make_scratch(problem: Problem, shapes: Scratch, lse: Tensor) -> Scratch:
    """The memory of one backward."""
    dq, stats, delta, dq_semaphore, lost, *_ = shapes
    if delta is not None:
        delta = lse.new_empty(delta)
    if dq_semaphore is not None:
        dq_semaphore = lse.new_empty(dq_semaphore, dtype=torch.int32)
    if lost is not None:
        lost = lse.new_empty(lost)
    dq, stats = lse.new_empty(dq), lse.new_empty(stats)
    return Scratch(dq, stats, delta, dq_semaphore, lost, *make_others(problem, shapes, lse))


def make_others(problem: Problem, shapes: Scratch, lse: Tensor) -> tuple[Tensor | None, ...]:
    """What of it torch sums, the parts of the gradient of the sinks and dS, and what is in 16
    bits.
    """
    parts, ds, dout = shapes[-3:]
    if parts is not None:  # blocks between packed sequences have no part
        parts = (lse.new_zeros if problem.is_packed else lse.new_empty)(parts)
    ds = None if ds is None else lse.new_empty(ds, dtype=problem.dtype)
    if dout is not None:
        dout = empty_rows(lse, *dout, dtype=problem.dtype)
    return parts, ds, dout


def in_one(shapes: Scratch) -> tuple[list[int | None], int]:
    """Where the others begin in one memory, in bytes, and how many floats that has."""
    starts: list[int | None] = []
    floats = 0
    for shape in shapes[:5]:
        starts.append(None if shape is None else 4 * floats)
        floats += 0 if shape is None else -(-math.prod(shape) // 128) * 128
    return starts, floats


def fill_dsinks(grads: Grads, parts: Tensor | None) -> None:
    """The gradient of the sinks, of which every block of queries has a part."""
    if grads.dsinks is not None and parts is not None:
        grads.dsinks.copy_(parts.sum((0, 2)))


def ready_of(
    plan: Any,
    tensors: tuple[Saved, Extras, Grads, Scratch],
    launches: Sequence[Launched],
    problem: Problem,
) -> Ready | None:
    """How to relaunch a backward that Triton launched: the preprocessing kernel, the main one and
    the postprocessing ones. None where it may not be.
    """
    saved, extras, grads, scratch = tensors
    n_before = 1 if scratch.lost is None else 2  # before the main kernel
    before, main, after = launches[:n_before], launches[n_before], launches[n_before + 1 :]
    args = main.args
    has_extras = any(x is not None for x in extras.tensors)
    inputs = *saved, *(extras.tensors if has_extras else ())
    row = *inputs, *grads, *scratch, args.queue.counter
    relaunches = relaunches_of((*before, *after), row)
    kernel = direct_of(main.compiled, main.programs)
    accumulated = pattern_of((args.dq, args.dq_semaphore), row)
    groups = args.heads_per_batch, args.queue, args.optionals, args.sizes, args.numbers
    last_args = pattern_of((*groups, plan.features, plan.tile), row)
    if relaunches is None or kernel is None or accumulated is None or last_args is None:
        return None
    operands = args.q, args.dout, args.k, args.v, args.stats, args.dk, args.dv
    pairs = [x for x in (args.bias, args.dbias) if x is not None]
    described = Descriptors(kernel, (*operands, *pairs))
    shapes = Scratch(*(None if x is None else x.shape for x in scratch))
    of_grads, of_scratch = len(inputs), len(inputs) + len(grads)
    dout = 0 if scratch.dout is None else of_scratch + Scratch._fields.index("dout")
    starts, floats = in_one(shapes)
    return Ready(
        problem,
        device=torch.cuda.current_device(),
        plan=plan,
        shapes=shapes,
        starts=starts,
        floats=floats,
        has_extras=has_extras,
        before=relaunches[:n_before],
        main=kernel,
        described=described,
        places=(2, dout, 3, 4, of_scratch + 1, of_grads + 1, of_grads + 2),
        accumulated=accumulated,
        args=last_args,
        after=relaunches[n_before:],
    )


def relaunch_backward(
    ready: Ready, saved: Saved, grads: Grads, extras: Extras, between: Between = NOTHING
) -> bool:
    """Launches a backward; False, and nothing is launched, where the alignment is not that which
    the kernels were compiled for.
    """
    problem, plan = ready.problem, ready.plan
    memory = saved.lse.new_empty(ready.floats)
    parts, ds, dout = make_others(problem, ready.shapes, saved.lse)
    stream = torch._C._cuda_getCurrentRawStream(ready.device)
    start = memory.data_ptr()
    addresses = addresses_of(grads)
    addresses += [0 if n is None else start + n for n in ready.starts]
    addresses += addresses_of((parts, ds, dout))
    if any([address % ALIGNMENT for address in addresses]):
        return False
    row = addresses_of(saved)
    if ready.has_extras:
        row += addresses_of(extras.tensors)
    row += addresses
    row.append(counter(saved.q.device, ready.device, stream).data_ptr())
    for launch in ready.before:
        launch(stream, row)
    fill_dsinks(grads, parts)
    between.before_keys()
    target = target_of(plan, grads, ds)
    clear_unseen(problem, target)
    of = ready.described.at
    q, dout, k, v, stats, dk, dv = [of(n, row[place]) for n, place in enumerate(ready.places)]
    for_bias, for_dbias = NO_PAIRS
    if plan.tile.BIAS_COPIED:
        for_bias = of(7, extras.bias.data_ptr())
        for_dbias = for_dbias if target is None else of(8, target.data_ptr())
    added, args = ready.accumulated(row), ready.args(row)
    ready.main(stream, *q, *dout, *k, *v, *stats, *added, *dk, *dv, *for_bias, *for_dbias, *args)
    between.after_keys(grads)
    if target is not None:
        sum_scores(grads.dbias, ds)
    for launch in ready.after:
        launch(stream, row)
    return True
