"""The 16-bit Hopper kernels, which H200s have run many times: what the executor says of them says
whether it is right.
"""

import pytest
import torch

from ptx import executing
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case

pytestmark = pytest.mark.slow

CASES = {
    "64": (Sizes(1, 150, 200, 2, 1, 64), Features(lse_grad=True)),
    "128 causal": (Sizes(1, 150, 200, 2, 1, 128), Features(causal=True)),
    "128 window": (Sizes(1, 200, 200, 1, 1, 128), Features(window=(70, 10))),
    "256 causal": (Sizes(1, 130, 150, 1, 1, 256), Features(causal=True)),
    "192 of keys": (Sizes(1, 130, 150, 1, 1, 192, 128), Features(causal=True)),
    "136 of keys": (Sizes(1, 70, 140, 2, 1, 136, 100), Features()),
    "window": (Sizes(1, 200, 200, 1, 1, 64), Features(window=(70, 10))),
    "softcap": (Sizes(1, 100, 130, 1, 1, 128), Features(softcap=5.0)),
    "shared tiles": (Sizes(2, 5, 150, 6, 2, 64), Features(causal=True, alibi="batch", sinks=True)),
    "dropout": (Sizes(1, 130, 130, 1, 1, 64), Features(dropout=0.2)),
    "bias": (Sizes(1, 130, 136, 1, 1, 128), Features(bias="bhqk")),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name, seed, monkeypatch):
    sizes, features = CASES[name]
    with executing(monkeypatch, seed=seed):
        records = run_case(Case(name, sizes, features), "hopper", "cpu", torch.bfloat16, 0)
    failures = [str(x) for x in records if not x.verdict.ok]
    assert records and not failures, "\n".join(failures)
