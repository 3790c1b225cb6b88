"""The Hopper forward compiles for sm_90 as tuning launches it: fits, has wgmma, spills nothing."""

import pytest
import torch

from tilewise.kernels.hopper import launch
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import SMEM_LIMIT, build, stats
from tilewise.tuning.tables import TABLE

pytestmark = pytest.mark.compile

FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "softcap": dict(causal=True, softcap=30.0),
    "alibi": dict(causal=True, alibi=True),
    "sinks": dict(causal=True, sinks=True),
    "everything": dict(causal=True, left=100, softcap=30.0, alibi=True, sinks=True),
}


def compiled_stats(
    headdim,
    headdim_v=0,
    seqlen=4096,
    nheads_k=4,
    dtype=torch.bfloat16,
    causal=False,
    left=-1,
    softcap=0.0,
    alibi=False,
    sinks=False,
):
    nheads = 4
    q = torch.empty(2, seqlen, nheads, headdim, dtype=dtype)
    k = torch.empty(2, seqlen, nheads_k, headdim, dtype=dtype)
    v = torch.empty(2, seqlen, nheads_k, headdim_v or headdim, dtype=dtype)
    out, lse = torch.empty_like(q[..., :1].expand(-1, -1, -1, v.shape[-1])), torch.empty(1)
    extras = Extras(
        torch.ones(nheads) if alibi else None, torch.ones(nheads, dtype=dtype) if sinks else None
    )
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    problem = describe(q, k, v, extras, scalars, "bottom_right", False)
    plan = launch.plan_for(problem, q)
    args = launch.arguments(problem, plan, q, k, v, out, lse, extras, scalars)
    constants = dict(FEATURES=plan.features, TILE=plan.tile)
    found = stats(
        build(launch.hopper_fwd_kernel, *launch.checked(args), on="sm90", num_warps=4, **constants)
    )
    assert found["smem"] <= SMEM_LIMIT["sm90"], found
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0 and found["HMMA"] == 0, found
    assert not found["wgmma_serialized"], found
    assert found["spill_stores"] == 0, found
    return found


@pytest.mark.parametrize(
    "key", [key for key in TABLE if key.kernel == "hopper_fwd"], ids=lambda key: str(key[2:])
)
def test_measured_rows(key):
    compiled_stats(key.block_d, causal=key.is_causal, seqlen=512 if key.is_short else 4096)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, headdim):
    compiled_stats(headdim, **FEATURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("headdims", [(72, 72), (192, 128), (64, 256), (40, 40)], ids=str)
def test_padded_headdims(headdims):
    compiled_stats(*headdims)


def test_heads_that_share_a_tile():
    compiled_stats(128, seqlen=1, nheads_k=1, causal=True)


@pytest.mark.slow
def test_fp16():
    compiled_stats(128, dtype=torch.float16)
