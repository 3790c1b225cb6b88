"""The example's losses on two processes are those of one."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from helpers.waits import DEADLINE

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_sequence.py"


def trained(steps, *arguments):
    found = runpy.run_path(str(EXAMPLE))["main"](["--steps", str(steps), *arguments])
    return torch.tensor(found, dtype=torch.float64)


def training(rank, expected):
    for method in ("stream", "heads", "ring"):
        found = trained(len(expected), "--method", method)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_losses_are_those_of_one_process():
    expected = trained(15)
    assert expected[-1] < 0.5 * expected[0]
    run(training, 2, expected)


@pytest.mark.slow
def test_losses_of_a_hundred_steps_are_those_of_one_process():
    expected = trained(100)
    assert expected[-1] < 1e-3
    for ranks in (2, 4):
        run(training, ranks, expected)


def training_on_nodes(rank, expected):
    found = trained(len(expected), "--nnodes", "2")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_losses_on_two_nodes_are_those_of_one_process():
    run(training_on_nodes, 4, trained(15))


@pytest.mark.slow
def test_by_torchrun():
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    environment = os.environ | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [sys.executable, *command, EXAMPLE, "--steps", "3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "200 tokens over 2 ranks" in done.stdout and "step   2  loss" in done.stdout
