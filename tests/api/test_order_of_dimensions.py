"""Tensors of (batch, nheads, seqlen, headdim) where (batch, seqlen, nheads, headdim) is read: what
is refused asks for the layout, what computes warns with TILEWISE_CHECK=1 alone.
"""

import random
import warnings

import pytest
import torch

import tilewise
from tilewise import errors


def refusal(*args, **options):
    """What is said of a call; None where it computes."""
    try:
        tilewise.attention(*args, **options)
    except tilewise.ArgumentError as error:
        return str(error)
    return None


def test_what_is_refused_asks_for_the_layout_where_that_would_do():
    draw, refused = random.Random(49), 0
    for _ in range(200):
        heads_k, rows = draw.choice([1, 2, 4]), [draw.randint(1, 12) for _ in "qkv"]
        heads = heads_k * draw.choice([1, 2, 3])
        rows[2] = draw.choice([rows[1], rows[2]])
        q, k, v = (torch.ones(1, h, n, 4) for h, n in zip((heads, heads_k, heads_k), rows))
        message = refusal(q, k, v)
        assert message is None or ("layout='bhsd'" in message) == (rows[1] == rows[2]), message
        refused += message is not None
        if rows[1] == rows[2]:
            as_they_are = [x.transpose(1, 2) for x in (q, k, v)]
            message = refusal(*as_they_are, layout="bhsd")
            assert message is None or "leave layout='bhsd' out" in message
    assert refused > 100


def test_other_functions_say_what_they_take():
    q, k = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 7, 16)
    with pytest.raises(tilewise.ArgumentError, match="pass them transposed"):
        tilewise.flash_attn_func(q, k, k)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    q = torch.ones(2, 8, 16)
    with pytest.raises(tilewise.ArgumentError, match="transpose packed tensors"):
        tilewise.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    with pytest.raises(tilewise.ArgumentError, match="pass them transposed"):
        tilewise.flash_attn_varlen_func(q, q, q, starts, starts, 5, 5)
    with pytest.raises(tilewise.ArgumentError) as error:
        tilewise.scaled_dot_product_attention(torch.ones(1, 8, 3, 4), *torch.ones(2, 1, 8, 2, 5))
    assert "layout" not in str(error.value)


WARNED = {
    "more heads than rows": ((1, 8, 16, 4), {}, 1),
    "as many": ((1, 8, 8, 4), {}, 0),
    "a decoding step": ((2, 1, 16, 4), {}, 0),
    "the layout is said": ((1, 16, 8, 4), {"layout": "bhsd"}, 0),
    "more rows": ((1, 16, 8, 4), {}, 0),
}


@pytest.mark.parametrize("name", WARNED)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_call_that_computes_warns_once_where_values_are_checked(name, is_checked, monkeypatch):
    shape, options, count = WARNED[name]
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setenv("TILEWISE_CHECK", str(int(is_checked)))
    q = torch.ones(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tilewise.attention(q, q, q, **options)
        tilewise.attention(q, q[:, :, :1], q[:, :, :1], **options)
    assert len(caught) == count * is_checked
    assert all("layout='bhsd'" in str(x.message) for x in caught)
