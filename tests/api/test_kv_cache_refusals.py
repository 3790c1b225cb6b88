"""What a call with a cache refuses, by name."""

import pytest
import torch
from helpers.caches import INT32

import tilewise

Q, K = torch.randn(2, 1, 4, 16), torch.randn(6, 8, 2, 16)
TABLE = torch.zeros(2, 3, dtype=INT32)
USED = torch.tensor([20, 3], dtype=INT32)
STARTS = torch.tensor([0, 1, 2], dtype=INT32)
WRONG = {
    "table of int64": (dict(page_table=TABLE.long()), r"page_table.dtype is torch.int64.*int32"),
    "table of one row": (dict(page_table=TABLE[:1]), r"page_table has shape \(1, 3\).*must be 2"),
    "table of rank 1": (dict(page_table=TABLE[0]), r"page_table has shape.*\(batch, pages\)"),
    "table is a list": (dict(page_table=[[0]]), "page_table is a list"),
    "lengths of int64": (dict(seqused_k=USED.long()), "seqused_k.dtype is torch.int64"),
    "lengths of three": (dict(seqused_k=USED[:1].expand(3)), r"seqused_k has shape \(3,\).*2 seq"),
    "v of fewer pages": (dict(v=K[1:]), "k has 6 pages or rows and v has 5"),
    "v of another dtype": (dict(v=K.double()), "v.dtype is torch.float64"),
    "k of rank 3": (dict(k=K[0]), r"k has shape \(8, 2, 16\): with a cache it must be of 4"),
    "packed of rank 4": (dict(cu_seqlens_q=STARTS), r"q has shape.*it must be \(total_q"),
    "top-left": (dict(causal="top_left"), "causal='top_left' with a cache"),
    "split_size": (dict(split_size=0), "split_size=0: it must be an int of at least 1"),
    "split_size is a float": (dict(split_size=1.5), "split_size=1.5"),
    "out of another shape": (dict(out=Q[:1]), r"out has shape \(1, 1, 4, 16\): it must be \(2, 1"),
    "out of another dtype": (dict(out=Q.double()), "out is torch.float64"),
    "slopes": (dict(alibi_slopes=torch.ones(3)), "alibi_slopes has shape"),
    "sinks": (dict(sinks=torch.ones(3)), "sinks has shape"),
    "strided headdim": (dict(k=K.transpose(2, 3).contiguous().transpose(2, 3)), "k has stride 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    change, message = WRONG[name]
    arguments = dict(q=Q, k=K, v=K, page_table=TABLE, seqused_k=USED) | change
    with pytest.raises(tilewise.ArgumentError, match=message):
        tilewise.attention(**arguments)


@pytest.mark.parametrize("starts", [[1, 2, 2], [0, 2, 1], [0, 1, 3]])
def test_wrong_starts_are_named(starts):
    with pytest.raises(tilewise.ArgumentError, match="cu_seqlens_q=.*it must begin with 0"):
        starts = torch.tensor(starts, dtype=INT32)
        tilewise.attention(Q[:, 0], K, K, page_table=TABLE, seqused_k=USED, cu_seqlens_q=starts)


@pytest.mark.parametrize(
    "change",
    [
        dict(dropout_p=0.1),
        dict(bias=torch.zeros(1, 1, 1, 24)),
        dict(score_mod=lambda s, b, h, i, j: s),
        dict(seqused_q=USED),
        dict(cu_seqlens_k=STARTS),
    ],
)
def test_what_does_not_go_with_a_cache_says_so(change):
    with pytest.raises(NotImplementedError, match=f"{next(iter(change))}.* with a cache"):
        tilewise.attention(Q, K, K, page_table=TABLE, seqused_k=USED, **change)


def test_a_forced_backend_says_why_it_does_not_serve():
    words = dict(page_table=TABLE, seqused_k=USED)
    with pytest.raises(NotImplementedError, match="hopper: its kernel runs on Hopper GPUs"):
        tilewise.attention(Q, K, K, backend="hopper", **words)
    with pytest.raises(tilewise.ArgumentError, match="'fastest' is unknown"):
        tilewise.attention(Q, K, K, backend="fastest", **words)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out"])
def test_gradients_are_refused_with_the_reason(name):
    arguments = dict(q=Q, k=K, v=K, sinks=torch.ones(4), out=torch.empty_like(Q))
    arguments[name] = arguments[name].clone().requires_grad_()
    lengths = dict(page_table=TABLE, seqused_k=USED)
    with pytest.raises(NotImplementedError, match=rf"{name}.requires_grad: a call with a cache"):
        tilewise.attention(**arguments, **lengths)
    with torch.no_grad():
        tilewise.attention(**arguments, **lengths)
