"""A cache inside of torch's transforms: mapped, constant, refused where it is differentiated."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.tiers import sample
from torch.autograd import forward_ad

import tilewise

LENGTHS = torch.tensor([23, 9], dtype=torch.int32)
DTYPES = [torch.float32, torch.bfloat16]


def problem(dtype=torch.float32):
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    q = torch.randn(2, 3, 4, 16, dtype=dtype)
    k, v = torch.randn(2, 6, 8, 2, 16, dtype=dtype).unbind(0)
    return q, k, v, dict(page_table=table, seqused_k=LENGTHS, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.filterwarnings("ignore:vmap of attention")
def test_vmap_is_a_loop(name, dtype):
    q, k, v, options = problem(dtype)

    def attend(x):
        tensors = dict(q=q, k=k, v=v) | {name: x}
        return tilewise.attention(*tensors.values(), return_lse=True, **options)

    mapped = torch.stack([q, q + 1] if name == "q" else [k, k + 1])
    expected = [torch.stack(x) for x in zip(*map(attend, mapped))]
    for mine, theirs in zip(torch.vmap(attend)(mapped), expected):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", ["grad", "jvp", "functionalize"])
def test_a_cache_that_a_transform_does_not_change(transform, dtype):
    q, k, v, options = problem(dtype)
    out = tilewise.attention(q, k, v, **options).float()
    one = torch.ones(())

    def weighted(x):
        return (x * tilewise.attention(q, k, v, **options).float()).sum()

    if transform == "grad":
        found = torch.func.grad(weighted)(one)
    elif transform == "jvp":
        found = torch.func.jvp(weighted, (one,), (one,))[1]
    else:
        found = torch.func.functionalize(weighted)(one)
    torch.testing.assert_close(found, out.sum())
    assert torch.equal(tilewise.attention(q, k, v, **options).float(), out)


def test_forward_mode_is_refused():
    q, k, v, options = problem()
    refusal = pytest.raises(NotImplementedError, match="no forward-mode derivative")
    with refusal:
        torch.func.jvp(lambda q: tilewise.attention(q, k, v, **options), (q,), (q,))
    with forward_ad.dual_level(), refusal:
        tilewise.attention(forward_ad.make_dual(q, q), k, v, **options)
    with forward_ad.dual_level():
        tilewise.attention(q, k, v, **options)


FIRST_CALL = """
import torch
torch.set_default_dtype(torch.{})
import tilewise
x = torch.ones(1, 8, 2, 16, dtype=torch.float32)
assert torch.equal(tilewise.attention(x, x, x, split_size=4), x)
"""


@pytest.mark.parametrize("dtype", sample(["bfloat16", "float16", "float64"], "bfloat16"))
def test_the_first_call_of_a_process_with_another_default_dtype(dtype):
    command = [sys.executable, "-W", "error", "-c", FIRST_CALL.format(dtype)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)


def test_an_append_is_not_mapped():
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 16).unbind(0)
    slots = torch.arange(2)

    def write(x):
        tilewise.cache.append(k_cache, v_cache, x, x, slots=slots)
        return x

    with pytest.raises(NotImplementedError, match=r"cache\.append inside torch\.vmap"):
        torch.vmap(write)(torch.ones(5, 2, 2, 16))
    assert not k_cache.any()


def test_an_append_has_no_transform():
    """Lengths that a transform made have no memory: the caches keep their values."""
    q, k, v = torch.randn(3, 2, 1, 4, 8).unbind(0)
    caches = torch.zeros(2, 2, 8, 4, 8)

    def attend(scale):
        used = torch.tensor([1, 2], dtype=torch.int32)
        out = tilewise.flash_attn_with_kvcache(q, *caches.unbind(0), k, v, cache_seqlens=used)
        return (out * scale).sum()

    with pytest.raises(NotImplementedError, match=r"cache\.append inside torch\.vmap or another"):
        torch.func.grad(attend)(torch.ones(()))
    assert not caches.any()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_pieces_with_a_gradient_are_refused_by_name(is_mapped):
    q = torch.randn(2, 1, 8, 2, 16)
    gradient = torch.func.grad(lambda q: tilewise.attention(q, q, q, split_size=4).sum())
    with pytest.raises(NotImplementedError, match=r"split_size with a gradient.*torch\.func"):
        torch.func.vmap(gradient)(q) if is_mapped else gradient(q[0])
