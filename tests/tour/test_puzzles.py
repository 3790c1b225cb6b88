"""The puzzles: a page each, an empty kernel, a check that says what is wrong."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pytest
from tour.lessons import FOLDER, ROOT

sys.path.append(str(FOLDER / "puzzles"))

import answers
import checks
import torch
from lesson import progress
from lesson_cells import cells_of, pages_of

from tilewise.testing import build, stats

PUZZLES = sorted((FOLDER / "puzzles").glob("[0-9]_*.py"))
NAMES = [path.stem[2:] for path in PUZZLES]
HIDDEN = 's = tl.where(is_key, s, -float("inf"))'

# puzzle, a line of its answer, what a mistake makes of it, what the check says
MISTAKES = [
    ("load", "mask=inside", "mask=None", "Out of bounds: load in program (0, 0, 0)"),
    ("load", "offs < n", "offs < n - 1", "y of 5 numbers: element [4] is nan, expected "),
    ("load", "10 * tl", "tl", "5 of 5 are wrong"),
    ("reduce", "row * columns + offs", "offs", "out for 3 rows of 5 numbers: element [1] is "),
    ("reduce", "out + row", "out", "element [0] is "),
    ("reduce", "mask=offs < columns, other=0.0", "", "Out of bounds: "),
    ("reduce", ", other=0.0", "", "element [0] is nan"),
    ("tile_sum", ", other=0.0", "", "is nan"),
    ("tile_sum", " & (offs_n[None, :] < N)", "", "Out of bounds: load in program (1, 1, 0)"),
    ("tile_sum", "(offs_m[:, None] < M) &", "", "Out of bounds: "),
    ("tile_sum", "i * tl.num_programs(1) + j", "i + j", "element [1, 0] is "),
    ("matmul_tile", "b_tile, acc)", "b_tile)", "C for (16, 48) times (48, 16): element [0, 0]"),
    ("matmul_tile", "tl.program_id(1)", "tl.program_id(0)", "C for (32, 32) times (32, 48)"),
    ("online_max", 'other=-float("inf")', "other=0.0", "element [0] is 0, expected -"),
    ("online_max", "tl.maximum(m_i, tl.max(block, 0))", "tl.max(block, 0)", "element ["),
    ("online_softmax", "l_i * tl.exp(m_i - m_new)", "l_i", "l for rows of 10 numbers up to "),
    ("online_softmax", "block - m_new", "block", "l for rows of 4 numbers up to "),
    ("masked_tile", 'tl.where(m == -float("inf"), 0.0, m)', "m", "[0, 4] is nan, expected 0"),
    ("masked_tile", "<= q_idx", "< q_idx", "p for seqlen 6: element [0, 0] is 0, expected 1"),
    ("attention_row", "acc * alpha", "acc", "out for 10 keys: element ["),
    ("attention_row", HIDDEN, "s = s + 0.0", "out for 10 keys: element ["),
]  # fmt: skip


def check_of(name):
    return getattr(checks, f"check_{name}")


def answer_of(name):
    return getattr(answers, f"{name}_kernel")


def changed(kernel, line, instead, folder):
    """The kernel with its line replaced, from a file, as Triton reads kernels there."""
    source = inspect.getsource(kernel.fn)
    assert line in source
    text = f"import triton\nimport triton.language as tl\n\n\n{source.replace(line, instead)}"
    path = folder / "mistaken.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mistaken_{hash(text)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


F, N = torch.empty(64), 64
LAUNCHES = {
    "load": ((F, F, N), dict(BLOCK=8)),
    "reduce": ((F, F, N), dict(BLOCK=8)),
    "tile_sum": ((F, F, N, N), dict(BLOCK_M=2, BLOCK_N=4)),
    "matmul_tile": ((F, F, F, N, N, N), dict(BLOCK=16)),
    "online_max": ((F, F, N), dict(BLOCK=4)),
    "online_softmax": ((F, F, F, N), dict(BLOCK=4)),
    "masked_tile": ((F, F, N), dict(BLOCK_M=2, BLOCK_N=4)),
    "attention_row": ((F, F, F, F, N), dict(D=8, BLOCK=4)),
}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_answers_compile(name):
    arguments, meta = LAUNCHES[name]
    assert stats(build(answer_of(name), *arguments, **meta))["spill_stores"] == 0


def test_there_are_eight():
    assert NAMES == [
        *("load", "reduce", "tile_sum", "matmul_tile"),
        *("online_max", "online_softmax", "masked_tile", "attention_row"),
    ]
    assert {name for name, *_ in MISTAKES} == set(NAMES)


@pytest.mark.parametrize("path", PUZZLES, ids=NAMES)
def test_a_puzzle_is_a_page_with_a_drawing_a_hint_and_a_stub(path):
    text = path.read_text(encoding="utf-8")
    task, code = cells_of(text)
    name, number = path.stem[2:], path.stem[0]
    assert task.text.startswith(f"## Puzzle {number}. ") and len(text.splitlines()) <= 50
    assert task.text.count("```text\n") == 1 and task.text.count("**Hint:** ") == 1
    signature = r"def (\w+)\(.*\):\n    \"\"\".*\"\"\"\n    raise NotYet\n"
    assert re.findall(signature, code.text) == [f"{name}_kernel"]
    assert code.text.endswith(f"\n\n\ncheck_{name}({name}_kernel)")
    assert f"| `{path.name}` |" in (path.parent / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_check_accepts_the_answer(name, capsys):
    assert check_of(name)(answer_of(name)) is True
    assert f"puzzle {NAMES.index(name) + 1}: right. " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "line", "instead", "said"), MISTAKES)
def test_a_check_says_what_is_wrong(name, line, instead, said, capsys, tmp_path):
    mistaken = changed(answer_of(name), line, instead, tmp_path)
    assert check_of(name)(mistaken) is False
    printed = capsys.readouterr().out
    assert f"puzzle {NAMES.index(name) + 1}: not yet. " in printed and said in printed


def test_a_mistake_in_another_puzzle_hides_none(tmp_path, capsys, monkeypatch):
    (tmp_path / "1_load.py").write_text("def kernel(:\n", encoding="utf-8")
    second = PUZZLES[1].read_text(encoding="utf-8")
    (tmp_path / "2_reduce.py").write_text(second, encoding="utf-8")
    monkeypatch.setattr(progress, "PUZZLES", tmp_path)
    progress.of_puzzles()
    broken, empty = capsys.readouterr().out.splitlines()
    assert broken.startswith("1_load.py: SyntaxError: ") and empty.startswith("puzzle 2: empty. ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("puzzles/1_load.py", ["puzzle 1: empty. "], marks=pytest.mark.slow),
        (
            "puzzles",
            [f"puzzle {i}: empty. " for i in range(1, 9)] + ["0 of 8 done: empty 1 2 3 4 5 6 7 8"],
        ),
    ],
)
def test_puzzles_run_as_a_reader_runs_them(script, said):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said)), lines


def test_a_page_has_every_puzzle_with_its_answer_folded():
    pages = pages_of(FOLDER)
    english, chinese = pages["tour/puzzles.md"], pages["zh/tour/puzzles.md"]
    for page in (english, chinese):
        assert [page.count(f":pyobject: {name}_kernel\n") for name in NAMES] == [1] * 8
        assert (
            page.count("<details>") == page.count("</details>") == page.count("raise NotYet\n") == 8
        )
    assert english.count("**Hint:**") == chinese.count("**提示**") == 8
