"""The kernels of a cache compile for every target: they fit, spill little, use the matrix units."""

import itertools
import re

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.plans import Memory
from helpers.tiers import sample, sample_rows

from tilewise import mods
from tilewise.cache import Append, Rotary
from tilewise.kernels.common.appended import AppendedCall
from tilewise.kernels.portable import append_launch, decode_launch
from tilewise.testing import SMEM_LIMIT, TARGETS, build, stats

pytestmark = pytest.mark.compile

SPILLS = 64  # bytes a thread on NVIDIA, registers on AMD
INT32, BF16 = torch.int32, torch.bfloat16
STARTS = torch.tensor([0, 1, 4, 5], dtype=INT32)
TREE = mods.tree(torch.ones(5, dtype=torch.int64), torch.ones(3, dtype=INT32), STARTS)
VARIANTS = {
    "plain": {},
    "causal": dict(causal=True),
    "everything": dict(causal=True, window=(300, 0), softcap=30.0, alibi=True, sinks=True),
    "mask": dict(mask=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 != h),
    "tree": dict(mask=TREE),
}


def plans_of(
    headdim, is_paged, workspace=2**30, causal=False, window=None, softcap=None, rows=5,
    dtype=BF16, cache_dtype=None, descales=(None, None), **has
):  # fmt: skip
    batch, room, heads, heads_k = 3, 4096, 8, 2
    q = torch.empty(rows, heads, headdim, dtype=dtype)
    shape = (999, 16) if is_paged else (batch, room)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    k, v = (torch.empty(*shape, heads_k, headdim, dtype=cache_dtype) for _ in "kv")
    table = torch.zeros(batch, room // 16, dtype=INT32) if is_paged else None
    used, starts = torch.ones(batch, dtype=INT32), STARTS
    learned = (
        torch.ones(heads) if has.get("alibi") else None,
        torch.ones(heads) if has.get("sinks") else None,
        has.get("mask"),
    )
    numbers = causal, None, window, softcap, None
    of_shape = {"head": (heads_k,), "sequence": (batch, heads_k), "row": (*shape, heads_k)}
    scales = tuple(None if name is None else torch.empty(of_shape[name]) for name in descales)
    cached = check_cached(q, k, v, table, (used, starts), learned, numbers, "bshd", scales)
    out, lse = torch.empty_like(q), torch.empty(heads, rows)
    planned = decode_launch.readable(cached), cached.problem, out, lse, Memory()
    return decode_launch.launches_of(*planned, workspace)


def built_for(plan, target):
    """A launch of tensors compiled for a GPU that need not be there."""
    how = plan.constants | plan.options
    return build(plan.kernel, *plan.args.values(), on=target, **how)


def check(plan, target, has_products):
    found = stats(built_for(plan, target))
    assert found["smem"] <= SMEM_LIMIT[target], found
    assert found["vgpr_spill_count" if "gfx" in target else "spill_stores"] <= SPILLS, found
    if has_products:
        assert found["MFMA" if "gfx" in target else "HMMA"] > 0, found


CASES = itertools.product(TARGETS, (64, 128, 256), VARIANTS)
CASES = sample_rows(CASES, ("sm90", 128, "tree"))


@pytest.mark.parametrize("target, headdim, name", CASES)
@pytest.mark.parametrize("is_paged", sample([True, False], True))
def test_splits_and_their_fold_compile(target, headdim, name, is_paged):
    splits, fold = plans_of(headdim, is_paged, **VARIANTS[name])
    (alone,) = plans_of(headdim, is_paged, 0, **VARIANTS[name])
    for plan in (splits, fold, alone):
        check(plan, target, plan is not fold)


@pytest.mark.parametrize("target, headdim, name", CASES)
@pytest.mark.parametrize("row_tiles", sample([2, 4]))
def test_tiles_that_share_keys_compile(monkeypatch, target, headdim, name, row_tiles):
    if "gfx" in target:
        monkeypatch.setattr(decode_launch, "has_wide_tiles", lambda problem, tile: False)
    split, _ = plans_of(headdim, True, rows=3 * 4 * row_tiles, **VARIANTS[name])
    most = {64: 2, 128: 1, 256: 1} if name == "everything" else {64: 4, 128: 4, 256: 2}
    assert rows_of(split) == 16 * min(row_tiles, most[headdim])
    check(split, target, True)


def rows_of(plan):
    """The rows of a block."""
    return plan.constants["TILE"].BLOCK_M * plan.constants["ROW_TILES"]


EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
SCALES = [(None, None), ("head", "sequence"), ("row", "row"), ("sequence", "row")]
BYTES = itertools.product(TARGETS, EIGHT_BITS, SCALES)
BYTES = sample_rows(BYTES, ("sm80", EIGHT_BITS[0], ("row", "row")))


@pytest.mark.parametrize("target, dtype, descales", BYTES)
@pytest.mark.parametrize("headdim", sample([64, 128, 256]))
def test_caches_of_8_bits_compile(monkeypatch, target, dtype, descales, headdim):
    """Of e4m3 sm_80 reads the bits."""
    monkeypatch.setattr(decode_launch, "converts_e4m3", lambda device: target != "sm80")
    asked = dict(cache_dtype=dtype, descales=descales, causal=True)
    splits, fold = plans_of(headdim, True, **asked)
    (alone,) = plans_of(headdim, False, 0, **asked)
    (shared, _) = plans_of(headdim, True, rows=3 * 4 * 2, **asked)
    for plan in (splits, fold, alone, shared):
        check(plan, target, plan is not fold)


def layouts_of(compiled):
    """How the two products of each tile lie, in the order of the program."""
    text = compiled.asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    kinds = [
        re.findall(r"#\w+", line.split(":")[-1]) for line in text.split("\n") if "tt.dot " in line
    ]
    return [[named[x] for x in kind if x in named] for kind in kinds]


@pytest.mark.parametrize("headdim", sample([64, 128]))
def test_tiles_that_share_keys_lie_as_one_alone(headdim):
    found = {}
    for n in (1, 2, 4):
        split, _ = plans_of(headdim, True, rows=3 * 4 * n, causal=True)
        built = built_for(split, "sm90")
        found[n] = layouts_of(built)
    assert len(found[1]) == 2
    assert found[2] == found[1] and found[4] == found[1] * 2


@pytest.mark.parametrize("target", sample([x for x in TARGETS if "sm" in x], "sm80"))
@pytest.mark.parametrize("headdim", sample([64, 128, 256], 256))
@pytest.mark.parametrize("cache_dtype", sample([BF16, torch.int8]))
def test_a_row_of_a_wide_tile_lies_as_in_one_of_16(target, headdim, cache_dtype):
    """Whose sums it shares: how many warps and threads have parts of it, of 8 columns each."""
    found = []
    for n in (1, 2):
        split, _ = plans_of(headdim, True, rows=3 * 4 * n, causal=True, cache_dtype=cache_dtype)
        assert rows_of(split) == 16 * n and split.constants["ROW_TILES"] == 1
        built = built_for(split, target)
        found.append(layouts_of(built))
    assert found[0] == found[1] and all("warpsPerCTA = [1, 4]" in x[-1] for x in found[0])


@pytest.mark.parametrize("headdim", sample([64, 128, 256], 128))
def test_sums_in_fp32_are_short(headdim):
    """No product adds to the one before, and none has more than 32 terms."""
    split, _ = plans_of(headdim, True, causal=True, dtype=torch.float32)
    built = built_for(split, "sm90")
    assert stats(built)["spill_stores"] <= 256
    dots = re.findall(r"tt\.dot (.*)$", built.asm["ttgir"], re.MULTILINE)
    assert len(dots) == 2
    for dot in dots:
        operands, kinds = dot.split(" : ")
        assert operands.split(",")[2].strip().startswith("%cst")
        assert int(re.search(r"x(\d+)xf32", kinds)[1]) <= 32


@pytest.mark.parametrize("target", sample(TARGETS, "sm90"))
@pytest.mark.parametrize("slots", [False, True])
def test_appending_compiles(target, slots):
    k_cache, v_cache = torch.empty(2, 99, 16, 2, 128, dtype=BF16).unbind(0)
    k, v = torch.empty(2, 5, 2, 128, dtype=BF16).unbind(0)
    where = torch.empty(5, dtype=torch.int64) if slots else None
    rotary = Rotary(*torch.empty(2, 999, 64).unbind(0), interleaved=False)
    table, used = torch.empty(3, 7, dtype=INT32), torch.ones(3, dtype=INT32)
    asked = Append(k_cache, v_cache, k, v, table, used, STARTS, where, rotary)
    check(append_launch.launch_of(asked), target, False)


@pytest.mark.parametrize("target", sample(TARGETS, "sm80"))
@pytest.mark.parametrize("dtype", sample(EIGHT_BITS, EIGHT_BITS[0]))
@pytest.mark.parametrize("kind", sample(["none", "sequence", "row"], "row"))
def test_appending_to_caches_of_8_bits_compiles(target, dtype, kind):
    k_cache, v_cache = torch.empty(2, 99, 16, 2, 128, dtype=dtype).unbind(0)
    k, v = torch.empty(2, 5, 2, 128, dtype=BF16).unbind(0)
    table, used = torch.empty(3, 7, dtype=INT32), torch.ones(3, dtype=INT32)
    shape = {"none": None, "sequence": (3, 2), "row": (99, 16, 2)}[kind]
    scales = [None if shape is None else torch.empty(shape) for _ in "kv"]
    asked = Append(k_cache, v_cache, k, v, table, used, STARTS, None, None, *scales)
    check(append_launch.launch_of(asked), target, False)


PREPARED = [(n, packed, padded) for n in ("bf16", "fp32") for packed in (0, 1) for padded in (0, 1)]


@pytest.mark.parametrize("target", sample(TARGETS, "sm90"))
@pytest.mark.parametrize("tables, packed, padded", sample_rows(PREPARED, ("fp32", 1, 1)))
@pytest.mark.parametrize("interleaved", sample([False, True], False))
def test_appending_and_preparing_attention_compiles(target, tables, packed, padded, interleaved):
    k_cache, v_cache = torch.empty(2, 9, 160, 2, 128, dtype=BF16).unbind(0)
    q, k, v = (torch.empty(5, heads, 128, dtype=BF16) for heads in (8, 2, 2))
    starts, batch = (STARTS, 3) if packed else (None, 5)
    if not packed:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    dtype = BF16 if tables == "bf16" else torch.float32
    rotary = Rotary(*torch.empty(2, 999, 32, dtype=dtype).unbind(0), interleaved)
    before, rows = torch.ones(batch, dtype=INT32), torch.ones(batch, 1, dtype=INT32)
    pad, no = before if padded else None, [None] * 5
    call = AppendedCall(
        *(q, k_cache, v_cache, None, before, starts, *no, k, v, *rotary[:2], starts, before),
        *(rows, pad, interleaved, not packed),
    )
    parts = append_launch.parts_of(call)
    plan = append_launch.launch_of(call.append, call, append_launch.prologue_of(call, parts))
    check(plan, target, False)
    if target == "sm90":  # the sum and the products are rounded apart
        built = built_for(plan, target)
        assert "mul.f32" in built.asm["ptx"] or "mul.rn.f32" in built.asm["ptx"]
        assert not re.search(r"^\s*fma\.rn", built.asm["ptx"], re.MULTILINE)
