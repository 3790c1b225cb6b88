"""The roof of a CPU, which is measured."""

import pytest
import torch

from tilewise.explain import cards


@pytest.mark.parametrize("enough, width", [(1e-9, 128), (float("inf"), 256)])
def test_a_slow_cpu_has_a_narrow_matmul(enough, width, monkeypatch):
    monkeypatch.setattr(cards, "ENOUGH", enough)
    roof = cards.cpu_roof.__wrapped__(torch.float32, size=256, nbytes=2**20)
    assert roof.tflops > 0 and roof.bandwidth > 0
    assert roof.source == f"measured now: matmul of {width}^3 in float32, a copy"
