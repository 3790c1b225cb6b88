"""An append in the launch that also prepares attention: the bits of torch's operators, an append,
and attention.
"""

import pytest
import torch
from helpers.appends import drawn, results
from helpers.tiers import sample

import tilewise
from tilewise.kernels.portable import append_launch
from tilewise.ops import append as append_ops
from tilewise.testing import use_interpreter


@pytest.mark.parametrize("seed", sample(range(60), *range(6)))
def test_the_bits_of_an_append_and_attention(monkeypatch, seed):
    given, made = drawn(seed), []
    prepare = append_launch.prepare
    monkeypatch.setattr(
        append_launch, "prepare", lambda *x, **y: (made.append(0), prepare(*x, **y))[1]
    )
    with use_interpreter():
        mine = results(tilewise.flash_attn_with_kvcache, given)
        assert made
        monkeypatch.setattr(append_ops, "may_prepare", lambda *_, **named: False)
        apart = results(tilewise.flash_attn_with_kvcache, given)
    assert len(made) == 1
    for x, y in zip(mine, apart, strict=True):
        assert torch.equal(x, y)
