"""Lesson 02: products at ragged sizes, the order of the tiles, and what the calls of a GPU do."""

import pytest
import torch

pytest.importorskip("matplotlib")

from lesson import matmul as matmul_module
from tour.lessons import Called, helper, run_lesson

from tilewise.testing import SMEM_LIMIT, build, stats, tolerance

NAME = "02_matmul"
pytestmark = pytest.mark.slow


@pytest.fixture
def matmul(lesson):
    return lesson(NAME).module


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (65, 33, 47), (128, 64, 32)])
@pytest.mark.parametrize("group", [1, 3])
def test_plain_products(matmul, m, n, k, group):
    a, b = torch.randn(m, k), torch.randn(k, n)
    got = matmul.plain_matmul(a, b, matmul.Blocks(32, 16, 16), group)
    tolerance.assert_within(got, a.double() @ b.double(), a @ b)


@pytest.fixture
def pictures():
    return helper(NAME, "pictures")


def test_all_kernels_compute_the_same(matmul, pictures):
    small, big = matmul.TRIED[0], matmul.TRIED[3]
    calls = pictures.bf16_calls(16, matmul.plain_matmul, matmul.tuned_matmul, small, big)
    products = [call() for call in calls.values()]
    for one in products[1:]:
        torch.testing.assert_close(one, products[0], rtol=1e-2, atol=1e-2)


def test_strips(matmul, pictures):
    square = [(m, n) for m in range(4) for n in range(4)]
    assert pictures.strips_in_flight(square, 16) == 8
    assert pictures.strips_in_flight(square, 4) == 5
    grouped = matmul.order(32, 32, 8)
    row_by_row = matmul.order(32, 32, 1)
    assert pictures.strips_in_flight(grouped, 132) < pictures.strips_in_flight(row_by_row, 132)


def test_what_tiles_read(matmul):
    assert matmul.gigabytes_read(8192, 8192, 8192) == pytest.approx(2 * 8192**2 * 2e-9)


def test_what_is_tried_fits(matmul):
    assert len(matmul.costs) == len(matmul.TRIED)
    for of in matmul.costs.values():
        assert of["spill_stores"] == 0 and of["smem"] <= SMEM_LIMIT["sm90"] and of["HGMMA"]


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize("sizes", [(200, 144, 80), (16, 16, 16)])
def test_the_final_kernel_in_every_format(pictures, name, sizes):
    a, b = pictures.operands(*sizes, name, "cpu")
    exact, torchs = a.double() @ b.double(), pictures.torch_matmul(a, b, name)
    if name == "tf32":  # its inputs are cut off on a GPU
        torchs = (pictures.rounded(a, name) @ pictures.rounded(b, name)).float()
    held = tolerance.judge(pictures.final_matmul(a, b, name), exact, torchs)
    assert held.max_error <= held.max_bound


@pytest.mark.compile
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp8"])
def test_the_final_kernel_compiles(name):
    form = matmul_module.FORMATS[name]
    a, b = matmul_module.operands(512, 512, 512, name, "cpu")
    c = torch.empty(512, 512, dtype=torch.bfloat16 if a.itemsize == 1 else a.dtype)
    tiles, warps, stages, _ = form.config
    built = build(
        matmul_module.matmul_kernel,
        *matmul_module.descriptors(a, b, c, tiles, form.by_column),
        *(512, 512, 512),
        TILES=tiles,
        B_BY_COLUMN=form.by_column,
        PRECISION=form.precision,
        num_warps=warps,
        num_stages=stages,
        on="sm90",
    )
    found = stats(built)
    assert found["spill_stores"] == 0 and found["smem"] <= SMEM_LIMIT["sm90"]
    assert not found["wgmma_serialized"] and found["UTMALDG"] >= 2 * stages


def test_formats_lose_what_their_fractions_say(pictures):
    losses = {name: pictures.loss(name) for name in pictures.FORMATS}
    assert losses["fp32"] == 0
    assert losses["fp16"] == pytest.approx(losses["bf16"] / 8, rel=0.1)
    assert losses["tf32"] < losses["bf16"] < losses["fp8"]


def test_what_is_timed_runs(tmp_path):
    ran = run_lesson(NAME, tmp_path, Called)
    assert "each over cuBLAS" in ran.printed
    assert {picture.stem for picture in ran.pictures} == {"02_matmul_order", "02_matmul_speed"}
