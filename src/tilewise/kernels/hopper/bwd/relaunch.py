"""A backward that comes again: straight to its compiled kernels.

What a launch of a look needs is kept, as in the forward, but under all that its tensors look like:
the gradient that comes in may have other strides than the last one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....problem import Grads, Problem, Saved
from ...common.relaunch import ALIGNMENT, Again, Pattern, is_watched, pattern_of
from ..compat import Direct, direct
from ..descriptors import of_backward
from ..tile_counter import counter
from .bias_pairs import clear_unseen, sum_scores, target_of

Tensor = torch.Tensor


class Scratch(NamedTuple):
    """Memory of a backward beside its gradients; or what it is allocated by."""

    dq: Any  # (batch, nheads, padded, BLOCK_D), fp32
    stats: Any  # (batch, nheads, 2, padded)
    delta: Any  # as lse, where the gradient of the bias takes a kernel; else None
    turns: Any  # (batch, nheads, m_blocks, 2), int32, where tiles wait for each other
    parts: Any  # (batch, nheads, m_blocks) of the gradient of the sinks
    ds: Any  # (batch, nheads, seqlen_q, padded seqlen_k), where a sum of it is the bias' gradient


class Launched(NamedTuple):
    """A launch as it went through Triton's launcher."""

    compiled: Any
    programs: int
    args: tuple


class Kept(NamedTuple):
    """What the backwards of one look share. It holds no tensor."""

    device: int
    plan: Any
    shapes: Scratch
    delta: Again
    main: Direct
    optionals: Pattern  # of all kernels
    args: Pattern  # of the main kernel, but descriptors
    after: tuple[Again, ...]  # dQ and the gradient of the bias
    encoded: tuple[dict[int, list], ...]  # descriptors, by address


ADDRESSES = 64  # of one operand, whose descriptors are kept
LOOKS = 128
_kept: dict[tuple, Kept] = {}


def shapes_of(problem: Problem, plan: Any, lse: Tensor, m_blocks: int, ds: tuple | None) -> Scratch:
    """The shapes of a backward's memory, for that many blocks of queries a head."""
    heads = lse.shape[:2]
    padded = m_blocks * plan.edge.BLOCK_M
    return Scratch(
        (*heads, padded, plan.tile.BLOCK_D),
        (*heads, 2, padded),
        lse.shape if problem.has_bias_grad and not plan.tile.BIAS_GRAD else None,
        (*heads, m_blocks, 2) if plan.tile.ORDERED else None,
        (*heads, m_blocks) if problem.has_sinks else None,
        ds,
    )


def make_scratch(problem: Problem, shapes: Scratch, lse: Tensor) -> Scratch:
    """The memory of one backward."""
    dq, stats, delta, turns, parts, ds = shapes
    if delta is not None:
        delta = lse.new_empty(delta)
    if turns is not None:
        turns = lse.new_empty(turns, dtype=torch.int32)
    if parts is not None:  # blocks between packed sequences have no part
        parts = (lse.new_zeros if problem.is_packed else lse.new_empty)(parts)
    if ds is not None:
        ds = lse.new_empty(ds, dtype=problem.dtype)
    return Scratch(lse.new_empty(dq), lse.new_empty(stats), delta, turns, parts, ds)


def fill_dsinks(grads: Grads, scratch: Scratch) -> None:
    """The gradient of the sinks, of which every block of queries has a part."""
    if grads.dsinks is not None:
        grads.dsinks.copy_(scratch.parts.sum((0, 2)))


def keep(look: tuple, tensors: tuple, plan: Any, edges: list[Launched], main: Launched) -> None:
    """Keeps a backward that went through Triton's launcher. `tensors` are those given, the extras,
    gradients and scratch memory, of which no two are one object; `edges` come before and after.
    """
    saved, extras, grads, scratch = tensors
    kernel = direct(main.compiled, main.programs)
    row = (*saved, *extras.tensors, *grads, *scratch, main.args.queue.counter)
    optionals = main.args.optionals
    # All but descriptors: of q, dout, k, v and stats, later of dk, dv and the bias
    groups = main.args.optionals, main.args.sizes, main.args.numbers
    rest = main.args.further, main.args.queue, *groups
    args = main.args.dq, main.args.turns, *rest, plan.features, plan.tile
    patterns = [pattern_of(x, (*row, optionals)) for x in (args, *(edge.args for edge in edges))]
    patterns.append(pattern_of(optionals, row))
    if kernel is None or None in patterns:
        return
    args, *others, of_optionals = patterns
    delta, *after = (Again(*edge[:2], args) for edge, args in zip(edges, others))
    shapes = Scratch(*(None if x is None else x.shape for x in scratch))
    encoded = tuple({} for _ in plan.blocks)
    index = torch.cuda.current_device()
    if len(_kept) >= LOOKS:
        _kept.clear()
    _kept[look] = Kept(
        *(index, plan, shapes, delta, kernel, of_optionals, args, tuple(after), encoded)
    )


def launch_again(
    look: tuple, addresses: list[int], saved: Saved, grads: Grads, bias: Tensor | None
) -> bool:
    """A backward of tensors of a look, the given ones and the extras at these addresses. False
    where none of this look is kept, or the launch is Triton's own for another reason.
    """
    kept = _kept.get(look)
    if kept is None or torch._C._cuda_getDevice() != kept.device or is_watched():
        return False
    scratch = make_scratch(look[0], kept.shapes, saved.lse)
    stream = torch._C._cuda_getCurrentRawStream(kept.device)
    tiles = counter(saved.q.device, kept.device, stream)
    made = [0 if x is None else x.data_ptr() for x in (*grads, *scratch, tiles)]
    if any([address % ALIGNMENT for address in made]):
        return False
    values = addresses + made
    values.append(kept.optionals.filled(values.copy()))
    kept.delta.launch(kept.device, values)
    fill_dsinks(grads, scratch)
    target = target_of(kept.plan, grads, scratch.ds)
    clear_unseen(look[0], target)
    of_pairs = [bias] if kept.plan.tile.BIAS_COPIED else []
    of_pairs += [] if target is None else [target]
    described = _encoded(kept, saved, scratch, grads, *of_pairs)
    q, dout, k, v, stats, dk, dv, for_bias, for_dbias = (*described, [None], [None])[:9]
    dq, turns, *rest = kept.args.filled(values)
    kept.main(stream, *q, *dout, *k, *v, *stats, dq, turns, *dk, *dv, *for_bias, *for_dbias, *rest)
    if target is not None:
        sum_scores(grads.dbias, scratch.ds)
    for edge in kept.after:
        edge.launch(kept.device, values)
    return True


def _encoded(
    kept: Kept, saved: Saved, scratch: Scratch, grads: Grads, *of_pairs: Tensor
) -> list[list]:
    """The descriptors of a backward, in the order of the kernel's arguments."""
    read = saved.q, saved.dout, saved.k, saved.v
    tensors = *read, scratch.stats, grads.dk, grads.dv, *of_pairs
    encoded = [known.get(x.data_ptr()) for known, x in zip(kept.encoded, tensors)]
    if None not in encoded:
        return encoded
    for which, described in enumerate(of_backward(kept.plan, *tensors)):
        if encoded[which] is None:
            known, address = kept.encoded[which], described.base.data_ptr()
            if len(known) >= ADDRESSES:
                known.clear()
            known[address] = encoded[which] = kept.main.encode(which, described)
    return encoded
