"""What `tilewise tune` times: every kernel of a forward and a backward, in each configuration."""

import pytest
import torch

from tilewise.testing import use_interpreter

pytest.importorskip("triton")


def test_every_kernel_is_swept(monkeypatch):
    from tilewise.explain import sweep

    measured = []

    def measure(plan, configs):
        measured.append((plan.name, len(configs)))
        return {config: float(-place) for place, config in enumerate(configs)}

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "TOKENS", 16)
    monkeypatch.setattr(sweep, "HIDDEN", 16)
    sizes = dict(headdim=16, dtype=torch.float32, is_causal=True, seqlen=16)
    with use_interpreter():
        best = list(sweep.sweep(torch.device("cpu"), **sizes))
    names = [name for name, _ in measured]
    assert names == ["fwd", "bwd_dkdv", "bwd_dq"] == [one.key.kernel for one in best]
    assert all(count > 8 for _, count in measured)
    assert all(one.ms < one.ms_before == 0 for one in best)
    assert {one.key.is_causal for one in best} == {True}
    assert best[0].config in sweep.candidates("fwd", 32, 16)
