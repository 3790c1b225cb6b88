"""Lesson 03: every kernel on every row, the merge in any order, and what a GPU will time."""

import pytest
import torch
from helpers.tiers import sample

pytest.importorskip("matplotlib")

from tour.lessons import Called, helper, run_lesson

from tilewise.testing import build, stats, tolerance

NAME = "03_softmax"
SAFE = ("three_pass_kernel", "online_kernel", "whole_row_kernel")


@pytest.fixture
def softmax(lesson):
    return lesson(NAME).module


@pytest.mark.parametrize("kernel", SAFE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels(softmax, kernel, dtype):
    x = torch.randn(3, 300).to(dtype) * 20
    x[1, 128:256] = -float("inf")  # a block in which every score is masked
    got = softmax.softmax(getattr(softmax, kernel), x, block=512 if "whole" in kernel else 128)
    tolerance.assert_within(got, torch.softmax(x.double(), 1), torch.softmax(x, 1))


def test_the_literal_one_breaks_where_it_should(lesson):
    printed = lesson(NAME).printed
    assert printed.count("not a number") == 2


def test_no_alpha_is_drawn_outside_of_its_axis(monkeypatch):
    pictures, drawn = helper(NAME, "pictures"), []
    monkeypatch.setattr(pictures, "show", lambda figure, name: drawn.append(figure))
    steps = [(0.0, 0.0), (1.0, 0.5), (90.0, 1e-42), (90.0, 1.0)]
    pictures.rescaling(dict.fromkeys(pictures.ROWS, steps))
    (figure,) = drawn
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert all(low <= y <= high for line in axes.lines for y in line.get_ydata())
    assert any("1e-42" in text.get_text() for text in figure.axes[1].texts)


def test_the_trace_is_the_sum(softmax):
    for m, _, total, afresh in softmax.trace(torch.randn(50), block=7):
        assert total == pytest.approx(afresh) and m > -10


def test_merging_in_any_order(softmax):
    row = torch.randn(100).double() * 10
    one, two, three = (softmax.state(part) for part in row.split((10, 60, 30)))
    left = softmax.merge(softmax.merge(one, two), three)
    right = softmax.merge(one, softmax.merge(three, two))
    for m, total in (left, right):
        torch.testing.assert_close(m + total.log(), torch.logsumexp(row, 0))


def test_what_a_gpu_times_is_right(softmax):
    pictures = helper(NAME, "pictures")
    calls = pictures.softmax_calls(1024, softmax.softmax, softmax.kernels, 2048)
    assert [*calls] == ["three passes", "two, literal", "online", "whole row", "torch"]
    expected = calls.pop("torch")()
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-7, msg=name)
    long = 2 * pictures.WHOLE
    calls = pictures.softmax_calls(long, softmax.softmax, softmax.kernels, long)
    assert "whole row" not in calls and "online" in calls


def test_what_is_timed_runs(tmp_path):
    ran = run_lesson(NAME, tmp_path, Called)
    assert "useful GB/s, by columns" in ran.printed


@pytest.mark.compile
@pytest.mark.parametrize("kernel", sample([*SAFE, "literal_kernel"], "online_kernel"))
def test_its_kernels_compile(softmax, kernel):
    x = torch.empty(64)
    whole = "whole" in kernel
    launch = dict(
        BLOCK=helper(NAME, "pictures").WHOLE if whole else 4096, num_warps=16 if whole else 8
    )
    built = build(getattr(softmax, kernel), x, x, 1 << 18, **launch)
    assert stats(built)["spill_stores"] == 0
