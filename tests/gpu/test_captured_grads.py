"""Gradients of what score functions captured, on a GPU."""

import pytest
import torch

from tilewise import attention, attention_reference, mods
from tilewise.mods import maximum, minimum
from tilewise.scores import ScoreMod, alibi, relative_bias, score
from tilewise.sparse import create_block_mask

pytestmark = pytest.mark.gpu
SEQLEN, NHEADS = 1500, 4


def by_pair(x):
    return score(lambda s, b, h, q_idx, kv_idx: s * (1 + 0.1 * x[q_idx, kv_idx]))


def temperature(x):
    return score(lambda s, b, h, q_idx, kv_idx: s * torch.exp(x))


def clipped(x):
    """A bfloat16 table."""
    return score(lambda s, b, h, q_idx, kv_idx: s + x[h, minimum(maximum(q_idx - kv_idx, 0), 7)])


MADE = {
    "alibi": (alibi, (NHEADS,)),
    "table": (relative_bias, (NHEADS, 129)),
    "pairs": (by_pair, (SEQLEN, SEQLEN)),
    "temperature": (temperature, ()),
    "clipped": (clipped, (NHEADS, 8)),
}


def inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4, 2, SEQLEN, NHEADS, 64, device="cuda", generator=generator)
    return [x.bfloat16() for x in x.unbind(0)]


def gradient(attend, given, leaf, make, **asked):
    q, k, v, dout = given
    leaf = leaf.detach().requires_grad_()
    made = make(leaf)
    assert isinstance(made, ScoreMod)
    return torch.autograd.grad(attend(q, k, v, score_mod=made, **asked), leaf, dout)[0]


@pytest.mark.parametrize("backend", [None, "portable"])
@pytest.mark.parametrize("kind", ["plain", "causal", "blocks", "packed"])
@pytest.mark.parametrize("name", MADE)
def test_gradients(name, kind, backend):
    make, shape = MADE[name]
    leaf = 0.1 * torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    leaf = leaf.bfloat16() if name == "clipped" else leaf
    given, asked = inputs(), {}
    if kind == "causal":
        asked["causal"] = True
    elif kind == "blocks":
        sizes = 1, 1, SEQLEN, SEQLEN
        asked["block_mask"] = create_block_mask(mods.causal(), *sizes, device="cuda")
    elif kind == "packed":
        given = [x.flatten(0, 1) for x in given]
        starts = [0, 300, 300, SEQLEN + 7, 2 * SEQLEN]
        starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        asked |= dict(causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    got = gradient(attention, given, leaf, make, backend=backend, **asked)
    given = [x.double() for x in given]
    want = gradient(attention_reference, given, leaf.double(), make, **asked)
    plain = gradient(
        attention_reference, [x.bfloat16() for x in given], leaf, make, upcast=False, **asked
    )
    assert got.dtype == leaf.dtype
    off, allowed = (got - want).abs().max(), (plain - want).abs().max()
    assert off <= 2 * allowed + 1e-3 * want.abs().max(), (off, allowed, want.abs().max())
