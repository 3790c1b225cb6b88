"""flash-attn's functions copy q, k and v whose last dimension is not contiguous, as flash-attn
does; a cache, which is written in place, must have it so.
"""

import pytest
import torch

import tilewise
from tilewise.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::tilewise.errors.PerformanceWarning")


def strided(x):
    """A tensor of the same values, whose neighbours in a row lie apart."""
    found = x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    assert found.stride(-1) != 1
    return found.requires_grad_(x.requires_grad)


def functions(starts, table):
    packed = starts, starts
    return {
        "dense": lambda q, k, v: tilewise.flash_attn_func(q, k, v, causal=True),
        "varlen": lambda q, k, v: tilewise.flash_attn_varlen_func(q[0], k[0], v[0], *packed),
        "qkv": lambda q, k, v: tilewise.flash_attn_qkvpacked_func(
            torch.stack([q, k, v], 2).transpose(-1, -2).contiguous().transpose(-1, -2)
        ),
        "pages": lambda q, k, v: tilewise.flash_attn_varlen_func(
            q[0].detach(), k.detach(), v.detach(), *packed, block_table=table
        ),
    }


@pytest.mark.parametrize("name", functions(None, None))
@pytest.mark.parametrize("which", range(3))
def test_rows_are_copied(name, which):
    """Twice, as the second call may be known, and then of dense rows again."""
    inputs = [torch.randn(1, 24, 2, 16, requires_grad=True) for _ in "qkv"]
    starts = torch.tensor([0, 24], dtype=torch.int32)
    function = functions(starts, torch.zeros(1, 1, dtype=torch.int32))[name]
    expected = function(*inputs)
    moved = [strided(x) if i == which else x for i, x in enumerate(inputs)]
    for given in (moved, moved, inputs):
        found = function(*given)
        assert torch.equal(found, expected)
        if found.requires_grad:
            dout = torch.ones_like(found)
            grads = (
                torch.autograd.grad(y, x, dout)
                for y, x in ((found, given), (function(*inputs), inputs))
            )
            for mine, theirs in zip(*grads):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_new_keys_and_queries_of_a_cache(name):
    given = dict(zip("qkv", torch.randn(3, 2, 3, 2, 16).unbind(0)))

    def attended(**tensors):
        caches = torch.zeros(2, 2, 16, 2, 16)
        lengths = torch.tensor([5, 9], dtype=torch.int32)
        out = tilewise.flash_attn_with_kvcache(
            tensors["q"], *caches, tensors["k"], tensors["v"], cache_seqlens=lengths, causal=True
        )
        again = tilewise.flash_attn_with_kvcache(tensors["q"], *caches, cache_seqlens=lengths)
        return caches, out, again

    for mine, theirs in zip(attended(**given | {name: strided(given[name])}), attended(**given)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("which", range(2))
def test_a_cache_is_refused(which):
    q, caches = torch.randn(2, 1, 2, 16), [torch.zeros(2, 16, 2, 16) for _ in "kv"]
    caches[which] = strided(caches[which])
    new, lengths = torch.randn(2, 1, 2, 16), torch.tensor([5, 9], dtype=torch.int32)
    name = ("k_cache", "v_cache")[which]
    with pytest.raises(ArgumentError, match=f"^{name} has stride 2 in its last dimension"):
        tilewise.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths)
