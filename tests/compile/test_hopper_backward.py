"""The Hopper backward compiles for sm_90: fits, has wgmma, keeps its registers."""

import itertools
import re

import pytest
import torch
import triton
from helpers.sass import innermost_loops
from helpers.tiers import sample, sample_rows

from tilewise import mods
from tilewise.explain.launches import build_launch
from tilewise.kernels.common.operand import operands_of
from tilewise.kernels.common.results import BACKWARD
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import Extras, Scalars, describe
from tilewise.sparse import create_block_mask
from tilewise.testing import SMEM_LIMIT, stats

pytestmark = pytest.mark.compile

# Bytes a thread may spill, by the wider padded head dim; Triton 3.6, with which all was measured.
# Tall blocks of headdim 64 spill what the loop does not need; softcap's derivative takes 32
# registers that headdim 128 does not have.
IS_MEASURED = triton.__version__.startswith("3.6.")
SPILLS = {64: 52, 128: 16, 192: 40, 256: 80}  # 128: 12 before windows passed blocks
PACKED_SPILLS = {64: 28, 128: 12, 192: 12, 256: 32}
SOFTCAP_SPILLS = 330
# Of plain shapes by newer ones, on 2026-11-27: 3.8 spills outside of the loop of blocks. 3.9 does
# in it, as it asks its ptxas, 13.4, for a level of allocating registers that spills more.
NEWER = {
    "3.8": {(64, False): 28, (64, True): 24, (192, False): 4, (192, True): 8}
    | {(256, False): 4, (256, True): 8},
    "3.9": {(64, False): 116, (64, True): 108, (128, False): 16, (128, True): 208}
    | {(192, False): 32, (192, True): 92, (256, False): 20},
}

# With modifiers, at headdim 64, 128 and 256. A derivative takes the registers that softcap's does,
# dropout those of a few random numbers at a time. 8 bytes are once a program, or once a tile.
MODIFIED = {
    # Listed numbers are held to the blocks there are: one more, where a program starts
    "causal-blocks": (dict(mask="causal", is_by_blocks=True), (0, 16, 16)),
    "document-blocks": (dict(mask="documents", is_by_blocks=True), (0, 20, 8)),
    "mask": (dict(mask="packed"), (0, 16, 8)),
    "score": (dict(score="tilted"), (0, 0, 8)),
    "derivative": (dict(score="nonlinear"), (0, 148, 8)),
    "bias": (dict(bias=True), (0, 8, 8)),
    "learned-bias": (dict(bias=True, learned=True), (0, 8, 8)),
    "dropout": (dict(dropout=0.1), (0, 8, 20)),
    "dropout-causal": (dict(dropout=0.1, causal=True), (0, 24, 12)),
}

FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "alibi": dict(causal=True, alibi=True),
    "softcap": dict(causal=True, softcap=30.0),
    "groups": dict(nheads_k=1),
    "ordered": dict(causal=True, deterministic=True),
}


def launches_of(
    headdim,
    headdim_v=0,
    nheads_k=4,
    causal=False,
    left=-1,
    softcap=0.0,
    alibi=False,
    deterministic=False,
    dtype=torch.bfloat16,
    sequences=0,
    used=False,
    mask="",
    is_by_blocks=False,
    score="",
    bias=False,
    learned=False,
    dropout=0.0,
    exact=False,
):
    """The launches of a call, by the names of their kernels; of packed `sequences`."""
    batch = 1 if sequences else 2
    q = torch.empty(batch, 4096, 4, headdim, dtype=dtype)
    k = torch.empty(batch, 4096, nheads_k, headdim, dtype=dtype)
    headdim_v = headdim_v or min(headdim, 128 if headdim == 192 else 256)
    v = torch.empty(batch, 4096, nheads_k, headdim_v, dtype=dtype)
    out, lse = torch.empty(batch, 4096, 4, v.shape[-1], dtype=dtype), torch.empty(batch, 4, 4096)
    # A part of a tensor, as of flash-attn's callers, lies at no multiple of 16 bytes
    starts = torch.empty(sequences + 2, dtype=torch.int32)[1:] if sequences else None
    lengths = torch.empty(sequences or batch, dtype=torch.int32) if used else None
    lengths = lengths, lengths if sequences else None
    shape = batch, 4, *((0, 0) if sequences else (4096, 4096))
    names, captured = modifiers_of(*functions_of(mask, score, is_by_blocks, shape), shape)
    biases = torch.empty(batch, 4, 4096, 4096, dtype=dtype, device="meta") if bias else None
    rng = torch.ones(2, dtype=torch.int64) if dropout else None
    slopes = torch.ones(4) if alibi else None
    extras = Extras(slopes, None, *lengths, starts, starts, biases, rng, captured)
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1, dropout)
    flags = "bottom_right", deterministic, names, learned
    problem = describe(q, k, v, extras, scalars, *flags)._replace(has_fp32_key_grads=exact)
    operands = operands_of(BACKWARD, (out, None, q, k, v, out, lse, *extras.tensors))
    program = bwd_launch.backward_program(problem, scalars, **operands)
    return {x.kernel.__name__: x for x in program.launches}


def functions_of(mask, score, is_by_blocks, shape):
    """A mask, a score function, and the mask by blocks instead."""
    documents = mods.document(torch.zeros(4096, dtype=torch.int32))
    masks = {"causal": mods.causal(), "documents": documents, "packed": mods.causal() & documents}
    scored = {
        "tilted": lambda score, b, h, q_idx, kv_idx: score + 0.01 * (kv_idx - q_idx) * (h + 1),
        "nonlinear": lambda score, b, h, q_idx, kv_idx: 3 * torch.tanh(score / 3),
        "": None,
    }[score]
    if is_by_blocks:
        return None, scored, create_block_mask(masks[mask], *shape)
    return masks.get(mask), scored, None


def compiled_stats(*headdims, most=None, **features):
    """What the compiler says, within `most` spilled bytes, or what is measured of bands."""
    launches = launches_of(*headdims, **features)
    main = launches["hopper_bwd_kernel"]
    tile, found = main.constants["TILE"], stats(build_launch(main, "sm90"))
    assert found["smem"] <= SMEM_LIMIT["sm90"], found
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0 and found["HMMA"] == 0, found
    assert found["copies_apart"] == 0 and found["idle_barriers"] == 0, found
    if IS_MEASURED:
        assert not found["wgmma_serialized"], found
        widest = max(tile.BLOCK_D, tile.BLOCK_DV)
        extra = SOFTCAP_SPILLS if features.get("softcap") else 0
        extra += 100 if features.get("deterministic") else 0
        extra += 24 if features.get("used") else 0
        assert found["spill_stores"] <= (SPILLS[widest] + extra if most is None else most), found
    for name in ("bwd_delta_kernel", "hopper_bwd_dq_kernel"):
        if name in launches:
            edge = launches[name]._replace(options=dict(num_warps=8))
            # 8 bytes of delta at headdim 72, once a tile
            assert stats(build_launch(edge, "sm90"))["spill_stores"] <= 8
    if not tile.HAS_DQ:
        of_queries = stats(build_launch(launches["hopper_bwd_query_kernel"], "sm90"))
        assert of_queries["smem"] <= SMEM_LIMIT["sm90"] and of_queries["HGMMA"] == 72, of_queries
        assert of_queries["copies_apart"] == 0 and of_queries["idle_barriers"] == 0, of_queries
        if IS_MEASURED:  # once a tile, by the load warp
            assert not of_queries["wgmma_serialized"], of_queries
            assert of_queries["spill_stores"] <= 28, of_queries
    if features.get("bias") or features.get("score"):
        of_rest = stats(build_launch(launches["attn_bwd_rest_kernel"], "sm90"))
        assert of_rest["smem"] <= SMEM_LIMIT["sm90"] and of_rest["spill_stores"] == 0, of_rest
    return found


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_plain(headdim, causal):
    compiled_stats(headdim, causal=causal)


@pytest.mark.skipif(triton.__version__[:3] not in NEWER, reason="limits are those of newer Triton")
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_newer_triton(headdim, causal):
    found = compiled_stats(headdim, causal=causal)
    most = NEWER[triton.__version__[:3]].get((headdim, causal), 0)
    assert found["spill_stores"] <= most, found
    # ptxas 13.4 has too few registers for the wgmma of 192 columns to overlap; 12.9 has enough
    is_serialized = triton.__version__.startswith("3.9.") and headdim == 192
    assert found["wgmma_serialized"] == is_serialized, found


@pytest.mark.slow
def test_ordered_accumulation():
    compiled_stats(128, causal=True, deterministic=True)


@pytest.mark.parametrize("headdim", sample([64, 128, 192, 256], 64))
@pytest.mark.parametrize("causal", sample([False, True], True))
def test_packed_sequences(headdim, causal):
    """The loop is that of a batch, and no registers go to what ragged lengths need."""
    found = compiled_stats(headdim, causal=causal, sequences=8)
    if IS_MEASURED:
        assert found["spill_stores"] <= PACKED_SPILLS[headdim], found


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 192])
@pytest.mark.parametrize("features", [{}, dict(causal=True), dict(sequences=8)])
def test_gradients_of_keys_in_fp32(headdim, features):
    """They take no registers and no shared memory more."""
    exact, rounded = (compiled_stats(headdim, exact=x, **features) for x in (True, False))
    for name in ("smem", "spill_stores", "HGMMA"):
        assert exact[name] <= rounded[name], (name, exact, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 256])
def test_one_packed_sequence(headdim):
    """A launch makes the number 1 a constant."""
    compiled_stats(headdim, sequences=1)


@pytest.mark.parametrize(("name", "at"), sample_rows(itertools.product(MODIFIED, range(3))))
def test_modifiers(name, at):
    features, most = MODIFIED[name]
    compiled_stats((64, 128, 256)[at], most=most[at], **features)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_a_copied_bias(headdim):
    """It is loaded by TMA."""
    found = compiled_stats(headdim, bias=True)
    assert found["UTMALDG"] > compiled_stats(headdim)["UTMALDG"]


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_modifiers_together(headdim):
    """They compile, in a batch with heads that share keys and in packed sequences with ordered
    dQ.
    """
    asked = dict(dropout=0.1, mask="packed", score="nonlinear", most=1600)
    compiled_stats(headdim, nheads_k=1, bias=True, is_by_blocks=True, **asked)
    compiled_stats(headdim, sequences=8, deterministic=True, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, headdim):
    compiled_stats(headdim, **FEATURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("used", [False, True], ids=["whole", "used"])
def test_features_of_packed_sequences(name, headdim, used):
    compiled_stats(headdim, **FEATURES[name], sequences=8, used=used)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_used_keys(headdim, causal):
    compiled_stats(headdim, causal=causal, used=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "headdims",
    [(72, 72), (136, 40), (192, 192), (64, 256), (40, 40), (100, 33), (96, 128), (32, 32)],
    ids=str,
)
def test_padded_headdims(headdims):
    compiled_stats(*headdims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "headdim, columns", [(96, [1792, 2048]), (128, [2560, 2560]), (32, [1280, 1280])]
)
def test_products_end_with_the_columns(headdim, columns):
    """S and dP take a step of the tensor cores for 16 of them, dK, dV and dQ have no others: of
    headdim 96 the first warpgroup computes 64 of dQ and the second one 32.
    """
    kernel = build_launch(launches_of(headdim)["hopper_bwd_kernel"], "sm90")
    loops = ["\n".join(loop) for loop in innermost_loops(kernel, "HGMMA")]
    found = [sum(map(int, re.findall(r"HGMMA\.64x(\d+)x16", loop))) for loop in loops]
    assert sorted(found)[-2:] == columns  # of blocks; what is out of line looks like a loop


@pytest.mark.slow
def test_fp16():
    compiled_stats(128, dtype=torch.float16)
