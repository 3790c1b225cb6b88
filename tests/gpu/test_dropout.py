"""Dropout in a CUDA graph: random numbers are new at each replay, and forward and backward of one
replay drop the same pairs.
"""

import pytest
import torch

from tilewise import attention
from tilewise.frontend import attention as api
from tilewise.tile.dropout_numbers import draw_rng

pytestmark = [
    pytest.mark.gpu,
    # The Hopper kernels may refuse dropout, and then say so.
    pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning"),
]


def tensors(seed=0):
    """q, k, v that want gradients, and dout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(4, 2, 300, 4, 64, device="cuda", generator=generator).bfloat16()
    q, k, v, dout = x.unbind(0)
    return *(x.clone().requires_grad_() for x in (q, k, v)), dout


def both(inputs, rng=None, backend=None):
    """out and the gradients of q, k and v, the same bits in every run."""
    q, k, v, dout = inputs
    asked = dict(dropout_p=0.3, dropout_rng=rng, deterministic=True, backend=backend)
    out = attention(q, k, v, causal=True, **asked)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def capture(function):
    """A graph of the function and the tensors that each replay fills, after two calls outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function()
    return graph, captured


def replay(graph, captured):
    """What one replay leaves."""
    graph.replay()
    torch.cuda.synchronize()
    return [x.clone() for x in captured]


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def drawn(monkeypatch):
    """What each call drew; of a captured call, what the last replay drew."""
    seen = []

    def draw(device):
        seen.append(draw_rng(device))
        return seen[-1]

    monkeypatch.setattr(api, "draw_rng", draw)
    return seen


@pytest.mark.parametrize("backend", ["portable", None])
def test_each_replay_draws_a_mask_for_both_passes(drawn, backend):
    """Eager code with the numbers that a replay drew gives its out and its gradients, so that both
    passes had them.
    """
    inputs = tensors()
    graph, captured = capture(lambda: both(inputs, backend=backend))
    numbers = drawn[-1]
    seen = []
    for _ in range(3):
        found = replay(graph, captured)
        rng = numbers.clone()
        assert_equal(found, both(inputs, rng, backend))
        assert not any(torch.equal(rng, other) for other, _ in seen)
        assert not any(torch.equal(found[0], other) for _, other in seen)
        seen.append((rng, found[0]))


@pytest.mark.parametrize("backend", ["portable", None])
def test_a_pinned_mask_is_the_one_that_its_tensor_holds(drawn, backend):
    """Every replay has it; other numbers written there are those of the next replay."""
    inputs = tensors()
    rng, other = draw_rng("cuda"), draw_rng("cuda")
    graph, captured = capture(lambda: both(inputs, rng, backend))
    first = replay(graph, captured)
    assert_equal(first, both(inputs, rng, backend))
    assert_equal(replay(graph, captured), first)
    rng.copy_(other)
    second = replay(graph, captured)
    assert_equal(second, both(inputs, other, backend))
    assert not torch.equal(second[0], first[0]) and not drawn
