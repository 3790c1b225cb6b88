"""Host side of the backward: delta, then all gradients, then dQ from its accumulator.

Memory besides the gradients: dQ in fp32, and two floats a query; of packed sequences for up to 128
queries a sequence more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....problem import Extras, Grads, Problem, Saved, Scalars
from ...common.program import Program, Step, TorchStep
from ...common.results import (
    AFTER_KEYS,
    BACKWARD,
    BEFORE_KEYS,
    backward_of,
    grads_of,
    names_with,
    records_of,
    sum_sinks,
)
from ...common.workspace import Workspace
from ..descriptors import is_in_steps
from ..padded import Readable, copies_of, is_padded, is_readable, padded_width
from .bias_pairs import clear, has_unseen, sum_scores
from .kernels import Kernels


def prepare_backward(problem: Problem, scalars: Scalars) -> Callable[..., Grads]:
    """`backward_of` a problem: gradients by recomputation."""
    return backward_of(functools.partial(backward_program, problem, scalars))


def backward_program(problem: Problem, scalars: Scalars, **tensors: Any) -> Program:
    """What lse has lost, delta, then all gradients but dQ, which its accumulator has, then dQ, and
    the gradient of a bias that has a kernel of its own. Before and after the gradients of keys is a
    mark, or around all that reads copies of k and v or writes others of dK and dV.
    """
    saved, extras = records_of(tensors)
    names = names_with(BACKWARD, extras)
    cleared, steps, work = [], [BEFORE_KEYS, AFTER_KEYS], Workspace(saved.q.device)
    if saved.q.numel() == 0 or saved.k.numel() == 0:  # a descriptor of no rows is invalid
        cleared = ["dq", "dk", "dv", "dbias"]
    if saved.lse.numel() == 0:
        cleared.append("dsinks")
    grads = grads_of(problem, saved, extras, cleared)
    if saved.lse.numel() > 0:
        steps = steps_of(problem, scalars, saved, extras, grads, work)
    return Program(names, steps, work, tuple(grads))


def steps_of(
    problem: Problem, scalars: Scalars, saved: Saved, extras: Extras, grads: Grads, work: Workspace
) -> list[Step]:
    """The steps of a backward of some rows."""
    first, of_keys = Readable(work), Readable(work)
    # Such as the expanded gradient of a sum
    (dout,) = first.copied((saved.dout,), [not is_readable(saved.dout)])
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    q, k, v = saved.q, saved.k, saved.v
    if is_padded(problem):
        q, k, v = of_keys.copied((q, k, v), [not is_readable(x) for x in (q, k, v)])
    if problem.has_seqused_k and not problem.is_packed:
        k, v = of_keys.copied((k, v), [not is_in_steps(x) for x in (k, v)])
    saved = saved._replace(dout=dout, dlse=dlse, q=q, k=k, v=v)
    written, copies = grads, []
    if is_padded(problem):
        written, copies = with_padded_rows(grads, work)
    kernels = Kernels(problem, scalars, saved, extras, written, work)
    is_early = bool(of_keys.steps) or kernels.lost is not None
    before: list[Step] = list(first.steps)
    if is_early:
        before += [BEFORE_KEYS, *of_keys.steps]
    if kernels.lost is not None:
        before.append(kernels.rest())
    before.append(kernels.before())
    if grads.dsinks is not None:
        before.append(TorchStep(sum_sinks, ("dsinks", "parts")))
    if not is_early:
        before.append(BEFORE_KEYS)
    if k.numel() == 0:
        return [*before, AFTER_KEYS]
    after: list[Step] = []
    if kernels.ds is not None:
        after.append(TorchStep(sum_scores, ("dbias", "ds")))
    after += kernels.after()
    if kernels.target is not None and has_unseen(problem):
        before.append(TorchStep(clear, (kernels.target.name,)))
    before.append(kernels.main())
    return [*before, *after, *copies, AFTER_KEYS] if copies else [*before, AFTER_KEYS, *after]


def with_padded_rows(grads: Grads, work: Workspace) -> tuple[Grads, list[Step]]:
    """Gradients for TMA to write, dK and dV, and the steps that copy them to those that come
    back.
    """
    written, copies = {}, []
    for x in (grads.dk, grads.dv):
        if not is_readable(x):
            shape = *x.shape[:-1], padded_width(x.shape[-1])
            rows = work.add(f"{x.name} in padded rows", shape, x.dtype)
            written[x.name] = rows.as_strided(x.shape, rows.strides)
            copies.append((written[x.name], x))
    return grads._replace(**written), copies_of(copies)
