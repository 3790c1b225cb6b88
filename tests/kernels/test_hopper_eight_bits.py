"""Caches of 8 bits by Hopper's kernel, in the emulator: the formula of what they stand for, the
contract, pages that TMA copies and others.
"""

import itertools

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.eight_bits import DTYPES, KINDS, quantised
from helpers.tiers import every, sample, sample_rows

import tilewise
from tilewise.kernels.common.decode_step import program_of
from tilewise.kernels.common.direct import filler
from tilewise.kernels.hopper.decode import launch, tiles
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
SPLIT = 128
QUERIES, LENGTHS = [1, 3, 0, 6], [300, 64, 5, 401]
FEATURES = {
    "window": dict(causal=True, window=(150, 0)),
    "softcap": dict(causal=True, softcap=2.0, alibi_slopes=torch.tensor([0.3, 0.1, 0.7, 0.2])),
    "sinks": dict(causal=True, sinks=torch.tensor([0.3, 2.0, -1.0, 0.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx % 5 != h)),
}


def drawn(queries=QUERIES, lengths=LENGTHS, dtype=E4M3, kind="head", headdims=(64, 64), **options):
    return quantised(queries, lengths, dtype, kind, headdims=headdims, **options)


def run(x, page_size=16, seed=0, attend=tilewise.attention, split_size=SPLIT, **options):
    arguments = dict(**x.cache(page_size, seed), return_lse=True, **options)
    if attend is not tilewise.attention:
        return attend(torch.cat(x.s.q), **arguments)
    with use_emulator(seed):
        q = torch.cat(x.s.q)
        return attend(q, **arguments, split_size=split_size, backend="hopper")


def assert_right(x, found, **options):
    reference = tilewise.attention_reference
    exact = x._replace(s=x.s._replace(q=[q.double() for q in x.s.q]))
    oracle = run(exact, None, attend=reference, **options)
    plain = run(x, None, attend=reference, upcast=False, **options)
    for mine, wanted, rough, name in zip(found, oracle, plain, ("out", "lse")):
        assert_within(mine, wanted, rough, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


CASES = list(itertools.product(KINDS, DTYPES))
OTHERS = sample_rows(CASES, ("row", "int8"), ("sequence", "e4m3"))


@pytest.mark.parametrize("kind, dtype", OTHERS)
@pytest.mark.parametrize("q_dtype", sample([BF16, torch.float16], BF16))
def test_against_fp64_of_what_was_stored(kind, dtype, q_dtype):
    x = drawn(dtype=DTYPES[dtype], kind=kind, q_dtype=q_dtype)
    found = run(x, causal=True)
    assert_right(x, found, causal=True)
    assert_equal(run(x, None, causal=True), found)
    assert_equal(run(x, 3, 1, causal=True), found)


@pytest.mark.parametrize("name", every(2, FEATURES))
def test_with_everything_else(name):
    for kind in ("sequence", "row"):
        x = drawn(kind=kind)
        assert_right(x, run(x, **FEATURES[name]), **FEATURES[name])


SHAPES = [((64, 128), "row", E4M3), ((128, 64), "head", INT8), ((80, 80), "row", INT8)]
SHAPES += [((256, 256), "row", E4M3), ((192, 128), "head", E4M3)]


@pytest.mark.parametrize("headdims, kind, dtype", sample_rows(SHAPES, *SHAPES[1:4]))
def test_headdims(headdims, kind, dtype):
    x = drawn([1, 5], [300, 70], dtype, kind, headdims, heads=(6, 2))
    found = run(x, causal=True)
    assert_right(x, found, causal=True)
    assert_equal(run(x, 1, 2, causal=True), found)


@pytest.mark.parametrize("kind, dtype", sample_rows(CASES, ("row", "e4m3")))
def test_neither_mates_nor_order_nor_pages_nor_queries(kind, dtype):
    x = drawn([20, 1, 3], [3 * SPLIT + 9, 4 * SPLIT, 150], DTYPES[dtype], kind)
    out, lse = run(x, causal=True)
    assert_equal(run(x, 7, 5, causal=True), (out, lse))
    turned = run(x.only(2, 0, 1), None, causal=True)
    assert torch.equal(turned[0], torch.cat([out[21:], out[:21]]))
    if kind == "tensor":
        return  # another sequence's number would be taken
    stop = 3 * SPLIT + 9
    for a, b in ((0, 1), (3, 18), (19, 20)):
        found = run(x.cut(0, stop - 20 + a, stop - 20 + b), 64, causal=True)
        assert_equal(found, (out[a:b], lse[:, a:b]))


@pytest.mark.parametrize(
    "queries, heads, headdim_v, rows",
    [
        ([1, 1, 1], (32, 8), 128, 8),
        ([1, 0, 1], (6, 2), 64, 8),
        ([1, 1, 1], (16, 1), 64, 16),
        ([3, 3, 3], (8, 2), 64, 16),
        ([1, 1, 30], (8, 2), 64, 32),
        ([100, 100], (4, 4), 64, 32),
        ([100, 100], (4, 4), 256, 32),
        ([1, 1], (48, 1), 256, 64),
    ],
)
def test_rows_of_a_tile_are_by_shapes(queries, heads, headdim_v, rows):
    """Those of an average sequence, whichever of them has more."""
    x = quantised(queries, [200] * len(queries), E4M3, "head", heads, (64, headdim_v), BF16)
    at = x.cache()
    numbers, lengths = (True, None, None, None, None), (at["seqused_k"], at["cu_seqlens_q"])
    asked = torch.cat(x.s.q), at["k"], at["v"], None, lengths, (None, None, None), numbers, "bshd"
    cached = check_cached(*asked)
    assert launch.rows_of(cached.problem, cached, len(queries)) == rows


def test_every_tile_has_bytes_in_flight():
    """Two blocks, as O += P V of one is beside S of the next; 64 KB where a tile is a decode's, of
    each of an SM's programs.
    """
    dims = itertools.product((64, 128, 256), repeat=2)
    for (d, dv), rows, row_scales in itertools.product(dims, (8, 16, 32, 64), (0, 1, 2)):
        block_n = 128 if d == dv == 64 else 64
        tile = tiles.swapped_tile(
            (block_n, d, dv), rows, by_tma=True, cache="int8", row_scales=row_scales
        )
        is_alone = rows == 64 or (rows == 32 and d == dv == 256)
        assert tile.STAGES >= 2 and tile.PROGRAMS == (1 if is_alone else 2), tile
        if rows == 8:
            assert tile.STAGES * block_n * (d + dv) >= 2**16, tile


@pytest.mark.parametrize("split_size", sample([64, 256], 64))
def test_pieces_of_a_block_and_of_four(split_size):
    """Of one there is no block before it, whose P V would be beside S."""
    x = drawn([1, 5], [300, 70], kind="row", headdims=(128, 128))
    found = run(x, split_size=split_size, causal=True)
    assert_right(x, found, causal=True)
    for page_size in (None, 3, 64):
        assert_equal(run(x, page_size, split_size=split_size, causal=True), found)


@pytest.mark.parametrize(
    "headdims, kind",
    sample_rows(
        [((128, 128), "row"), ((64, 64), "head"), ((64, 256), "row"), ((256, 80), "row")],
        ((64, 64), "head"),
    ),
)
def test_rows_of_a_tile_change_no_bit(headdims, kind, monkeypatch):
    x = drawn([1, 12, 3], [3 * SPLIT + 9, 170, 64], kind=kind, headdims=headdims)
    found = run(x, causal=True)
    assert_right(x, found, causal=True)
    for rows in (8, 32, 64):
        monkeypatch.setattr(launch, "rows_of", lambda *asked, rows=rows: rows)
        assert_equal(run(x, seed=rows, causal=True), found)


@pytest.mark.parametrize("most", sample([0, 10**6], 0))
def test_where_a_tile_is_folded_changes_no_bit(most, monkeypatch):
    """In slices, or by the program that ends the last part; of 2 rows,
    of 20 and of 64.
    """
    import triton.language as tl

    from tilewise.tile import split_schedule

    x = drawn([1, 10, 40], [520, 400, 650])
    found = run(x, causal=True)
    monkeypatch.setattr(split_schedule, "MANY_STATES", tl.constexpr(most))
    assert_equal(run(x, causal=True), found)
    assert_right(x, found, causal=True)


@pytest.mark.parametrize("kind", sample(["row", "head"], "row"))
def test_one_part_gives_the_bits_of_many(kind, monkeypatch):
    x = drawn([1, 20], [700, 513], kind=kind)
    found = run(x, causal=True)
    monkeypatch.setattr(launch, "WORKSPACE", 0)
    assert_equal(run(x, causal=True), found)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_no_factor_of_an_exponent(scale):
    """A maximum times such a number is no maximum: the scores themselves are multiplied."""
    x = drawn(kind="tensor")
    k_scales = [torch.full_like(each, scale) for each in x.k_scales]
    x = x._replace(k_scales=k_scales)
    assert_right(x, run(x, causal=True), causal=True)


def test_nan_in_use_is_nan():
    x = drawn([1, 1], [200, 130])
    x.s.v[0][7, 1, 3] = float("nan")
    out, _ = run(x)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, 2:, 3] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize(
    "headdim, dtype, reason",
    [
        (72, E4M3, "rows of a multiple of 16 elements"),
        (64, torch.float32, "16-bit elements, which the queries must have"),
    ],
)
def test_refusals(headdim, dtype, reason):
    q = torch.zeros(2, 1, 4, headdim, dtype=BF16 if dtype == E4M3 else dtype)
    k = torch.zeros(2, 512, 2, headdim).to(E4M3)
    numbers = True, None, None, None, None
    arguments = q, k, k, None, (None, None), (None, None, None), numbers, "bshd"
    assert reason in launch.refusal(check_cached(*arguments))


@pytest.mark.parametrize("page_size", [None, 3])
def test_a_relaunch_has_a_place_for_each_scale(page_size):
    """Addresses of later tensors are filled in for all that the first call had."""
    x = drawn([1, 1], [300, 300], kind="row")
    at = x.cache(page_size)
    lengths, scales = (at["seqused_k"], at["cu_seqlens_q"]), (at["k_descale"], at["v_descale"])
    numbers = True, None, None, None, SPLIT
    table, none = at.get("page_table"), (None, None, None)
    cached = check_cached(
        *(torch.cat(x.s.q), at["k"], at["v"], table, lengths, none, numbers, "bshd", scales)
    )
    out, lse = torch.empty(2, 4, 64, dtype=BF16), torch.empty(4, 2)
    program = program_of(cached, out, lse, launch.launches_of)
    assert program.takes_addresses
    args = program.launches[0].positional
    places = range(100, 100 + len(program.names))
    # A descriptor has a place for the address that it describes
    fill = filler(tuple(tuple(x) if hasattr(x, "block_shape") else x for x in args), program.names)
    scales = fill(*places)[9]
    first = 100 + program.names.index("k_descale")
    assert (scales[0], scales[4]) == (first, first + 1)
