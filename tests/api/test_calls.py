"""Calls that look alike are checked once; what differs is another call."""

import pytest
import torch

from tilewise import ArgumentError, api, attention, attention_reference


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


def test_extras_are_not_kept():
    q, k, v = tensors()
    attention(q, k, v, sinks=torch.zeros(2))
    assert not api._calls


def test_bounded(monkeypatch):
    monkeypatch.setattr(api, "KEPT_CALLS", 2)
    for seqlen in range(1, 8):
        attention(*tensors(seqlen))
        assert len(api._calls) <= 2
