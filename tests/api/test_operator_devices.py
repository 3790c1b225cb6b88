"""An operator, as a saved program calls it, refuses each tensor that is on another device by name:
no check of a public function stands before it.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import cache, scores

INT32 = torch.int32
HEADS = torch.randn(4)


def dense():
    q, k = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16)
    features = dict(alibi_slopes=torch.rand(4), sinks=torch.rand(4), dropout_p=0.5)
    features["seqused_k"] = torch.tensor([6, 3], dtype=INT32)
    score = scores.score(lambda s, b, h, i, j: s * HEADS[h])
    HEADS.requires_grad_()
    out, lse = tilewise.attention(
        *(q.requires_grad_(), k, k), score_mod=score, return_lse=True, **features
    )
    (out.sum() + lse.sum()).backward()


def packed():
    starts = torch.tensor([0, 4, 9], dtype=INT32)
    q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    tilewise.attention(q, k, k, cu_seqlens_q=starts, cu_seqlens_k=starts)


def cached(**more):
    k, used = torch.randn(3, 4, 2, 16), torch.tensor([5, 3], dtype=INT32)
    pages = torch.tensor([[0, 1], [2, 0]], dtype=INT32)
    q, starts = torch.randn(3, 4, 16), torch.tensor([0, 1, 3], dtype=INT32)
    table = torch.ones(4, dtype=torch.bool)
    features = dict(page_table=pages, seqused_k=used, cu_seqlens_q=starts)
    features |= dict(mask_mod=tilewise.mods.mask(lambda b, h, i, j: table[h]), sinks=torch.rand(4))
    tilewise.attention(q, k, k, **features, **more)


def written():
    cached(out=torch.empty(3, 4, 16))


def appended():
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 16).unbind(0)
    new, cos = torch.randn(2, 1, 2, 16), torch.rand(9, 4)
    used, pages = torch.tensor([5, 3], dtype=INT32), torch.tensor([[0, 1], [2, 0]], dtype=INT32)
    rotary = cache.Rotary(cos, cos, False)
    cache.append(k_cache, v_cache, new, new, seqused_k=used, page_table=pages, rotary=rotary)


def fp8():
    cos = torch.rand(40, 4)
    x = tilewise.quantize(*torch.randn(3, 1, 40, 2, 16), rotary=cache.Rotary(cos, cos, False))
    tilewise.attention(x)


class Calls(TorchDispatchMode):
    """The calls of our operators."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tilewise":
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [dense, packed, cached, written, appended, fp8])
def test_a_tensor_on_another_device_is_refused_by_name(call):
    with Calls() as calls:
        call()
    assert calls.found
    count = 0
    for operator, args, options in calls.found:
        names = [x.name for x in operator._schema.arguments]
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        first = True  # the one that the others are compared with
        for n, x in enumerate(args):
            values = x if isinstance(x, (list, tuple)) else [x]
            if not any(isinstance(value, torch.Tensor) for value in values):
                continue
            name = "captured" if isinstance(x, (list, tuple)) else names[n]
            moved = [y.to("meta") for y in values] if name == "captured" else x.to("meta")
            with pytest.raises(tilewise.ArgumentError, match="is on .* move them to one") as error:
                operator(*args[:n], moved, *args[n + 1 :], **options)
            assert first or str(error.value).startswith(name)
            first, count = False, count + 1
        operator(*args, **options)
    assert count >= 5
