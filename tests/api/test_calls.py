"""Calls that look alike are checked once; what differs is another call."""

import pytest
import torch

from tilewise import ArgumentError, attention, attention_reference
from tilewise.frontend import attention as api


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(api, "_calls", {})


def tensors(seqlen=9, headdim=8):
    generator = torch.Generator().manual_seed(seqlen)
    return (torch.randn(2, seqlen, 2, headdim, generator=generator) for _ in range(3))


def test_alike():
    for seed in range(3):
        q, k, v = (x + seed for x in tensors())
        torch.testing.assert_close(attention(q, k, v), attention_reference(q, k, v))
    assert len(api._calls) == 1


@pytest.mark.parametrize(
    "how",
    [
        dict(causal=True),
        dict(causal="top_left"),
        dict(scale=0.1),
        dict(softcap=2.0),
        dict(window=(3, 0)),
        dict(layout="bhsd"),
    ],
    ids=str,
)
def test_every_argument_tells(how):
    q, k, v = tensors()
    attention(q, k, v)
    expected = attention_reference(q, k, v, **how)
    torch.testing.assert_close(attention(q, k, v, **how), expected)


def test_lengths_and_strides_tell():
    q, k, v = tensors()
    attention(q, k, v)
    for other in (k[:, :5], k.transpose(1, 2).contiguous().transpose(1, 2)):
        values = v[:, : other.shape[1]]
        expected = attention_reference(q, other, values)
        torch.testing.assert_close(attention(q, other, values), expected)


def test_errors_stay():
    q, k, v = tensors()
    attention(q, k, v)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="k.dtype"):
            attention(q, k.double(), v)
        with pytest.raises(ArgumentError, match="scale"):
            attention(q, k, v, scale=-1.0)
    assert len(api._calls) == 1


def test_a_scale_that_can_change_is_not_kept():
    q, k, v = tensors()
    scale = torch.tensor(0.5)
    for factor in (0.5, 2.0):
        scale.fill_(factor)
        expected = attention_reference(q, k, v, scale=factor)
        torch.testing.assert_close(attention(q, k, v, scale=scale), expected)
    assert not api._calls


EXTRAS = {
    "sinks": lambda: dict(sinks=torch.randn(2)),
    "slopes": lambda: dict(alibi_slopes=torch.rand(2)),
    "mask": lambda: dict(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 2),
    "score": lambda: dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + 0.1 * kv_idx),
    "bias": lambda: dict(bias=torch.randn(2, 1, 9, 9)),
    "dropout": lambda: dict(dropout_p=0.3, dropout_rng=torch.tensor([3, 4])),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_of_one_look_are_checked_once(name):
    """And their values are those of each call."""
    q, k, v = tensors()
    attention(q, k, v)
    torch.manual_seed(0)
    for _ in range(2):
        extras = EXTRAS[name]()
        expected = attention_reference(q, k, v, **extras)
        torch.testing.assert_close(attention(q, k, v, **extras), expected)
    assert len(api._calls) == 2


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_of_another_look_are_checked(name):
    q, k, v = tensors()
    attention(q, k, v, **EXTRAS[name]())
    errors = {
        "sinks": dict(sinks=torch.zeros(3)),
        "slopes": dict(alibi_slopes=torch.ones(2).double()),
        "bias": dict(bias=torch.zeros(2, 1, 9, 8)),
        "dropout": dict(dropout_p=0.3, dropout_rng=torch.zeros(2)),
    }
    if name in errors:
        with pytest.raises(ArgumentError, match=next(reversed(errors[name]))):
            attention(q, k, v, **errors[name])


def test_whether_a_bias_wants_a_gradient_tells():
    q, k, v = tensors()
    bias = torch.randn(1, 2, 9, 9)
    for _ in range(2):
        attention(q, k, v, bias=bias)
        wanting = bias.clone().requires_grad_()
        attention(q, k, v, bias=wanting).sum().backward()
        assert wanting.grad is not None


def test_lengths_whose_values_are_known_are_looked_at_each_time():
    q, k, v = tensors()
    attention(q, k, v, seqused_k=torch.tensor([9, 3], dtype=torch.int32))
    with pytest.raises(ArgumentError, match="seqused_k"):
        attention(q, k, v, seqused_k=torch.tensor([9, 10], dtype=torch.int32))
    assert not api._calls


def test_bounded(monkeypatch):
    monkeypatch.setattr(api, "KEPT_CALLS", 2)
    for seqlen in range(1, 8):
        attention(*tensors(seqlen))
        assert len(api._calls) <= 2
