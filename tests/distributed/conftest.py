"""Processes of these tests have one thread each, and so has what they are compared with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """With two, one call in about a thousand had other bits than its repetition (torch 2.13)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
