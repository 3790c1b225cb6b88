"""Parts of a row without keys, whose LSE is -inf: what they hold has no weight in a merge."""

import math

import pytest
import torch

from tilewise.distributed.methods.grads import gradient_of_sink, join_sink
from tilewise.problem import Extras


@pytest.mark.parametrize("sink", [-math.inf, 0.5])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_sink_joins_rows_without_keys(sink, is_empty):
    """By the definition: a sink is one more logit, whose value is 0; both may be -inf."""
    extras = Extras(sinks=torch.full((2,), sink))
    out = torch.zeros(1, 3, 2, 4) if is_empty else torch.randn(1, 3, 2, 4)
    lse = torch.full((1, 2, 3), -math.inf if is_empty else 0.25)
    weight = 0 if is_empty else math.exp(0.25) / (math.exp(0.25) + math.exp(sink))
    joined, whole = join_sink(out.clone(), lse, extras=extras)
    torch.testing.assert_close(joined, out * weight)
    torch.testing.assert_close(whole, torch.logaddexp(lse, extras.sinks.view(1, 2, 1)))
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    found = gradient_of_sink(extras, dout, out=joined, lse=whole, dlse=dlse)
    p = 0 if sink == -math.inf else (extras.sinks.view(1, 2, 1) - whole).exp()
    delta = joined.sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(found, -(p * delta).sum((0, 2)))
