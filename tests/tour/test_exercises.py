"""The exercises' checks: each accepts its answer and refuses wrong ones."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

pytest.importorskip("matplotlib")

from tour.lessons import NAMES, defined_in, number_of  # noqa: I001 (finds `lesson`)
from lesson import Exercises, NotYet, expect, hopper_parts, hopper_steps, progress
from lesson import solutions_02, solutions_05

from tilewise.testing import build, stats


@triton.jit
def nothing_kernel(*arguments):
    pass


@triton.jit
def contiguous_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    tl.store(out + offs, tl.load(x + offs, mask=inside), mask=inside)


@triton.jit
def unmasked_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs * stride, tl.load(x + offs))


@triton.jit
def add_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


@triton.jit
def axpy_past_the_end_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = a * tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=offs < n + 1)


@triton.jit
def one_block_kernel(x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


@triton.jit
def other_bias_kernel(
    a, b, bias, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    solutions_02.linear_relu_kernel(
        a, b, b, c, M, N, K, stride_a, stride_b, stride_c, BLOCK_M, BLOCK_N, BLOCK_K
    )


@triton.jit
def lse_without_alpha_kernel(x, lse, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        m_i = tl.maximum(m_i, tl.max(block, 0))
        l_i += tl.sum(tl.exp(block - m_i), 0)
    tl.store(lse + tl.program_id(0), m_i + tl.log(l_i))


@triton.jit
def sum_without_alpha_kernel(x, v, out, columns, BLOCK: tl.constexpr, D: tl.constexpr):
    row, offs_d = tl.program_id(0) * columns, tl.arange(0, D)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        block = tl.load(x + row + offs, mask=inside, other=-float("inf"))
        values = tl.load(v + offs[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(block, 0))
        p = tl.exp(block - m_new)
        l_i = l_i * tl.exp(m_i - m_new) + tl.sum(p, 0)
        acc += tl.sum(p[:, None] * values, 0)
        m_i = m_new
    tl.store(out + tl.program_id(0) * D + offs_d, acc / l_i)


@triton.jit
def dq_without_delta_kernel(
    q, k, v, dout, lse, delta, dq, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    solutions_05.dq_kernel(q, k, v, dout, lse, lse, dq, seqlen, scale, D, BLOCK_M, BLOCK_N)


@gluon.jit
def compute_without_waiting(WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale):
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = hopper_parts.empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, hopper_parts.accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    for i in range(seqlen // N):
        k = hopper_parts.wait_full(keys, i)
        s = warpgroup_mma(q.index(WG), k.permute((1, 0)), no_scores, use_acc=False)
        hopper_parts.release(keys, i)
        p, m_i, l_i, alpha = hopper_steps.online_step(s, m_i, l_i, scale, False)
        p = hopper_parts.left_operand(p, D, q.dtype)
        v = values.tiles.index(i % 2)
        acc_o = warpgroup_mma(p, v, hopper_parts.rescale(acc_o, alpha))
        hopper_parts.release(values, i)
    hopper_parts.write_rows(acc_o, l_i, out, row + WG * 64)


def without_first(first, stride, itemsize):
    return len({i * stride * itemsize // 32 for i in range(32)})


def without_rounding(n, block_m, block_n, sms):
    tiles = n * n / block_m / block_n
    return tiles / (triton.cdiv(int(tiles), sms) * sms)


def averaged(out1, lse1, out2, lse2):
    return (out1 + out2) / 2, torch.logaddexp(lse1, lse2)


def by_exponentials(out1, lse1, out2, lse2):
    """Right until exp overflows."""
    l1, l2 = lse1.exp(), lse2.exp()
    return (out1 * l1[..., None] + out2 * l2[..., None]) / (l1 + l2)[..., None], (l1 + l2).log()


def without_scores(seqlen, headdim, b_c, b_r):
    tensor = 2 * seqlen * headdim
    passes = {"FA1": 2 + 3 * (seqlen // b_c), "FA2": 2 + 2 * (seqlen // b_r)}
    return {"standard": 4 * tensor} | {name: count * tensor for name, count in passes.items()}


def delta_before_dropout(q, k, v, dout, z):
    p = torch.softmax(q @ k.T / 4, -1)
    ds = p * (z * (dout @ v.T) - (dout * (p @ v)).sum(-1, keepdim=True))
    return ds @ k / 4, ds.T @ q / 4, (p * z).T @ dout


def one_head(tile, lengths, nheads, block):
    for batch, length in enumerate(lengths):
        blocks = -(-length // block)
        if tile < blocks:
            return batch, 0, tile
        tile -= blocks
    return None


def written_once(n, group, headdim):
    return group * 4 * (headdim + 2) / (4 * n * headdim)


def other_pages(table, pages):
    shared = table.clone()
    shared[1, -pages:] = shared[0, -pages:]
    return shared


def unscaled(x):
    return solutions("09").hadamard(x) * x.shape[-1] ** 0.5


def one_step(x):
    if x.shape[-1] == 1:
        return x
    even, odd = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((even + odd, even - odd), -1) * 0.5**0.5


def without_scale(q, k_mean, scale):
    return q @ k_mean


def neighbouring_chunks(rank, ranks):
    return 2 * rank, 2 * rank + 1


def every_nth_chunk(rank, ranks):
    return rank, rank + ranks


def window_of_each_run(runs, window):
    return sum(min(start, window) for start, _ in runs)


# lesson, check, the answer, wrong ones
EXERCISES = [
    ("00", "sectors", "sectors_from", [without_first]),
    ("00", "strided_write", "strided_write_kernel", [
        nothing_kernel, contiguous_write_kernel, unmasked_write_kernel]),
    ("01", "axpy", "axpy_kernel", [add_kernel, axpy_past_the_end_kernel]),
    ("01", "persistent_add", "persistent_add_kernel", [one_block_kernel]),
    ("02b", "efficiency", "efficiency", [without_rounding]),
    ("02", "linear_relu", "linear_relu_kernel", [other_bias_kernel]),
    ("03", "lse", "lse_kernel", [lse_without_alpha_kernel]),
    ("03", "weighted_sum", "weighted_sum_kernel", [sum_without_alpha_kernel]),
    ("04", "merge", "merge", [averaged, by_exponentials]),
    ("04b", "traffic", "traffic", [without_scores]),
    ("05", "dropout", "backward_with_dropout", [delta_before_dropout]),
    ("05", "dq", "dq_kernel", [dq_without_delta_kernel]),
    ("06", "find", "find", [one_head, lambda *sizes: None]),
    ("06", "static_order", "static_order", [
        lambda costs, processors: costs, lambda costs, processors: costs[1:]]),
    ("07", "race", "compute_with_waits", [compute_without_waiting]),
    ("07", "load", "load_v_first", [hopper_steps.load_partition]),
    ("08", "state_share", "state_share", [written_once]),
    ("08", "share_prefix", "share_prefix", [lambda table, pages: table, other_pages]),
    ("09", "hadamard", "hadamard", [unscaled, one_step]),
    ("09", "shift_of_lse", "shift_of_lse", [without_scale, lambda q, k_mean, scale: 0.0]),
    ("10", "chunks", "chunks_of", [neighbouring_chunks, every_nth_chunk]),
    ("10", "rows_to_pull", "rows_to_pull", [window_of_each_run, lambda runs, window: window]),
]  # fmt: skip


def empty(x):
    raise NotYet


def solutions(number):
    return importlib.import_module(f"lesson.solutions_{number}")


def test_every_check_is_tried():
    tried = {(number, f"check_{check}") for number, check, _, _ in EXERCISES}
    numbers = [number_of(name) for name in NAMES]
    there = [(n, x) for n in numbers for x in vars(solutions(n)) if x.startswith("check_")]
    assert tried == set(there) and all(wrong for *_, wrong in EXERCISES)


@pytest.mark.parametrize(
    ("number", "check", "answer", "wrong"),
    [pytest.param(*x, id=f"{x[0]}-{x[1]}") for x in EXERCISES],
)
def test_a_check_accepts_its_answer_and_refuses_wrong_ones(
    number, check, answer, wrong, capsys, tmp_path
):
    module = solutions(number)
    run = getattr(module, f"check_{check}")
    extra = ()
    if check == "share_prefix":  # it runs the lesson's kernels
        extra = (defined_in("08_decoding", "decode", tmp_path).decode,)
    assert run(getattr(module, answer), *extra) is True
    assert ": right. " in capsys.readouterr().out
    for other in wrong:
        assert run(other, *extra) is False, other
        assert ": not yet. " in capsys.readouterr().out


def checked_square():
    exercises = Exercises("99")

    @exercises.check(3, lambda x: x * x)
    def check_square(answer):
        expect(answer(2), 4, "2 squared")
        return "2 squared"

    return exercises, check_square


def test_what_an_exercise_says(capsys):
    exercises, check = checked_square()
    exercises.show()
    assert not check(empty) and not check(lambda x: x) and not check(lambda x: x / 0)
    assert not check(lambda x: [x][x]) and check(lambda x: x * x)
    exercises.show()
    assert capsys.readouterr().out.splitlines() == [
        "exercises of lesson 99: empty 3. All lessons: python tour",
        "exercise 3: empty. Write your lines in place of `raise NotYet`.",
        "exercise 3: not yet. 2 squared: 2, expected 4",
        "exercise 3: not yet. ZeroDivisionError: division by zero",
        "exercise 3: not yet. Out of bounds: list index out of range",
        "exercise 3: right. 2 squared",
        "exercises of lesson 99: right 3. All lessons: python tour",
    ]


def test_answers_are_checked_in_place_of_stubs(capsys, monkeypatch):
    monkeypatch.setenv("TOUR_ANSWERS", "1")
    _, check = checked_square()
    assert check(empty) and check(lambda x: x)


def test_lessons_ship_empty_stubs_and_one_command_says_so(capsys):
    progress.show()
    puzzles, *lines, _ = capsys.readouterr().out.splitlines()
    assert puzzles == "puzzles             0 of 8 done: empty 1 2 3 4 5 6 7 8"
    assert [line.split()[0] for line in lines] == NAMES
    assert {line[20:] for line in lines} == {"0 of 2 done: empty 1 2", "0 of 1 done: empty 1"}
    progress.show("01")
    assert capsys.readouterr().out.count("Write your lines") == 2
    with pytest.raises(SystemExit, match="no lesson 1: there are 00, "):
        progress.show("1")


LEARNERS = """import triton
import triton.language as tl
from lesson import NotYet, solutions_01

print("is not run")
BLOCK = undefined


@triton.jit
def axpy_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {line}


solutions_01.check_axpy(axpy_kernel)
"""


def test_a_learner_sees_what_is_done(tmp_path, capsys, monkeypatch):
    states = {}
    monkeypatch.setattr(solutions("01").exercises, "states", {1: "empty", 2: "empty"})
    written = {
        "empty": "raise NotYet",
        "not yet": "tl.store(z + offs, tl.load(x + offs))",
        "right": "solutions_01.axpy_kernel(a, x, y, z, n, BLOCK)",
    }
    for state, text in written.items():
        path = tmp_path / f"01_{state.split()[0]}.py"
        path.write_text(LEARNERS.format(line=text), encoding="utf-8")
        states[state] = str(progress.of_lesson(path))
    assert states == {
        "empty": "empty 1 2",
        "not yet": "not yet 1, empty 2",
        "right": "right 1, empty 2",
    }
    said = capsys.readouterr().out
    assert "is not run" not in said and "not yet. Out of bounds: load in program (0, 0, 0)" in said


def test_a_lesson_that_is_being_written_hides_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "TOUR", tmp_path)
    (tmp_path / "01_broken.py").write_text("def kernel(:\n", encoding="utf-8")
    (tmp_path / "02_fine.py").write_text("", encoding="utf-8")
    progress.show()
    _, broken, fine, _ = capsys.readouterr().out.splitlines()
    assert broken.startswith("01_broken           SyntaxError: ") and fine.startswith("02_fine")


def test_what_is_expected_of_a_tensor():
    expect(torch.ones(2), torch.ones(2), "ones")
    expect(torch.ones(2), torch.full((2,), 1.5), "near", atol=0.5)
    expect(torch.full((2,), -torch.inf), torch.full((2,), -torch.inf), "masked", atol=0.5)
    for wrong in (torch.ones(3), torch.zeros(2), torch.full((2,), torch.nan)):
        with pytest.raises(AssertionError, match="ones: "):
            expect(wrong, torch.ones(2), "ones", atol=0.5)


def test_the_first_wrong_element_is_named():
    got, exact = (
        torch.tensor([[1.0, 2.0], [3.0, torch.nan]]),
        torch.tensor([[1.0, 2.0], [3.5, 4.0]]),
    )
    with pytest.raises(AssertionError) as caught:
        expect(got, exact, "out")
    assert str(caught.value) == ("out: element [1, 0] is 3, expected 3.5; 2 of 4 are wrong")
    with pytest.raises(AssertionError, match="off by 0.5 where 0.1 is allowed; 2 of 4"):
        expect(got, exact, "out", atol=0.1)


F, H, N = torch.empty(64), torch.empty(64, dtype=torch.bfloat16), 64
KERNELS = [
    ("00", "strided_write_kernel", (F, F, N, 3), dict(BLOCK=256)),
    ("01", "axpy_kernel", (2.0, F, F, F, N), dict(BLOCK=256)),
    ("01", "persistent_add_kernel", (F, F, F, N), dict(BLOCK=256)),
    ("02", "linear_relu_kernel", (F, F, F, F, N, N, N, N, N, N), dict(
        BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)),
    ("03", "lse_kernel", (F, F, N), dict(BLOCK=256)),
    ("03", "weighted_sum_kernel", (F, F, F, N), dict(BLOCK=128, D=16)),
    ("05", "dq_kernel", (F, F, F, F, F, F, F, N, 0.25), dict(D=16, BLOCK_M=32, BLOCK_N=32)),
]  # fmt: skip


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(("number", "kernel", "args", "meta"), KERNELS, ids=[x[1] for x in KERNELS])
def test_answers_compile(number, kernel, args, meta):
    assert stats(build(getattr(solutions(number), kernel), *args, **meta))["spill_stores"] == 0


@pytest.mark.compile
@pytest.mark.slow
def test_the_answer_of_the_race_compiles():
    found = hopper_parts.needs(hopper_steps.specialised(solutions("07").compute_with_waits), 128)
    assert found["HGMMA"] and not found["spill_stores"]
