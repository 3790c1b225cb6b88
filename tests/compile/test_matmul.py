"""The tour's matrix product, compiled for Hopper as it is launched: no spills, one loop."""

import pytest
import torch
from helpers.tiers import sample, sample_rows

from benchmarks.matmul import CONFIGS, OUT, descriptors, matmul_kernel
from tilewise.testing import SMEM_LIMIT, build, stats

pytestmark = pytest.mark.compile

TWO_BYTES = [name for name in CONFIGS if name not in ("fp8", "tf32", "fp32")]
CASES = [(name, torch.bfloat16, False) for name in TWO_BYTES]
CASES += [("wide", torch.bfloat16, True), ("wide", torch.float16, False)]
CASES += [("fp8", torch.float8_e4m3fn, True), ("tf32", torch.float32, True)]
CASES += [("tf32", torch.float32, False), ("fp32", torch.float32, False)]


def compiled(name, dtype, by_column):
    config = CONFIGS[name]
    a = torch.empty(512, 512, dtype=dtype)
    out = torch.empty(512, 512, dtype=OUT.get(dtype, dtype))
    return build(
        matmul_kernel,
        *descriptors(a, a, out, config.tiles, by_column),
        *(512, 512, 512),
        TILES=config.tiles,
        B_BY_COLUMN=by_column,
        PRECISION="ieee" if name == "fp32" else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
        on="sm90",
    )


@pytest.mark.parametrize(
    ("name", "dtype", "by_column"),
    sample_rows(CASES, CASES[0]),
)
def test_it_fits_and_spills_nothing(name, dtype, by_column):
    kernel = compiled(name, dtype, by_column)
    found = stats(kernel)
    assert found["spill_stores"] == found["spill_loads"] == 0
    copies = max(CONFIGS[name].per_sm, 1)
    assert found["smem"] * copies <= SMEM_LIMIT["sm90"]
    assert not found["wgmma_serialized"] and found["copies_apart"] == 0
    assert found["UTMALDG"] >= 2 * CONFIGS[name].stages
    if name == "fp32":
        assert found["FFMA"] > 0 and found["HGMMA"] == 0
    elif dtype.itemsize < 4 or by_column:  # float32 by row is turned in registers
        # one wgmma stays in flight while the next tiles are asked for
        assert "pendings = 1 : i32" in kernel.asm["ttgir"]


@pytest.mark.parametrize("name", sample(["wide", "wide16", "wide3", "tall", "pair", "fp8"], "wide"))
def test_loads_and_tensor_cores_run_in_one_loop(name):
    """The loops over tiles and over K are one, so loads do not pause between tiles."""
    dtype = torch.float8_e4m3fn if name == "fp8" else torch.bfloat16
    text = compiled(name, dtype, name == "fp8").asm["ttgir"]
    assert text.count("ttng.warp_group_dot %") == 1
    loop = text[text.rindex("= scf.for") :]
    assert "ttng.warp_group_dot %" in loop and "async_tma_copy_local_to_global" in loop
