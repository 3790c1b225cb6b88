"""Lesson 02: products at ragged sizes, what tiles read and cost."""

import pytest
import torch

pytest.importorskip("matplotlib")

from tour.lessons import Called, run_lesson

from tilewise.testing import SMEM_LIMIT, tolerance

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


def test_what_tiles_read(matmul):
    assert matmul.gigabytes_read(8192, 8192, 8192) == pytest.approx(2 * 8192**2 * 2e-9)


def test_what_is_tried_fits(matmul):
    assert len(matmul.costs) == len(matmul.TRIED)
    for of in matmul.costs.values():
        assert of["spill_stores"] == 0 and of["smem"] <= SMEM_LIMIT["sm90"] and of["HGMMA"]


def test_what_is_timed_runs(tmp_path):
    """All kernels compute the same product: their checks and times run here."""
    ran = run_lesson(NAME, tmp_path, Called)
    assert "each over cuBLAS" in ran.printed
    assert {picture.stem for picture in ran.pictures} == {"02_matmul_speed"}
