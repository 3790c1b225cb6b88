"""Hopper's kernel of a cache compiles: it fits, its copies stand together, its matmuls overlap."""

import itertools
import re

import pytest
import torch
import triton
from helpers.cached_calls import check_cached
from helpers.sass import innermost_loops, spills_in
from helpers.tiers import sample_rows

from tilewise import mods
from tilewise.explain.launches import build_launch
from tilewise.kernels.common.decode_step import program_of
from tilewise.kernels.hopper.decode import launch
from tilewise.testing import SMEM_LIMIT, stats

pytestmark = pytest.mark.compile

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
# Bytes a thread may spill: none where nothing is asked for at headdim 64 and 128; at 256 addresses
# of the fold, once a tile
IS_3_6 = triton.__version__.startswith("3.6.")
SPILLS = {64: 16, 128: 0, 256: 320} if IS_3_6 else dict.fromkeys((64, 128, 256), 500)
OF_FEATURES = 420
# Where 64 rows are over these bounds, by headdims, pages and features: a thread has 16 sums of P,
# in the order of operands that are swapped, for 2. Once a part; in the loop a tree's alone
OVER = {
    **{(128, page, name): 24 for page in (None, 64, 16) for name in ("plain", "causal")},
    (256, 16, "everything"): 444,
}
OVER_SHARED = {
    ((192, 128), 16, "causal"): 584,
    ((192, 128), 3, "causal"): 972,
    ((192, 128), 3, "everything"): 1500,
}
IN_LOOP = {(64, 3, "tree"): 24}


def compiled(headdims, page_size, causal=False, window=None, softcap=None, kept=BF16, **has):
    batch, room, heads, heads_k = 3, 4096, 8, 2
    headdims = (headdims, headdims) if isinstance(headdims, int) else headdims
    q = torch.empty(5, heads, headdims[0], dtype=BF16)
    shape = (batch, room) if page_size is None else (999, page_size)
    k, v = (torch.empty(*shape, heads_k, n, dtype=kept) for n in headdims)
    by_kind = dict(head=(heads_k,), row=(*shape, heads_k))
    scales = [torch.ones(by_kind[has["scales"]]) for _ in "kv"] if "scales" in has else (None, None)
    table = None
    if page_size is not None:
        table = torch.zeros(batch, room // page_size, dtype=INT32)
    learned = (
        torch.ones(heads) if has.get("alibi") else None,
        torch.ones(heads) if has.get("sinks") else None,
        has.get("mask"),
    )
    numbers = causal, None, window, softcap, None
    lengths = torch.ones(batch, dtype=INT32), STARTS
    cached = check_cached(q, k, v, table, lengths, learned, numbers, "bshd", scales)
    assert launch.refusal(cached) is None
    out, lse = q.new_empty(*q.shape[:-1], headdims[1]), torch.empty(heads, 5)
    plan = launch.launches_of
    if has.get("states"):  # of 8 pieces
        out, lse = torch.empty(8, 5, heads, headdims[1]), torch.empty(2 * 8 * 5 * heads)
        plan = launch.launches_of_states
    program = program_of(cached, out, lse, plan)
    return build_launch(program.launches[0], "sm90")


def assert_fits(kernel, most):
    found = stats(kernel)
    assert found["smem"] <= SMEM_LIMIT["sm90"] and found["spill_stores"] <= most, found
    assert not found["wgmma_serialized"] and found["HGMMA"] > 0, found
    assert found["copies_apart"] == 0 and found["idle_barriers"] == 0, found
    return found


CASES = itertools.product((8, 64), (64, 128, 256), (None, 64, 16), VARIANTS)


@pytest.mark.parametrize(
    "rows, headdim, page_size, name", sample_rows(CASES, (64, 64, 16, "causal"))
)
def test_decoding_compiles(rows, headdim, page_size, name, monkeypatch):
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    kernel = compiled(headdim, page_size, **VARIANTS[name])
    most = SPILLS[headdim] if name in ("plain", "causal") else OF_FEATURES
    if rows == 64:
        most = OVER.get((headdim, page_size, name), most)
    found = assert_fits(kernel, most)
    if headdim <= 128 and name in ("plain", "causal"):
        assert spills_in(innermost_loops(kernel, "HGMMA")[0]) == 0
    copies = kernel.asm["ptx"].count("cp.async.cg.shared.global")
    assert (copies > 0) == (page_size == 16) and (found["UTMALDG"] > 0) == (page_size != 16)
    if page_size is not None:  # entries of the page table are loaded once for K and V of a block
        loop = innermost_loops(kernel, "LDGSTS" if copies else "UTMALDG")[0]
        assert sum(bool(re.search(r"\bLDG\b", line)) for line in loop) == 1
        assert spills_in(loop) == 0


STATES = itertools.product((64, 128, 256), (64, 16), ("16 bits", "8 bits"))


@pytest.mark.parametrize("headdim, page_size, kept", sample_rows(STATES))
def test_states_of_pieces_compile(headdim, page_size, kept):
    """They take no more than the fold of those pieces does."""
    options = {} if kept == "16 bits" else dict(kept=torch.int8, scales="head")
    folded = compiled(headdim, page_size, **options)
    states = compiled(headdim, page_size, states=True, **options)
    assert_fits(states, stats(folded)["spill_stores"])


# Of two warpgroups: bytes that a thread spills, once a part, where cp.async and where TMA copies
SPILLS_SHARED = (740, 280) if IS_3_6 else (900, 600)
OF_FEATURES_SHARED = 1400  # at headdim 192 by cp.async, 1000 at others
MATMULS = {64: (64, 128), (192, 128): (256, 64), (64, 128): (64, 64)}  # BLOCK_D, BLOCK_N
SHARED = [
    *itertools.product((64, 128), (None, 16, 3), VARIANTS),
    *itertools.product(((192, 128), (128, 64), (64, 128)), (16, 3), ("causal", "everything")),
]


@pytest.mark.parametrize("headdims, page_size, name", sample_rows(SHARED))
def test_two_warpgroups_compile(headdims, page_size, name, monkeypatch):
    """They have registers for all that a block of keys takes: nothing is spilled in its loop."""
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked: 2)
    kernel = compiled(headdims, page_size, **VARIANTS[name])
    is_plain = name in ("plain", "causal")
    most = SPILLS_SHARED[page_size != 3] if is_plain else OF_FEATURES_SHARED
    asked = headdims, page_size, name
    found = assert_fits(kernel, OVER_SHARED.get(asked, most))
    loops = innermost_loops(kernel, "HGMMA")[:2]  # of each warpgroup, the others being of pieces
    block_d, block_n = MATMULS.get(headdims, (128, 64))
    count = (block_d + block_n) // 16
    assert all(sum("HGMMA" in line for line in loop) == count for loop in loops)
    assert max(map(spills_in, loops)) <= IN_LOOP.get(asked, 0 if is_plain else 2)
    copies = innermost_loops(kernel, "UTMALDG")
    assert bool(copies) == (page_size != 3) == (found["UTMALDG"] > 0)
    few = 2 * (block_d == 256)  # boxes of which are twice as many
    assert not is_plain or not copies or spills_in(copies[0]) <= few
    if not IS_3_6:  # the order of instructions is that of its compiler
        return
    # The wait for P V comes behind the maxima of the next block
    loop = loops[0]
    waits = [at for at, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    maxima = [at for at, line in enumerate(loop) if "FMNMX" in line]
    assert waits[0] < maxima[0] and maxima[-1] < waits[1]


def fused(ptx):
    """How a sum of two products is fused, at each: whether the one whose factor was computed first
    is the one that is not rounded.
    """
    factors, products, found = {}, {}, []
    for at, line in enumerate(ptx.splitlines()):
        if power := re.match(r"\s+ex2\.\S+\s+(%\w+),", line):
            factors[power[1]] = at
        elif product := re.match(r"\s+mul\.f32\s+(%\w+), (%\w+), (%\w+);", line):
            products[product[1]] = product.groups()[1:]
        elif total := re.match(r"\s+fma\.rn\.f32\s+%\w+, (%\w+), (%\w+), (%\w+);", line):
            first = [factors[x] for x in total.groups()[:2] if x in factors]
            second = [factors[x] for x in products.get(total[3], ()) if x in factors]
            if first and second:
                found.append(first[0] < second[0])
    return found


@pytest.mark.slow
def test_folds_round_alike_in_all_kernels(monkeypatch):
    """C2: the fold of two pieces has one product that is rounded, which must be the same one in the
    kernel of few rows, of 64, in that of two warpgroups, on the way and afterwards.
    """
    ptx = []
    for rows in (8, 64):
        monkeypatch.setattr(launch, "rows_of", lambda *asked, rows=rows: rows)
        ptx.append(compiled(128, 16, causal=True).asm["ptx"])
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked: 2)
    ptx.append(compiled(128, 16, causal=True).asm["ptx"])
    few, one, two = map(fused, ptx)
    assert len(one) >= 64 and len(two) == 2 * len(one) and len(few) >= 8
    assert all(few + one + two)


# Bytes that a thread of one of two programs spills, by headdim: at 64 of the load warp, at 128 once
# a part beside copies by threads, at 256 of the fold, and some in the loop of blocks
SPILLS_8 = {64: 280, 128: 8, 256: 408} if IS_3_6 else dict.fromkeys((64, 128, 256), 500)
IN_LOOP_8 = {64: 0, 128: 0, 256: 9} if IS_3_6 else dict.fromkeys((64, 128, 256), 16)
KEPT = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
CASES_8 = itertools.product((64, 128, 256), (64, 16), KEPT, ("head", "row"))


@pytest.mark.parametrize(
    "headdim, page_size, kept, scales", sample_rows(CASES_8, (64, 16, "int8", "row"))
)
def test_eight_bits_compile(headdim, page_size, kept, scales):
    kernel = compiled(headdim, page_size, causal=True, kept=KEPT[kept], scales=scales)
    found = assert_fits(kernel, SPILLS_8[headdim])
    assert spills_in(innermost_loops(kernel, "HGMMA")[0]) <= IN_LOOP_8[headdim]
    # Of blocks of 128 keys in pages, each with a scale, the load warp has some
    copies = innermost_loops(kernel, "LDGSTS")[:1]
    assert all(spills_in(loop) <= 10 * (headdim == 64) for loop in copies)
    ptx = kernel.asm["ptx"]
    # Conversions are not by the instructions of the exponentials' unit
    assert "cvt.bf16.f16" not in ptx and "cvt.rn.f32.s8" not in ptx
    conversion = "cvt.rn.f16x2.e4m3x2" if kept == "e4m3" else "sub.rn.bf16x2"
    assert conversion in ptx
    assert (found["UTMALDG"] > 0) == (page_size != 16)


ROWS_8 = [*itertools.product((64, 128), (8, 16, 32, 64)), (256, 32)]


@pytest.mark.parametrize("headdim, rows", sample_rows(ROWS_8))
def test_rows_of_eight_bits_compile(headdim, rows, monkeypatch):
    """The warps meet twice a block, and wait for no product but the scores and the one before;
    where registers are few, for the scores before V P is begun.
    """
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    kernel = compiled(headdim, 64, causal=True, kept=KEPT["e4m3"], scales="head")
    more = {(128, 32): 150} if IS_3_6 else {}
    found = assert_fits(kernel, more.get((headdim, rows), SPILLS_8[headdim]))
    are_two = rows <= (16 if headdim == 256 else 32)
    assert found["smem"] + 1024 <= (SMEM_LIMIT["sm90"] + 1024) // (2 if are_two else 1)
    loop = innermost_loops(kernel, "HGMMA")[0]
    names = "|".join(("HGMMA", "WARPGROUP.DEPBAR", "BAR.SYNC", "STSM"))
    order = [found[0] for line in loop if (found := re.search(names, line))]
    # A block whose values are cleared has more of them, one behind another
    meets = [a == b == "BAR.SYNC" for a, b in itertools.pairwise(order)]
    order = [name for name, again in zip(order, [False, *meets]) if not again]
    if IS_3_6:
        products = ["HGMMA"] * (max(headdim, 128) // 16)
        stores = ["STSM"] * max(rows * (128 if headdim == 64 else 64) // 1024, 1)
        steps = ["BAR.SYNC", *products, "WARPGROUP.DEPBAR", "BAR.SYNC", *stores]
        if rows > (8 if headdim == 256 else 32):
            steps = ["WARPGROUP.DEPBAR", "BAR.SYNC", *products, "BAR.SYNC", *stores]
        assert order == [*products, *steps, "WARPGROUP.DEPBAR"]
    assert spills_in(loop) <= ({(128, 32): 6} if IS_3_6 else {}).get(
        (headdim, rows), 0 if IS_3_6 else 16
    )


BESIDE_COPIES = [(d, r, s) for d in (64, 128, 256) for r in (16, 32, 64) for s in ("head", "row")]


@pytest.mark.parametrize("headdim, rows, scales", sample_rows(BESIDE_COPIES))
def test_rows_of_eight_bits_have_room_beside_copies(headdim, rows, scales, monkeypatch):
    """Of pages that threads copy: what the compiler adds, too, is in shared memory."""
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    kernel = compiled(headdim, 3, causal=True, kept=KEPT["e4m3"], scales=scales)
    are_two = rows <= (16 if headdim == 256 else 32)
    found = stats(kernel)["smem"] + 1024
    assert found <= (SMEM_LIMIT["sm90"] + 1024) // (2 if are_two else 1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 64])
def test_folds_of_eight_bits_round_alike(rows, monkeypatch):
    """C2: whatever rows a tile has."""
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    found = fused(compiled(128, 16, causal=True, kept=KEPT["e4m3"], scales="head").asm["ptx"])
    assert len(found) >= 64 and all(found)
