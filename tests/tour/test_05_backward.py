"""Lesson 05: its kernel at other shapes, its account, and how it reads counters."""

import contextlib
import math
import subprocess
import types

import pytest
import torch
from tour.lessons import helper

from tilewise.testing import use_interpreter

NAME = "05_backward"
pictures = helper(NAME, "pictures")
pytestmark = pytest.mark.slow  # the lesson compiles two kernels


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    _, said, pictures, _ = ran
    for name in ("the lesson's kernel", "tilewise, portable"):
        for kind in ("full", "causal"):
            assert f"{name}, {kind}:\n    dq off by 0.0" in said
    assert [path.name for path in pictures] == ["05_account.png"]
    assert "aten::_softmax" in said


# seqlen, block of queries, block of keys
SHAPES = [(1, 16, 16), (64, 64, 32), (65, 32, 64), (100, 16, 64)]


@pytest.mark.parametrize("seqlen, block_m, block_n", SHAPES)
def test_kernel_at_other_tiles(ran, seqlen, block_m, block_n):
    module, _, _, _ = ran
    inputs = torch.randn(4, 1, 2, seqlen, 32).bfloat16().unbind(0)

    def backward(causal):
        return module.lesson_backward(*inputs, causal, (block_m, block_n))

    module.check("the kernel", backward, *inputs)


def test_the_account(ran):
    """The numbers of the paper that a count gives, and those that prose derives from the rest."""
    _, said, _, _ = ran
    (standard_gb, _, _), _ = pictures.count()
    assert f"{standard_gb:.1f}" == "40.3" == str(pictures.PAPER["standard"][1])
    assert "18.0 matrices and 12 tensors" in said and "824.6" in said and "962.1" in said
    standard, flash = (pictures.PAPER[name][0] for name in ("standard", "FlashAttention"))
    assert round(flash - standard, 1) == round(pictures.MATMUL / 16 / 1e9, 1)  # 64 heads' S


def test_what_a_gpu_would_time_runs(monkeypatch):
    monkeypatch.setattr(pictures, "GPT2", pictures.GPT2 | dict(batch=1, nheads=1, seqlen=48))
    calls = pictures.trainings()
    assert list(calls) == pictures.NAMES
    for name, call in calls.items():
        with use_interpreter() if name == "portable" else contextlib.nullcontext():
            assert [x.shape[-2:] for x in call()] == [(48, 64)] * 3


SAID = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","attn_fwd_kernel","dram__bytes_read.sum","byte","402,653,184"
"0","attn_fwd_kernel","launch__registers_per_thread","register/thread","168"
"0","attn_fwd_kernel","sm__pipe_tensor_cycles_active.avg","%","n/a"
"""


def test_counters_are_read(ran, monkeypatch):
    module, said, _, _ = ran
    assert said.count("not recorded") == len(pictures.COUNTERS) or module.figures._known
    result = types.SimpleNamespace(stdout=SAID, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: result)
    found = pictures.read_counters(pictures.PROGRAM, "attn_fwd_kernel")
    assert found["dram__bytes_read.sum"] == 402653184
    assert found["launch__registers_per_thread"] == 168
    assert math.isnan(found["sm__pipe_tensor_cycles_active.avg"])
    result.stdout = "==ERROR== ERR_NVGPUCTRPERM"
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        pictures.read_counters(pictures.PROGRAM, "attn_fwd_kernel")


def test_the_profiled_program_is_a_call():
    """What ncu would run, on CPU tensors."""
    program = pictures.PROGRAM.replace('"cuda"', '"cpu"')
    with use_interpreter():
        exec(program.replace("64, 16, 1024, 64", "1, 1, 64, 64"), {})
