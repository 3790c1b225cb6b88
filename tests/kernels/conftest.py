"""Fixtures of several files."""

import pytest


@pytest.fixture
def memory(monkeypatch):
    """What programs allocate, where kernels are fakes."""
    from helpers.fake_kernels import fake_memory  # which imports Triton

    return fake_memory(monkeypatch)
