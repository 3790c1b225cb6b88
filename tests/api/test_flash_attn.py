"""What flash-attn's newer functions take beside flash-attn 2's arguments: chunks, hints, and
numbers that come as tensors or from numpy.
"""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
from tilewise import ArgumentError
from tilewise.frontend.scalars import check_window

STARTS_Q = torch.tensor([0, 5, 5, 18], dtype=torch.int32)
STARTS_K = torch.tensor([0, 9, 12, 23], dtype=torch.int32)


def plain(q, k, v, chunk, causal=False, window=(-1, -1)):
    """(seqlen, nheads, headdim): flash-attn 3's test has the mask in these words."""
    diagonal = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    k_idx = torch.arange(k.shape[0])
    first = diagonal - diagonal % chunk
    seen = (k_idx >= first) & (k_idx < first + chunk)
    seen &= (k_idx <= diagonal) | (not causal)
    seen &= (k_idx >= diagonal - window[0]) | (window[0] < 0)
    seen &= (k_idx <= diagonal + window[1]) | (window[1] < 0)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("hij,jhd->ihd", p, v)


def qkv(batch, seqlen_q, seqlen_k):
    q = torch.randn(batch, seqlen_q, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, seqlen_k, 2, 8, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v)]


def check(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, leaves, dout) for out in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window_size": (3, 2)}], ids=str)
@pytest.mark.parametrize("lengths", [(20, 20), (7, 20), (20, 7), (1, 15)])
@pytest.mark.parametrize("chunk", [1, 4, 6, 64])
def test_a_chunk_is_that_of_the_diagonal(chunk, lengths, asked):
    leaves = qkv(2, *lengths)
    ours = tilewise.flash_attn_func(*leaves, attention_chunk=chunk, **asked)
    words = {"window": asked.get("window_size", (-1, -1)), "causal": asked.get("causal", False)}
    theirs = [plain(*(x[i] for x in leaves), chunk, **words) for i in range(2)]
    check(ours, torch.stack(theirs), leaves)


def sequences(leaves, used_q=None, used_k=None):
    """Each sequence by itself: its rows, and how many of them are there."""
    for i in range(len(STARTS_Q) - 1):
        a, b = STARTS_Q[i : i + 2].tolist()
        c, d = STARTS_K[i : i + 2].tolist()
        real_q = b - a if used_q is None else int(used_q[i])
        real_k = d - c if used_k is None else int(used_k[i])
        q, k, v = leaves
        yield q[a : a + real_q], k[c : c + real_k], v[c : c + real_k], b - a


USED = {
    "none": {},
    "keys": {"seqused_k": torch.tensor([4, 3, 11], dtype=torch.int32)},
    "both": {
        "seqused_q": torch.tensor([5, 0, 10], dtype=torch.int32),
        "seqused_k": torch.tensor([9, 2, 7], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", USED)
def test_packed_sequences_have_chunks_of_their_own(name, causal):
    leaves = [x[0] for x in qkv(1, 18, 23)]
    used = USED[name]
    ours = tilewise.flash_attn_varlen_func(
        *leaves, STARTS_Q, STARTS_K, causal=causal, attention_chunk=4, **used
    )
    parts = []
    for q, k, v, rows in sequences(leaves, used.get("seqused_q"), used.get("seqused_k")):
        out = plain(q, k, v, 4, causal)
        parts.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, rows - len(out))))
    check(ours, torch.cat(parts), leaves)


def test_chunks_reach_every_twin():
    qkv = torch.randn(2, 12, 3, 2, 8)
    q, k, v = qkv.unbind(2)
    want = tilewise.flash_attn_func(q, k, v, causal=True, attention_chunk=5)
    assert not torch.equal(want, tilewise.flash_attn_func(q, k, v, causal=True))
    asked = dict(causal=True, attention_chunk=5)
    assert torch.equal(tilewise.flash_attn_qkvpacked_func(qkv, **asked), want)
    assert torch.equal(tilewise.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **asked), want)
    starts = torch.tensor([0, 12, 24], dtype=torch.int32)
    rows = qkv.flatten(0, 1)
    packed = tilewise.flash_attn_varlen_qkvpacked_func(rows, starts, **asked)
    torch.testing.assert_close(packed.unflatten(0, (2, 12)), want)
    bounds = starts, starts.clone()
    packed = tilewise.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], *bounds, **asked)
    torch.testing.assert_close(packed.unflatten(0, (2, 12)), want)


def test_chunks_compile_once_for_all_lengths():
    torch.compiler.reset()

    def attend(q, k, v):
        return tilewise.flash_attn_func(q, k, v, causal=True, attention_chunk=4)

    counter = CompileCounterWithBackend("aot_eager")
    again, counts = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True), []
    for lengths in ((6, 9), (7, 15), (8, 30)):
        tensors = [x.detach() for x in qkv(2, *lengths)]
        torch.testing.assert_close(again(*tensors), attend(*tensors))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("chunk", [-1, 2.0, True, "4", None, torch.tensor(2.0)])
def test_what_is_no_chunk_is_refused(chunk):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ArgumentError, match=r"attention_chunk=.*it must be an int"):
        tilewise.flash_attn_func(q, q, q, attention_chunk=chunk)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        tilewise.flash_attn_varlen_func(q[0], q[0], q[0], starts, [0, 4], attention_chunk=2)


WINDOWS = {
    "a tensor": torch.tensor([3, 1]),
    "tensors": (torch.tensor(3), torch.tensor(1, dtype=torch.int32)),
    "an array": np.array([3, 1]),
    "numpy's": (np.int64(3), np.int32(1)),
    "a list": [3, np.int64(1)],
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_other_integers(name):
    q = torch.randn(1, 12, 2, 8)
    window, want = WINDOWS[name], tilewise.flash_attn_func(q, q, q, window_size=(3, 1))
    assert torch.equal(tilewise.flash_attn_func(q, q, q, window_size=window), want)
    assert torch.equal(tilewise.attention(q, q, q, window=window), want)
    assert all(type(side) is int for side in check_window(window, "window"))


WRONG = {
    "three": torch.tensor([3, 1, 2]),
    "one": np.int64(3),
    "floats": torch.tensor([3.0, 1.0]),
    "a float": (np.float64(3), 1),
    "a bool": (np.bool_(True), 1),
    "bools": torch.tensor([True, False]),
    "below": np.array([-2, 1]),
    "a pair": (torch.tensor([3, 1]), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_windows_of_something_else_are_refused(name):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ArgumentError, match="window_size="):
        tilewise.flash_attn_func(q, q, q, window_size=WRONG[name])


HINTS = [{"num_splits": 4}, {"num_splits": np.int64(1)}, {"pack_gqa": True}, {"pack_gqa": False}]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_hints_change_nothing(hint):
    q, starts = torch.randn(1, 8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    k = q[:, :, :2]
    want = tilewise.flash_attn_func(q, k, k)
    assert torch.equal(tilewise.flash_attn_func(q, k, k, **hint), want)
    kv = torch.stack([k, k], 2)
    assert torch.equal(tilewise.flash_attn_kvpacked_func(q, kv, **hint), want)
    packed = q[0], k[0], k[0], starts, starts
    want = tilewise.flash_attn_varlen_func(*packed)
    assert torch.equal(tilewise.flash_attn_varlen_func(*packed, **hint), want)


def test_bounds_of_lengths_may_be_numpys():
    q, starts = torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    want = tilewise.flash_attn_varlen_func(q, q, q, starts, starts, 5, 5)
    for bound in (np.int64(5), np.int32(2**20)):
        got = tilewise.flash_attn_varlen_func(q, q, q, starts, starts, bound, bound)
        assert torch.equal(got, want)
    with pytest.raises(ArgumentError, match="max_seqlen_q=.*it must be an int"):
        tilewise.flash_attn_varlen_func(q, q, q, starts, starts, np.float64(5), 5)


@pytest.mark.parametrize(
    "hint", [{"num_splits": -1}, {"num_splits": 1.5}, {"pack_gqa": "no"}], ids=str
)
def test_what_is_no_hint_is_refused(hint):
    q = torch.randn(1, 8, 4, 16)
    (name,) = hint
    with pytest.raises(ArgumentError, match=f"{name}=.*it must be"):
        tilewise.flash_attn_func(q, q, q, **hint)
