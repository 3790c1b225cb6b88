"""Every test starts from the same seeds, on one thread per worker; GPU tests need a GPU."""

import gc
import os
import random

import pytest
import torch

# What is imported and collected stays for good: looking through it took a fifth of the start
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)
    try:
        import numpy
    except ModuleNotFoundError:
        return
    numpy.random.seed(0)
