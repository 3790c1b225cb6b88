"""FP8 calls whose sizes are symbols: how many graphs there are, and that they give what eager calls
give.
"""

import pytest
import torch
from helpers.tiers import sample
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
from tilewise.kernels.common.quantized import FP8

SIZES = [(32, 16, 150), (48, 24, 99), (48, 24, 330)]  # headdims and keys


def tensors(headdim, headdim_v, seqlen_k):
    generator = torch.Generator().manual_seed(headdim)
    shapes = (2, 70, 4, headdim), (2, seqlen_k, 2, headdim), (2, seqlen_k, 2, headdim_v)
    found = [torch.randn(*shape, generator=generator) for shape in shapes]
    for x in found:
        torch._dynamo.mark_dynamic(x, (1, 3))
    return found


def quantise(q, k, v):
    return tilewise.quantize(q, k, v)


def eight(q, k, v, scale=None):
    return tilewise.attention(*(x.to(FP8) for x in (q, k, v)), scale=scale, return_lse=True)


def scaled(q, k, v):
    return eight(q, k, v, 0.2)


def both(q, k, v):
    return tilewise.attention(tilewise.quantize(q, k, v), causal=True, return_lse=True)


def sixteen(q, k, v):
    return tilewise.attention(q, k, v, return_lse=True)


# By default the scale is a number of headdim, and an argument of the operator: so attention has a
# graph for each, as that of 16 bits
HEADDIMS = len({headdim for headdim, *_ in SIZES})
GRAPHS = {quantise: 1, scaled: 1, eight: HEADDIMS, both: HEADDIMS, sixteen: HEADDIMS}


@pytest.mark.parametrize("step", sample(GRAPHS, both))
def test_graphs(step):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for sizes in SIZES:
        given = tensors(*sizes)
        pairs = zip(*(torch.utils._pytree.tree_leaves(f(*given)) for f in (compiled, step)))
        for mine, eager in pairs:
            assert (mine is None) == (eager is None)
            if mine is not None:
                assert mine.dtype == eager.dtype and torch.equal(mine.float(), eager.float())
    computing = [g for g in counter.graphs if any(n.op == "call_function" for n in g.graph.nodes)]
    assert len(computing) == GRAPHS[step]
