"""Straight-through gradients of calls with FP8 products."""

import pytest
import torch
from helpers.fp8_calls import FEATURES, SINKS, starts, tensors

import tilewise
from tilewise.ops.fp8 import meant
from tilewise.problem import Extras


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "sinks", "seqused"])
def test_straight_through(rotate, name):
    """The gradients of what the 8 bits stand for, which autograd has of the reference."""
    options = FEATURES[name]
    given = [x.requires_grad_() for x in tensors(headdims=(32, 32))]
    sinks = {}
    if "sinks" in options:
        sinks = dict(sinks=SINKS.clone().requires_grad_())
    used, smooth = options.get("seqused_k"), "v" if sinks else True
    x = tilewise.quantize(*given, rotate=rotate, smooth=smooth, seqused_k=used)
    out, lse = tilewise.attention(x, backward="bf16", return_lse=True, **options | sinks)
    exact = [t.detach().double().requires_grad_() for t in meant(x, rotate, Extras())]
    same = {name: t.detach().double().requires_grad_() for name, t in sinks.items()}
    theirs, lse_of_theirs = tilewise.attention_reference(*exact, return_lse=True, **options | same)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    both = (
        (out * weights).sum() + 0.1 * lse.masked_fill(lse == -torch.inf, 0).sum(),
        (theirs * weights).sum()
        + 0.1 * lse_of_theirs.masked_fill(lse_of_theirs == -torch.inf, 0).sum(),
    )
    for loss in both:
        loss.backward()
    for mine, oracle in zip((*given, *sinks.values()), (*exact, *same.values())):
        assert mine.grad.dtype == mine.dtype
        assert (mine.grad - oracle.grad).norm() < 0.02 * oracle.grad.norm()


def test_straight_through_of_packed_and_transposed_tensors():
    given = [x[0].requires_grad_() for x in tensors(1, 60, 60)]
    cu = dict(cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(30, 30))
    x = tilewise.quantize(*given, **cu)
    tilewise.attention(x, backward="bf16", causal=True, **cu).float().square().sum().backward()
    packed = [t.grad for t in given]
    whole = [x.detach().split((20, 40) if i == 0 else (30, 30)) for i, x in enumerate(given)]
    for i in range(2):
        alone = [t[i][None].transpose(1, 2).requires_grad_() for t in whole]
        y = tilewise.quantize(*alone, layout="bhsd")
        out = tilewise.attention(y, backward="bf16", causal=True, layout="bhsd")
        out.float().square().sum().backward()
        for n, (mine, theirs) in enumerate(zip(packed, alone)):
            part = mine.split((20, 40) if n == 0 else (30, 30))[i]
            theirs = theirs.grad[0].transpose(0, 1)
            torch.testing.assert_close(part, theirs, rtol=0.05, atol=0.02)


def test_no_gradient_without_being_asked():
    given = [x.requires_grad_() for x in tensors()]
    x = tilewise.quantize(*given)
    with pytest.raises(NotImplementedError, match='q.requires_grad.*backward="bf16"'):
        tilewise.attention(x)
    with pytest.raises(NotImplementedError, match="requires_grad"):
        tilewise.flash_attn_func(x, None, None)
    with torch.no_grad():
        assert not tilewise.attention(x).requires_grad
    assert not tilewise.attention(tilewise.quantize(*tensors()), backward="bf16").requires_grad


def test_no_second_gradient():
    given = [x.requires_grad_() for x in tensors()]
    out = tilewise.attention(tilewise.quantize(*given), backward="bf16")
    grad = torch.autograd.grad(out.sum(), given[0], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()
