"""Every test starts from the same seeds, on one thread per worker; GPU tests need a GPU. At the end
the time of all processes is told.
"""

import gc
import os
import random
import resource
import sys

import pytest
import torch
from helpers import covered, watch

# What is imported and collected stays for good: looking through it took a fifth of the start
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before -m is asked
def pytest_collection_modifyitems(items):
    if not watch.looks_at_all():
        covered.mark(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_sessionfinish():
    """Waits for the server of processes, so that their time counts with this one's."""
    if forkserver := sys.modules.get("multiprocessing.forkserver"):
        forkserver._forkserver._stop()


def pytest_terminal_summary(terminalreporter):
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    minutes = sum(x.ru_utime + x.ru_stime for x in used) / 60
    terminalreporter.write_line(f"{minutes:.1f} minutes of user and system time, with workers")


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)
    try:
        import numpy
    except ModuleNotFoundError:
        return
    numpy.random.seed(0)
