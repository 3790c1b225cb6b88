"""The launches of a call, caught before they run, and compiled for a GPU that need not be there."""

from unittest import mock

import torch

from tilewise.kernels.arguments import features_of
from tilewise.kernels.portable import launch
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import build, stats

EVERYTHING = dict(causal=True, left=100, softcap=30.0, alibi=True, sinks=True, seqused_k=True)
PACKED = dict(causal=True, packed=True)
BATCH, SEQLEN, NHEADS, NHEADS_K = 2, 256, 4, 2


def plans_of(headdim, dtype, headdim_v=0, causal=False, left=-1, softcap=0.0, **tensors):
    """Plans by kernel name: fwd, bwd_delta, bwd_dkdv and bwd_dq of one call.

    `tensors` says which of alibi, sinks and seqused_k are there, and whether sequences are packed.
    """
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
    )
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    problem = describe(q, k, v, extras, scalars, "bottom_right", False)
    plans = []
    with mock.patch.object(launch, "run", plans.append):
        out, lse = launch.forward(problem, q, k, v, extras, scalars)
        dlse = torch.empty_like(lse) if tensors else None
        launch.backward(problem, out, dlse, q, k, v, out, lse, extras, scalars)
    return {plan.name: plan for plan in plans}


def config_of(plan, target):
    """What a launch on such a GPU would use."""
    with mock.patch.object(launch, "architecture", lambda device: target):
        return plan.config()


def compiled_stats(plan, target, config=None):
    """What the compiler made of a launch: registers, spills, shared memory, instructions."""
    config = config or config_of(plan, target)
    constants = dict(FEATURES=features_of(plan.problem), TILE=plan.tile(config))
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True)
    return stats(build(plan.kernel, *plan.args, on=target, **constants, **options))
