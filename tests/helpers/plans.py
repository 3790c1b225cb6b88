"""The launches of a call, caught before they run, and compiled for a GPU that need not be there."""

from unittest import mock

import torch

from tilewise import mods, scores
from tilewise.kernels.common.operand import operands_of
from tilewise.kernels.common.outputs import empty_out
from tilewise.kernels.common.program import Launch, fake_args
from tilewise.kernels.common.results import BACKWARD, FORWARD
from tilewise.kernels.portable import captured_launch, launch
from tilewise.kernels.portable.plan import Plan
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import Extras, Scalars, describe
from tilewise.sparse import create_block_mask
from tilewise.testing import build, stats

EVERYTHING = dict(causal=True, left=100, softcap=30.0, alibi=True, sinks=True, seqused_k=True)
PACKED = dict(causal=True, packed=True)
MASK = dict(mask=True, score=True)
BLOCKS = dict(mask=True, blocks=True)
BIAS = dict(bias=True, dropout=True)
BATCH, SEQLEN, NHEADS, NHEADS_K = 2, 256, 4, 2


def plans_of(headdim, dtype, headdim_v=0, causal=False, left=-1, softcap=0.0, **tensors):
    """Plans by kernel name: fwd, bwd_delta, bwd_dkdv, bwd_dq, bwd_dbias and, where there is a
    score function, bwd_captured of one call.

    `tensors` says which of alibi, sinks, seqused_k, mask, score and bias are there, and whether
    sequences are packed, the mask comes by blocks, and there is dropout.
    """
    modifiers = modifiers_asked(tensors)
    rows = (1, BATCH * SEQLEN) if tensors.get("packed") else (BATCH, SEQLEN)
    q = torch.empty(*rows, NHEADS, headdim, dtype=dtype)
    k = torch.empty(*rows, NHEADS_K, headdim, dtype=dtype)
    v = torch.empty(*rows, NHEADS_K, headdim_v or headdim, dtype=dtype)
    starts = torch.ones(BATCH + 1, dtype=torch.int32) if tensors.get("packed") else None
    extras = Extras(
        torch.ones(NHEADS) if tensors.get("alibi") else None,
        torch.ones(NHEADS, dtype=dtype) if tensors.get("sinks") else None,
        torch.ones(BATCH, dtype=torch.int32) if tensors.get("seqused_k") else None,
        None,
        starts,
        starts,
        torch.ones(BATCH, 1, SEQLEN, SEQLEN, dtype=dtype) if tensors.get("bias") else None,
        torch.ones(2, dtype=torch.int64) if tensors.get("dropout") else None,
        modifiers.captured,
    )
    dropout_p = 0.1 if tensors.get("dropout") else 0.0
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1, dropout_p)
    flags = "bottom_right", False, modifiers.mods, extras.bias is not None
    problem = describe(q, k, v, extras, scalars, *flags)
    plans = []

    def note(plan):
        plans.append(plan)
        return Launch(plan.kernel, 0, {}, {}, {})

    out, lse = empty_out(q, problem.headdim_v)
    dlse = torch.empty_like(lse) if tensors else None
    of_forward = operands_of(FORWARD, (q, k, v, *extras.tensors))
    of_backward = operands_of(BACKWARD, (out, dlse, q, k, v, out, lse, *extras.tensors))
    with mock.patch.object(Plan, "configured", note):
        launch.forward_program(problem, scalars, **of_forward)
        launch.backward_program(problem, scalars, **of_backward)
        if problem.mods.score:
            captured_launch.captured_program(problem, scalars, [0], **of_backward)
    return {plan.name: plan for plan in plans}


class Memory:
    """A workspace of tensors, with which launches are planned that run by themselves."""

    def add(self, name, shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype)


def run(launch):
    """Launches for tensors that are its arguments, in the interpreter."""
    if launch.programs:
        launch.start({}, torch.device("cpu"))


def modifiers_asked(tensors):
    """A mask and a score function that read a tensor each."""
    documents, slopes = torch.zeros(SEQLEN, dtype=torch.int32), torch.ones(NHEADS)
    mask = mods.document(documents) & mods.causal() if tensors.get("mask") else None
    table = torch.ones(NHEADS, 65)
    score = {True: scores.alibi(slopes), "table": scores.relative_bias(table)}.get(
        tensors.get("score")
    )
    sizes = BATCH, NHEADS, SEQLEN, SEQLEN
    if tensors.get("blocks"):
        return modifiers_of(None, score, create_block_mask(mask, *sizes), sizes)
    return modifiers_of(mask, score, None, sizes)


def config_of(plan, target):
    """What a launch on such a GPU would use."""
    return plan._replace(arch=target).config()


def compiled(plan, target, config=None):
    """The kernel of a launch."""
    return built(plan._replace(arch=target).configured(config), target)


def built(launch, target):
    """A launch compiled for a GPU that need not be there."""
    return build(launch.kernel, *fake_args(launch), on=target, **launch.settings)


def compiled_stats(plan, target, config=None):
    """What the compiler made of a launch: registers, spills, shared memory, instructions."""
    return stats(compiled(plan, target, config))
