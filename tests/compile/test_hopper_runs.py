"""The forward of runs compiles for sm_90: it waits at system scope, fences the async proxy, and has
the registers for it.
"""

import re

import pytest
import torch
import triton
from helpers.sass import innermost_loops, spills_in
from helpers.tiers import sample_rows

from tilewise.explain.launches import build_launch
from tilewise.kernels.common.device_words import WORDS
from tilewise.kernels.common.operand import gaps_in, operands_of
from tilewise.kernels.hopper.fwd import runs_launch
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import SMEM_LIMIT, stats

pytestmark = pytest.mark.compile

# Bytes a thread spills at headdim 256 by Triton 3.6, as measured: where a program or a tile starts
# or ends, and nowhere in the loops of products and of copies
IS_MEASURED = triton.__version__.startswith("3.6.")
SPILLS = {"causal": 16, "window": 36, "softcap": 48, "alibi": 32, "sinks": 16}
FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "softcap": dict(causal=True, softcap=30.0),
    "alibi": dict(causal=True, alibi=True),
    "sinks": dict(causal=True, sinks=True),
}


def compiled(headdim, heads=2, causal=False, left=-1, softcap=0.0, alibi=False, sinks=False):
    q = torch.empty(1, 8192, 8, headdim, dtype=torch.bfloat16)
    pulled = [torch.empty(4 // heads, 32768, 1, heads, headdim, dtype=q.dtype) for _ in "kv"]
    slopes = torch.ones(8) if alibi else None
    extras = Extras(slopes, torch.ones(8, dtype=q.dtype) if sinks else None)
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    local = torch.empty(1, 8192, 4, headdim, dtype=q.dtype)
    problem = describe(q, local, local, extras, scalars, "bottom_right", False)
    assert runs_launch.serves(problem)
    runs = (
        runs_launch.Run(0, 4096, 0, 8192, 4096),
        runs_launch.Run(4096, 4096, 0, 32768, 28672),
    )
    walk = runs_launch.Walk(runs, 32768, heads, (0, *range(1, 128)), 127)
    words = torch.zeros(WORDS, dtype=torch.int32)
    tensors = q, *pulled, *extras[:2], words
    program = runs_launch.forward_program(
        problem, scalars, walk=walk, limit=10**12, **operands_of(runs_launch.FORWARD, tensors)
    )
    (launch,) = program.launches
    # A later launch has addresses where this one has tensors
    gaps = {x.name for x in gaps_in(launch.positional)}
    absent = {name for name, x in zip(("alibi_slopes", "sinks"), extras) if x is None}
    assert gaps == {*program.names} - absent
    optionals = launch.args["optionals"]
    assert optionals.runs.table.name == "table" and optionals.runs.words.name == "words"
    assert alibi == (optionals.alibi_slopes is not None) and sinks == (optionals.sinks is not None)
    return build_launch(launch, "sm90")


CASES = [(headdim, name) for headdim in (64, 128, 256) for name in FEATURES]


@pytest.mark.parametrize("headdim, name", sample_rows(CASES, (128, "causal")))
def test_the_load_warp_waits(headdim, name):
    kernel = compiled(headdim, **FEATURES[name])
    found = stats(kernel)
    assert found["smem"] <= SMEM_LIMIT["sm90"], found
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0, found
    # Lanes that have waited are together again where they copy
    assert not found["wgmma_serialized"] and not found["copies_apart"], found
    assert not found["idle_barriers"], found
    if IS_MEASURED:
        assert found["spill_stores"] <= (SPILLS.get(name, 0) if headdim == 256 else 0), found
        products = innermost_loops(kernel, "HGMMA")[: found["warps"] // 4 - 1]  # one a warpgroup
        copies = innermost_loops(kernel, "UTMALDG")[0]
        assert not any(map(spills_in, (*products, copies)))
    else:
        assert found["spill_stores"] <= 840, found


def test_a_wait_acquires_at_system_scope_and_fences_the_proxy_of_tma():
    ptx = compiled(128, causal=True).asm["ptx"]
    wait, fence = r"ld\.acquire\.sys\.global\.b32", r"fence\.proxy\.async\.global"
    copy = r"cp\.async\.bulk\.tensor\.5d\.shared::cluster"
    said = "".join(x[0] for x in re.findall(f"{wait}|{fence}|{copy}", ptx))
    # Q; then a fence behind each wait, and after it K and V, two copies each; the last V
    assert re.fullmatch("c*(lfc{4})+c*", said), said
    for loop in re.findall(f"{wait}.*?{fence}", ptx, re.DOTALL):
        assert "globaltimer" in loop  # it ends
        assert loop.count("bra.uni") == 2 and "bra " not in loop  # all lanes leave it, or none
