"""Lesson 02b: the order of the tiles, the final kernel in every format, what a GPU would time."""

import pytest
import torch

pytest.importorskip("matplotlib")

from lesson import matmul as matmul_module
from tour.lessons import Called, helper, run_lesson

from tilewise.testing import SMEM_LIMIT, build, stats, tolerance

NAME = "02b_tile_order"
pytestmark = pytest.mark.slow


@pytest.fixture
def tile_order(lesson):
    return lesson(NAME).module


@pytest.fixture
def pictures():
    return helper(NAME, "pictures")


def test_strips(tile_order, pictures):
    square = [(m, n) for m in range(4) for n in range(4)]
    assert pictures.strips_in_flight(square, 16) == 8
    assert pictures.strips_in_flight(square, 4) == 5
    grouped = tile_order.order(32, 32, 8)
    row_by_row = tile_order.order(32, 32, 1)
    assert pictures.strips_in_flight(grouped, 132) < pictures.strips_in_flight(row_by_row, 132)


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
    assert {picture.stem for picture in ran.pictures} == {"02b_order", "02b_speed"}
    assert ran.module.lesson_02.plain_matmul.__module__ == "02_matmul", "its own kernel"
