"""Hopper's forward of training compiles for pages of a KV cache: it fits, its copies stand
together, and the loops of its matmuls spill nothing.
"""

import functools
import itertools

import pytest
import torch
import triton
from helpers.cached_calls import check_cached
from helpers.hopper_relaunch import alone
from helpers.sass import innermost_loops, spills_in

from tilewise.explain.launches import build_launch
from tilewise.kernels.common.decode_step import program_of
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.testing import SMEM_LIMIT, stats

pytestmark = [pytest.mark.compile, pytest.mark.slow]

INT32, BF16 = torch.int32, torch.bfloat16
FEATURES = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "everything": dict(causal=True, window=(300, 0), softcap=30.0, alibi=True, sinks=True),
}
HEADDIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
# Bytes a thread may spill by Triton 3.6, once a tile, or in the loop of copies of short pages
IS_3_6 = triton.__version__.startswith("3.6.")
MOST = {8: 600, 16: 150, 64: 40, 256: 40} if IS_3_6 else dict.fromkeys((8, 16, 64, 256), 800)


def compiled(headdims, page_size, causal, window=None, softcap=None, alibi=False, sinks=False):
    batch, room, heads, heads_k = 2, 4096, 32, 8
    q = torch.empty(batch, 512, heads, headdims[0], dtype=BF16)
    k, v = (torch.empty(999, page_size, heads_k, n, dtype=BF16) for n in headdims)
    table = torch.zeros(batch, room // page_size, dtype=INT32)
    learned = torch.ones(heads) if alibi else None, torch.ones(heads) if sinks else None, None
    lengths = torch.ones(batch, dtype=INT32), None
    numbers = causal, None, window, softcap, None
    cached = check_cached(q, k, v, table, lengths, learned, numbers, "bshd")
    out = q.new_empty(*q.shape[:-1], headdims[1])
    assert schedules.why_in_pieces(cached, out) is None
    lse = torch.empty(batch, heads, 512)
    (launch,) = program_of(cached, out, lse, schedules.launches_of).launches
    return launch.constants["TILE"], build_launch(alone(launch), "sm90")


def packed_step(headdims, page_size):
    """A step of packed queries, and `out` and `lse`."""
    batch, room, total, heads, heads_k = 5, 4096, 2064, 32, 8
    q = torch.empty(total, heads, headdims[0], dtype=BF16)
    shape = (999, page_size) if page_size else (batch, room)
    k, v = (torch.empty(*shape, heads_k, n, dtype=BF16) for n in headdims)
    table = torch.zeros(batch, room // page_size, dtype=INT32) if page_size else None
    lengths = torch.ones(batch, dtype=INT32), torch.zeros(batch + 1, dtype=INT32)
    numbers = True, None, None, None, None
    cached = check_cached(q, k, v, table, lengths, (None, None, None), numbers, "bshd")
    cached = cached._replace(longest=2048)
    out = q.new_empty(*q.shape[:-1], headdims[1])
    assert schedules.why_in_pieces(cached, out) is None
    return cached, out, torch.empty(heads, total)


PACKED = [((128, 128), 16), ((128, 128), None), ((64, 64), 16), ((256, 256), 64)]


@pytest.mark.parametrize("headdims, page_size", PACKED)
def test_chunks_of_packed_steps_compile(headdims, page_size):
    step = packed_step(headdims, page_size)
    launches = functools.partial(schedules.launches_of, chunk=schedules.chunk_of(step[0]))
    kernel = build_launch(program_of(*step, launches).launches[1], "sm90")
    sizes = stats(kernel)
    assert sizes["smem"] <= SMEM_LIMIT["sm90"] and not sizes["wgmma_serialized"], sizes
    assert not sizes["copies_apart"] and not sizes["idle_barriers"], sizes
    assert kernel.metadata.launch_pdl and "griddepcontrol.wait" in kernel.asm["ptx"]
    loops = *innermost_loops(kernel, "HGMMA")[:2], innermost_loops(kernel, "UTMALDG")[0]
    assert not IS_3_6 or sum(map(spills_in, loops)) == 0


@pytest.mark.parametrize("headdims, page_size", PACKED)
def test_decodes_of_packed_steps_compile(headdims, page_size):
    step = packed_step(headdims, page_size)
    launches = functools.partial(schedules.launches_of, chunk=schedules.chunk_of(step[0]))
    kernel = build_launch(program_of(*step, launches).launches[0], "sm90")
    sizes = stats(kernel)
    assert sizes["smem"] <= SMEM_LIMIT["sm90"] and not sizes["wgmma_serialized"], sizes
    assert not sizes["copies_apart"] and not sizes["idle_barriers"], sizes
    assert "griddepcontrol.launch_dependents" in kernel.asm["ptx"]
    copies = "LDGSTS" if page_size == 16 else "UTMALDG"
    # Of tiles that may have more rows than 8, a loop for as many and one for 8
    loops = *innermost_loops(kernel, "HGMMA")[:2], innermost_loops(kernel, copies)[0]
    assert not IS_3_6 or sum(map(spills_in, loops)) == 0


CASES = list(itertools.product(HEADDIMS, (8, 16, 64, 256), FEATURES))
CASES = [x for x in CASES if x[:2] != ((192, 128), 8)]  # too many copies: refused


@pytest.mark.parametrize("headdims, page_size, name", CASES)
def test_pages_compile(headdims, page_size, name):
    tile, kernel = compiled(headdims, page_size, **FEATURES[name])
    found = stats(kernel)
    assert found["smem"] <= SMEM_LIMIT["sm90"] and found["spill_stores"] <= MOST[page_size], found
    assert found["HGMMA"] > 0 and found["UTMALDG"] > 0 and not found["wgmma_serialized"], found
    assert not found["copies_apart"] and not found["idle_barriers"], found
    assert tile.PAGE == min(page_size, tile.BLOCK_N)
    loops = innermost_loops(kernel, "HGMMA")[:2]  # of each warpgroup
    few = 2 * (page_size == 8)  # while the load warp's 64 copies a block take longer
    assert not IS_3_6 or max(headdims) > 128 or sum(map(spills_in, loops)) <= few
    copies = innermost_loops(kernel, "UTMALDG")[0]
    assert not IS_3_6 or page_size < 64 or spills_in(copies) == 0


EIGHT_BITS = [(BF16, None, 128, 512), (BF16, 16, 128, 128), (torch.float16, 64, 64, 512)]


def eight_bit_launches(dtype, page_size, headdim, queries, kind="sequence"):
    """The launches of a chunk beside e4m3 with scales."""
    q = torch.empty(1, queries, 32, headdim, dtype=dtype)
    shape = (999, page_size) if page_size else (1, 4096)
    k = torch.empty(*shape, 8, headdim, dtype=torch.float8_e4m3fn)
    table = torch.zeros(1, 4096 // page_size, dtype=INT32) if page_size else None
    lengths, numbers = (torch.ones(1, dtype=INT32), None), (True, None, None, None, None)
    scales = [torch.ones(1, 8) if kind == "sequence" else torch.ones(*shape, 8)] * 2
    cached = check_cached(q, k, k, table, lengths, (None,) * 3, numbers, "bshd", scales)
    out, lse = torch.empty_like(q), torch.empty(1, 32, queries)
    assert schedules.why_in_pieces(cached, out) is None
    return program_of(cached, out, lse, schedules.launches_of).launches


@pytest.mark.parametrize("kind", ["sequence", "row"])
@pytest.mark.parametrize("dtype, page_size, headdim, queries", EIGHT_BITS)
def test_chunks_of_8_bits_compile(dtype, page_size, headdim, queries, kind):
    """In three kinds of loops nothing is spilled: of products, of copies and of conversions."""
    launches = eight_bit_launches(dtype, page_size, headdim, queries, kind=kind)
    kernel = build_launch(alone(launches[0]), "sm90")
    sizes = stats(kernel)
    assert sizes["smem"] <= SMEM_LIMIT["sm90"] and not sizes["wgmma_serialized"], sizes
    assert not sizes["copies_apart"] and not sizes["idle_barriers"], sizes
    converts = innermost_loops(kernel, "LDS.128")[0]
    rows = 80 * (kind == "row")  # instructions that look up rows and copy their scales
    assert len(converts) <= 5.3 * headdim * (1 if dtype == BF16 else 0.5) + rows
    loops = *innermost_loops(kernel, "HGMMA")[:2], innermost_loops(kernel, "UTMALDG")[0], converts
    assert not IS_3_6 or sum(map(spills_in, loops)) == 0


@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_chunks_of_8_bits_compile(page_size):
    q, k = torch.empty(2048, 32, 128, dtype=BF16), torch.empty(99, page_size or 4096, 8, 128)
    k = k.to(torch.float8_e4m3fn)
    table = torch.zeros(99, 4096 // page_size, dtype=INT32) if page_size else None
    lengths, numbers = (
        (torch.ones(99, dtype=INT32), torch.zeros(100, dtype=INT32)),
        (True, *[None] * 4),
    )
    cached = check_cached(q, k, k, table, lengths, (None,) * 3, numbers, "bshd")
    cached = cached._replace(longest=2048)
    out, lse = torch.empty_like(q), torch.empty(32, 2048)
    assert schedules.why_in_pieces(cached, out) is None
    launches = functools.partial(schedules.launches_of, chunk=schedules.chunk_of(cached))
    kernel = build_launch(alone(program_of(cached, out, lse, launches).launches[1]), "sm90")
    sizes = stats(kernel)
    assert sizes["smem"] <= SMEM_LIMIT["sm90"] and not sizes["wgmma_serialized"], sizes
    assert not sizes["copies_apart"] and not sizes["idle_barriers"], sizes
    loops = *innermost_loops(kernel, "HGMMA")[:2], innermost_loops(kernel, "UTMALDG")[0]
    assert not IS_3_6 or sum(map(spills_in, loops)) == 0


@pytest.mark.parametrize("queries", [64, 128])
def test_folds_of_8_bits_with_scales_compile(queries):
    """Of heads that share a tile, and of one a tile."""
    launch, fold = eight_bit_launches(BF16, 16, 128, queries)
    assert (launch.constants["TILE"].PACK > 1) == (queries < 128)
    assert stats(build_launch(fold, "sm90"))["spill_stores"] == 0


@pytest.mark.parametrize("headdims, page_size", [((128, 128), None), ((128, 128), 16)])
def test_parts_and_their_fold_compile(headdims, page_size):
    """A chunk of few queries, whose tiles several programs share."""
    room, heads, heads_k = 4096, 32, 8
    q = torch.empty(1, 128, heads, headdims[0], dtype=BF16)
    shape = (999, page_size) if page_size else (1, room)
    k, v = (torch.empty(*shape, heads_k, n, dtype=BF16) for n in headdims)
    table = torch.zeros(1, room // page_size, dtype=INT32) if page_size else None
    lengths, numbers = (torch.ones(1, dtype=INT32), None), (True, None, None, None, None)
    cached = check_cached(q, k, v, table, lengths, (None, None, None), numbers, "bshd")
    out, lse = q.new_empty(*q.shape[:-1], headdims[1]), torch.empty(1, heads, 128)
    launch, fold = program_of(cached, out, lse, schedules.launches_of).launches
    assert launch.args["optionals"].parts.count == 4
    kernel, kernel_of_fold = build_launch(alone(launch), "sm90"), build_launch(fold, "sm90")
    sizes = stats(kernel)
    assert sizes["smem"] <= SMEM_LIMIT["sm90"] and not sizes["wgmma_serialized"], sizes
    assert not sizes["copies_apart"] and not sizes["idle_barriers"], sizes
    loops = *innermost_loops(kernel, "HGMMA")[:2], innermost_loops(kernel, "UTMALDG")[0]
    assert not IS_3_6 or sum(map(spills_in, loops)) == 0
    assert stats(kernel_of_fold)["spill_stores"] == 0
