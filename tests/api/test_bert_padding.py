"""`tilewise.bert_padding` has the functions of `flash_attn.bert_padding`, with its results."""

import inspect
import itertools

import pytest
import torch

import tilewise
from tilewise import ArgumentError, bert_padding

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
SIGNATURES = {
    "unpad_input": ["hidden_states", "attention_mask", "unused_mask"],
    "unpad_input_for_concatenated_sequences": ["hidden_states", "attention_mask_in_length"],
    "pad_input": ["hidden_states", "indices", "batch", "seqlen"],
    "index_first_axis": ["input", "indices"],
    "index_put_first_axis": ["values", "indices", "first_axis_dim"],
    "index_first_axis_residual": ["input", "indices"],
}


def test_signatures_are_flash_attns():
    assert sorted(SIGNATURES) == sorted(bert_padding.__all__)
    for name, names in SIGNATURES.items():
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == names


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.int()], ids=lambda x: str(x.dtype))
def test_unpadded_rows_and_back(mask):
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 6, 8, 9] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 6, 6] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and type(longest) is int
    assert used.tolist() == [3, 3, 0] and used.dtype == torch.int32
    padded = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    dout = torch.randn_like(padded)
    (dx,) = torch.autograd.grad(padded, x, dout)
    assert torch.equal(dx, dout * mask[..., None, None])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_rows_that_are_kept_and_not_used(dtype):
    x = torch.randn(3, 5, 4)
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [1, 0, 0, 0, 0]]).to(dtype)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.to(dtype), unused)
    assert torch.equal(rows, x[(MASK + unused).bool()]) and len(indices) == 8
    assert cu_seqlens.tolist() == [0, 4, 7, 8] and longest == 4
    assert used.tolist() == [3, 3, 0]


def test_several_sequences_a_row():
    x = torch.randn(2, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    found = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    rows, indices, cu_seqlens, longest = found
    assert torch.equal(rows, torch.cat([x[0, :5], x[1]]))
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 2, 5, 11] and cu_seqlens.dtype == torch.int32
    assert longest == 6


def test_rows_of_the_first_dimension():
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 0])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[[3, 0]])
    put = bert_padding.index_put_first_axis(x[:2], indices, 4)
    assert torch.equal(put[[3, 0]], x[:2]) and not put[1:3].any()
    rows, same = bert_padding.index_first_axis_residual(x, indices)
    (dx,) = torch.autograd.grad(rows.sum() + 2 * same.sum(), x)
    assert torch.equal(rows, x[indices]) and torch.equal(same, x)
    assert torch.equal(dx, 2 + torch.zeros_like(x).index_fill(0, indices, 1))


def test_a_padded_batch_is_attended_as_packed():
    """As the users of these functions do it."""
    q, k, v = (torch.randn(3, 5, 2, 8) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    (q_rows, indices, starts, longest, _), (k_rows, *_), (v_rows, *_) = (
        bert_padding.unpad_input(x, mask) for x in (q, k, v)
    )
    packed = q_rows, k_rows, v_rows, starts, starts, longest, longest
    out = tilewise.flash_attn_varlen_func(*packed, causal=True)
    out = bert_padding.pad_input(out, indices, 3, 5)
    used = mask.sum(-1, dtype=torch.int32)
    want = tilewise.attention(q, k, v, causal="top_left", seqused_k=used)
    torch.testing.assert_close(out, want * mask[..., None, None])


def test_nothing():
    x, mask = torch.randn(0, 5, 2), torch.zeros(0, 5)
    rows, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(x, mask)
    assert rows.shape == (0, 2) and cu_seqlens.tolist() == [0] and longest == 0
    assert bert_padding.pad_input(rows, indices, 0, 5).shape == x.shape


@pytest.mark.parametrize("shape", [(0, 5, 2), (3, 0, 2), (0, 0, 2), (2, 3, 0), (2, 3), (2, 3, 4)])
def test_no_rows_in_use(shape):
    x, mask = torch.randn(shape, requires_grad=True), torch.zeros(shape[:2], dtype=torch.int32)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert rows.shape == (0, *shape[2:]) and indices.shape == (0,) and longest == 0
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and used.tolist() == [0] * shape[0]
    padded = bert_padding.pad_input(rows, indices, *shape[:2])
    assert padded.shape == shape and not padded.any()
    padded.sum().backward()
    assert x.grad is None or not x.grad.any()
    found = bert_padding.unpad_input_for_concatenated_sequences(x, mask)
    assert found[0].shape == rows.shape and found[2].tolist() == [0] and found[3] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_rows_of_any_dtype(dtype):
    x = torch.randn(3, 5, 4).to(dtype)
    rows, indices, *_ = bert_padding.unpad_input(x, MASK)
    padded = bert_padding.pad_input(rows, indices.int(), 3, 5)
    assert torch.equal(padded.float(), x.float() * MASK[..., None])


X, LENGTHS = torch.ones(3, 5, 4), torch.tensor([[2, 3, 0, 0, 0], [5, 0, 0, 0, 0], [0] * 5])
RIGHT = {
    "unpad_input": (X, MASK, torch.zeros_like(MASK)),
    "unpad_input_for_concatenated_sequences": (X, LENGTHS),
    "pad_input": (X[0], torch.tensor([0, 2, 3, 4, 7]), 2, 4),
    "index_first_axis": (X[0], torch.tensor([4, 0])),
    "index_put_first_axis": (X[0], torch.tensor([4, 0, 1, 2, 5]), 6),
    "index_first_axis_residual": (X[0], torch.tensor([4, 0])),
}
STRANGE = [
    *(None, "a word", 1.5, [1], -1, True, X.to_sparse(), torch.tensor(1), torch.ones(2, 3)),
    *(
        torch.tensor([-1, 0]),
        torch.tensor([9, 0]),
        torch.tensor([0.5]),
        X[:0],
        X[:, :0],
        X[..., :0],
    ),
    *(X.to(torch.complex64), MASK - 1, MASK * 2, LENGTHS + 3, MASK.to(torch.complex64)),
    *(X.to("meta"), MASK.to("meta"), torch.tensor([1, 0], device="meta"), MASK[None], MASK[0]),
    *(torch.tensor([[0, 1]]), torch.tensor([1, 0], dtype=torch.int16), torch.zeros(0)),
    torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
]


@pytest.mark.parametrize("name", RIGHT)
def test_any_argument_is_right_or_refused(name):
    """A call with one other argument, or two, has a result or raises an ArgumentError."""
    function, right, refused = getattr(bert_padding, name), RIGHT[name], 0
    function(*right)
    for first, second in itertools.product(range(len(right)), repeat=2):
        for x, y in itertools.product(STRANGE, STRANGE if first < second else [None]):
            call = list(right)
            call[first] = x
            if first < second:
                call[second] = y
            if all(getattr(z, "is_meta", False) for z in call[:2]):
                continue  # their rows cannot be counted
            try:
                function(*call)
            except ArgumentError as error:
                assert name.startswith("index") or ": " in str(error)
                refused += 1
    assert refused


WRONG = {
    "mask": (lambda: bert_padding.unpad_input(torch.ones(2, 3, 4), MASK), r"\(2, 3\), as hidden"),
    "no mask": (lambda: bert_padding.unpad_input(X, None), "attention_mask is a NoneType: it must"),
    "unused": (
        lambda: bert_padding.unpad_input(torch.ones(3, 5, 4), MASK, MASK[:2]),
        "unused_mask has shape",
    ),
    "rank": (lambda: bert_padding.unpad_input(torch.ones(3), MASK), r"hidden_states.*seqlen, \.\."),
    "indices": (lambda: bert_padding.index_first_axis(X, MASK), "indices has shape .*one dimens"),
    "a list": (lambda: bert_padding.index_first_axis(X, [1]), "indices is a list: .* torch.Tensor"),
    "out of range": (
        lambda: bert_padding.index_first_axis(torch.ones(3, 2), torch.tensor([0, 3])),
        r"indices of shape \(2,\) are from 0 to 3: .*below the number of rows, 3",
    ),
    "negative": (
        lambda: bert_padding.pad_input(torch.ones(2, 2), torch.tensor([0, -1]), 2, 3),
        r"indices of shape \(2,\) are from -1 to 0: .*at least 0",
    ),
    "an additive mask": (
        lambda: bert_padding.unpad_input(torch.ones(3, 5, 4), (MASK - 1) * 1e9),
        "attention_mask is torch.float32 .*other values than 0 and 1: pass bools",
    ),
    "masks that overlap": (
        lambda: bert_padding.unpad_input(torch.ones(3, 5, 4), MASK, MASK),
        r"attention_mask \+ unused_mask is .*other values",
    ),
    "long lengths": (
        lambda: bert_padding.unpad_input_for_concatenated_sequences(X, LENGTHS + LENGTHS),
        "attention_mask_in_length has a length of 0 and a row of 10: .*at most seqlen, 5",
    ),
    "a mask as lengths": (
        lambda: bert_padding.unpad_input_for_concatenated_sequences(X, MASK.bool()),
        "attention_mask_in_length.dtype is torch.bool",
    ),
    "batch": (lambda: bert_padding.pad_input(X[0], LENGTHS[0], -1, 5), "batch=-1: it must be an"),
    "size": (
        lambda: bert_padding.index_put_first_axis(X[0], torch.arange(5), None),
        "first_axis_dim=None: it must be an int",
    ),
    "device": (
        lambda: bert_padding.index_first_axis(X[0], torch.tensor([1], device="meta")),
        "indices is on meta and input is on cpu",
    ),
    "rows": (
        lambda: bert_padding.pad_input(torch.ones(3, 2), torch.tensor([0, 1]), 2, 3),
        "2 indices and the rows have shape",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    call, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        call()
