"""The Hopper forward compiles for sm_90 as tuning launches it: fits, has wgmma, spills nothing."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
from helpers.hopper_relaunch import alone
from helpers.sass import assert_maxima_by_integers, innermost_loops, spills_in
from helpers.tiers import sample, sample_rows

from tilewise import mods, scores
from tilewise.explain.launches import build_launch
from tilewise.kernels.common.operand import operands_of
from tilewise.kernels.hopper.fwd import launch
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import NO_MODS, Extras, Scalars, describe
from tilewise.sparse import create_block_mask
from tilewise.testing import SMEM_LIMIT, stats
from tilewise.tuning.tables import TABLE

pytestmark = pytest.mark.compile

# Bytes a thread may spill, by the wider padded head dim. Triton 3.6, with which the rows were
# measured, spills none, but for ALiBi at headdim 256, whose accumulator leaves no room for
# distances. By 3.9 most features of headdim 256 spilled on 2026-11-20, some at 128, fewer than 200,
# and softcap at 64, 828, while P was not carried in pairs.
IS_MEASURED = triton.__version__.startswith("3.6.")
ALIBI_SPILLS = 52
# Headdim 256 spills eight registers of a causal mask where one tile joins the next
SPILLS = {256: 32} if IS_MEASURED else {64: 840, 128: 200, 256: 200}

# Of plain rows by newer ones, on 2026-11-27: where one tile joins the next
NEWER = {"3.8": {(256, True): 32}, "3.9": {(256, True): 56}}
PLAIN = [(headdim, causal) for headdim in (64, 128, 256) for causal in (False, True)]

STORE_SPILLS = 100  # addresses, of the warps that store O, once a tile

FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "softcap": dict(causal=True, softcap=30.0),
    "alibi": dict(causal=True, alibi=True),
    "sinks": dict(causal=True, sinks=True),
    "everything": dict(causal=True, left=100, softcap=30.0, alibi=True, sinks=True),
}


def compile_call(q, k, v, extras, scalars, names=NO_MODS):
    """The constants of a call's launch by name, and its kernel compiled for sm_90."""
    problem = describe(q, k, v, extras, scalars, "bottom_right", False, names)
    operands = operands_of(launch.FORWARD, (q, k, v, *extras.tensors))
    planned = launch.forward_program(problem, scalars, **operands).launches[-1]
    constants = SimpleNamespace(
        features=planned.constants["FEATURES"], tile=planned.constants["TILE"]
    )
    return constants, build_launch(alone(planned), "sm90")


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
    extras = Extras(
        torch.ones(nheads) if alibi else None, torch.ones(nheads, dtype=dtype) if sinks else None
    )
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    plan, compiled = compile_call(q, k, v, extras, scalars)
    widest = max(plan.tile.BLOCK_D, plan.tile.BLOCK_DV)
    return checked_stats(plan, compiled, ALIBI_SPILLS if alibi and widest == 256 else 0)


def checked_stats(plan, compiled, more_spills=0):
    """What every variant is held to."""
    found = stats(compiled)
    assert found["smem"] <= SMEM_LIMIT["sm90"], found
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0 and found["HMMA"] == 0, found
    assert not found["wgmma_serialized"] and not found["copies_apart"], found
    assert not found["idle_barriers"], found
    allowed = SPILLS.get(max(plan.tile.BLOCK_D, plan.tile.BLOCK_DV), 0) + more_spills
    allowed += STORE_SPILLS if plan.features.HEADDIM_V % 8 else 0
    assert found["spill_stores"] <= allowed, found
    return found


ROWS = [key for key in TABLE if key.kernel == "hopper_fwd"]


@pytest.mark.parametrize(
    "key",
    sample(ROWS, next(x for x in ROWS if x.block_d == 128 and x.is_causal and not x.is_short)),
    ids=lambda key: str(key[2:]),
)
def test_measured_rows(key):
    headdim_v = 128 if key.block_d == 192 else 0
    seqlen = 512 if key.is_short else 4096
    compiled_stats(key.block_d, headdim_v, seqlen, causal=key.is_causal)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, headdim):
    compiled_stats(headdim, **FEATURES[name])


@pytest.mark.skipif(not IS_MEASURED, reason="code is that of Triton 3.6")
@pytest.mark.parametrize("headdim, causal", sample_rows(PLAIN, (128, True)))
def test_maxima_of_rows(headdim, causal):
    q = torch.empty(2, 4096, 4, headdim, dtype=torch.bfloat16)
    plan, kernel = compile_call(q, q, q, Extras(), Scalars(1.0, 0.0, -1, 0 if causal else -1))
    for loop in innermost_loops(kernel, "HGMMA")[: plan.tile.WARPGROUPS]:
        assert_maxima_by_integers(loop, plan.tile.BLOCK_N // 4)


@pytest.mark.skipif(triton.__version__[:3] not in NEWER, reason="limits are those of newer Triton")
@pytest.mark.parametrize("headdim, causal", PLAIN)
def test_newer_triton(headdim, causal):
    """Nothing is spilled in the loop of blocks, and no P unpacked, which takes a PRMT a pair."""
    q = torch.empty(2, 4096, 4, headdim, dtype=torch.bfloat16)
    plan, kernel = compile_call(q, q, q, Extras(), Scalars(1.0, 0.0, -1, 0 if causal else -1))
    most = NEWER[triton.__version__[:3]].get((headdim, causal), 0)
    assert stats(kernel)["spill_stores"] <= most
    for loop in innermost_loops(kernel, "HGMMA")[: plan.tile.WARPGROUPS]:
        assert spills_in(loop) == 0 and not any("PRMT" in line for line in loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "headdims", [(72, 72), (192, 128), (64, 256), (40, 40), (100, 33)], ids=str
)
def test_padded_headdims(headdims):
    compiled_stats(*headdims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "headdim, steps", [(33, 4), (72, 6), (96, 6), (100, 8), (140, 12), (160, 12)]
)
def test_products_of_queries_and_keys_end_with_the_columns(headdim, steps):
    """A step of the tensor cores takes 16 columns; O += P V takes eight steps for 128 keys, and of
    64 keys four for each of its pieces, 128 columns of 160 and 32.
    """
    q = torch.empty(2, 4096, 4, headdim, dtype=torch.bfloat16)
    plan, kernel = compile_call(q, q, q, Extras(), Scalars(headdim**-0.5, 0.0, -1, -1))
    of_values = plan.tile.BLOCK_N // 16 * (2 if headdim == 160 else 1)
    for loop in innermost_loops(kernel, "HGMMA")[: plan.tile.WARPGROUPS]:
        assert sum("HGMMA" in line for line in loop) == steps + of_values


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [100, 36, 180, 250])
def test_heads_at_no_multiple_of_16_bytes(headdim, causal):
    q = torch.empty(2, 4096, 4, headdim, dtype=torch.bfloat16)
    scalars = Scalars(headdim**-0.5, 0.0, -1, 0 if causal else -1)
    plan, compiled = compile_call(q, q, q, Extras(), scalars)
    assert plan.tile.V_FLAT
    checked_stats(plan, compiled)
    assert headdim == 250 or "st.global.v2" in compiled.asm["ptx"]


@pytest.mark.slow
def test_heads_that_share_a_tile():
    compiled_stats(128, seqlen=1, nheads_k=1, causal=True)


@pytest.mark.slow
def test_fp16():
    compiled_stats(128, dtype=torch.float16)


LENGTHS = {"full": {}, "causal": dict(causal=True), "used": dict(causal=True, used=True)}
USED_SPILLS = 4  # at headdims 64 and 256, and softcap's at 128: one number, once a tile


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_packed_sequences(headdim, name):
    """Headdim 64 with three warpgroups: sequences are long."""
    packed_stats(headdim, **LENGTHS[name])


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_packed_sequences(name, headdim):
    packed_stats(headdim, **FEATURES[name])


def packed_stats(headdim, batch=2, nheads_k=4, causal=False, used=False, **features):
    q = torch.empty(1, 8192, 4, headdim, dtype=torch.bfloat16)
    k = torch.empty(1, 8192, nheads_k, headdim, dtype=torch.bfloat16)
    starts = torch.zeros(batch + 1, dtype=torch.int32)
    extras = Extras(
        torch.ones(4) if features.get("alibi") else None,
        torch.ones(4, dtype=q.dtype) if features.get("sinks") else None,
        *[starts[:-1] if used else None] * 2,
        *[starts] * 2,
    )
    left, softcap = features.get("left", -1), features.get("softcap", 0.0)
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    plan, compiled = compile_call(q, k, k, extras, scalars)
    assert plan.tile.PACK == (4 if batch > 100 else 1)
    spills_more = (used and headdim != 128) or (softcap and headdim == 128)
    return checked_stats(plan, compiled, USED_SPILLS if spills_more else 0)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_unused_keys_of_a_batch(headdim):
    q = torch.empty(2, 4096, 4, headdim, dtype=torch.bfloat16)
    extras = Extras(seqused_k=torch.zeros(2, dtype=torch.int32))
    plan, compiled = compile_call(q, q, q, extras, Scalars(headdim**-0.5))
    checked_stats(plan, compiled)


MODIFIED = {
    "mask": dict(mask="documents"),
    "blocks-causal": dict(mask="causal", blocks=True),
    "blocks-documents": dict(mask="documents", blocks=True),
    "blocks-function": dict(mask="documents", blocks=True, ends=False),
    "score": dict(score=True),
    "bias": dict(bias=torch.bfloat16),
    "bias-fp32": dict(bias=torch.float32),
    "dropout": dict(dropout=True),
    "all": dict(mask="documents", blocks=True, score=True, bias=torch.bfloat16, dropout=True),
}
# Bytes that a thread spills, as measured with Triton 3.6: but for "all" they are where a program
# starts, or where one tile joins the next and both are there, and at most 5 accesses in the loop.
# At headdim 256 a Q that is released early and shares of a tile took up to 50 bytes of these.
MODIFIED_SPILLS = {
    ("all", 64): 340,
    ("mask", 128): 24,
    ("blocks-causal", 128): 8,
    ("blocks-documents", 128): 8,
    ("blocks-function", 128): 52,
    ("score", 128): 52,
    ("bias-fp32", 128): 168,
    ("all", 128): 852,
    ("dropout", 128): 8,  # in packed sequences
    ("mask", 256): 60,
    ("blocks-documents", 256): 28,
    ("blocks-causal", 256): 28,
    ("blocks-function", 256): 80,
    ("score", 256): 52,
    ("bias", 256): 28,
    ("bias-fp32", 256): 152,
    ("all", 256): 636,
}


@pytest.mark.parametrize(
    ("name", "headdim"),
    sample_rows(itertools.product(MODIFIED, (64, 128, 256))),
)
def test_modified_scores(name, headdim):
    modified_stats(name, headdim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mask", "score", "dropout"])
def test_modified_scores_of_packed_sequences(name):
    modified_stats(name, 128, packed=True)


@pytest.mark.slow
def test_a_mask_of_several_conditions_selects_once():
    """A thread has 64 scores of a block, in three places of each of two partitions."""
    one, several = compiled_stats(128, causal=True), modified_stats("blocks-function", 128)
    assert several["FSEL"] < one["FSEL"] + 64


def modified_stats(name, headdim, packed=False):
    batch, seqlen, nheads = 2, 4096, 4
    asked = MODIFIED[name]
    ids = torch.zeros(seqlen, dtype=torch.int32)
    masks = {"causal": mods.causal(), "documents": mods.document(ids) & mods.causal()}
    mask = masks.get(asked.get("mask"))
    score = scores.alibi(torch.ones(nheads)) if asked.get("score") else None
    sizes = batch, nheads, seqlen, seqlen
    blocks = create_block_mask(mask, *sizes) if asked.get("blocks") else None
    if not asked.get("ends", True):  # as if its rows were no intervals
        blocks = dataclasses.replace(blocks, ends=None)
    given = modifiers_of(None if blocks is not None else mask, score, blocks, sizes)
    rows = (1, batch * seqlen) if packed else (batch, seqlen)
    q = torch.empty(*rows, nheads, headdim, dtype=torch.bfloat16)
    starts = torch.zeros(batch + 1, dtype=torch.int32) if packed else None
    bias = torch.empty(1, 1, seqlen, seqlen, dtype=asked["bias"]) if "bias" in asked else None
    rng = torch.ones(2, dtype=torch.int64) if asked.get("dropout") else None
    extras = Extras(None, None, None, None, starts, starts, bias, rng, given.captured)
    scalars = Scalars(headdim**-0.5, dropout_p=0.1 if asked.get("dropout") else 0.0)
    plan, compiled = compile_call(q, q, q, extras, scalars, given.mods)
    assert plan.tile.WARPGROUPS == 2 and plan.tile.PACK == 1
    spills = MODIFIED_SPILLS.get((name, headdim), 0) + (0 if IS_MEASURED else 400)
    if packed and name == "mask":
        spills += 4  # one number, once a tile: rows of padding are a branch of their own
    return checked_stats(plan, compiled, spills)
