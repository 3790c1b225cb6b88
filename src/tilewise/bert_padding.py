"""flash-attn's `bert_padding`: rows of a padded batch, packed end to end for
`flash_attn_varlen_func`, and back.

    q, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, attention_mask)
    ...
    out = pad_input(out, indices, batch, seqlen)

Indices count the rows of (batch * seqlen, ...). How many there are is for the host to know, so that
the functions that find them wait for the device. All are differentiable, and raise an ArgumentError
where an argument is wrong; values on a GPU are not looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import ArgumentError
from .frontend.checks import check_device, check_dims, check_kind, check_tensor
from .frontend.scalars import INTEGERS, check_size
from .frontend.values import knows_values

Tensor = torch.Tensor
Unpadded = tuple[Tensor, Tensor, Tensor, int]

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows that a mask keeps: flash-attn 2.7's `unpad_input`, with its five results.

    Example:
        >>> x, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
        >>> rows.flatten(), indices, cu_seqlens, longest
        (tensor([0., 1., 3.]), tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask: (batch, seqlen), bools, or 1 for a row that is kept and 0 for one that is
            not.
        unused_mask: (batch, seqlen), rows that are kept as padding.

    Returns:
        The rows (total, ...); their indices, int64 (total,); cu_seqlens, int32 (batch + 1,); the
        longest sequence, an int; the valid rows of each sequence, int32 (batch,).
    """
    _check_mask("attention_mask", attention_mask, hidden_states=hidden_states)
    name, mask = "attention_mask", attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states=hidden_states)
        name, mask = "attention_mask + unused_mask", attention_mask + unused_mask
    _check_kept(name, mask)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, mask, mask.sum(-1, dtype=torch.int32)), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> Unpadded:
    """Packs rows of a batch that hold several sequences each, every sequence on its own.

    Example:
        >>> x, lengths = torch.arange(8.0).view(2, 4, 1), torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
        >>> rows.flatten(), cu_seqlens, longest
        (tensor([0., 1., 2., 4., 5., 6.]), tensor([0, 2, 3, 6], dtype=torch.int32), 3)

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask_in_length: integers (batch, seqlen): the lengths of a row's sequences, which
            lie end to end from its start, then zeros.

    Returns:
        The rows (total, ...), their indices, cu_seqlens, int32 (sequences + 1,), and the longest
        sequence.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states=hidden_states)
    check_kind("attention_mask_in_length", lengths, q=hidden_states, dtypes=INTEGERS)
    totals, seqlen = lengths.sum(-1, keepdim=True), lengths.shape[1]
    if knows_values(lengths) and bool(((lengths < 0) | (totals > seqlen)).any()):
        raise ArgumentError(
            f"attention_mask_in_length has a length of {int(lengths.min())} and a row of "
            f"{int(totals.max())}: lengths must be at least 0, and a row's at most seqlen, {seqlen}"
        )
    mask = torch.arange(seqlen, device=lengths.device) < totals
    return _packed(hidden_states, mask, lengths[lengths != 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows back in a batch, with zeros as padding.

    Example:
        >>> pad_input(torch.ones(3, 1), torch.tensor([0, 1, 3]), 2, 3).squeeze(-1)
        tensor([[1., 1., 0.],
                [1., 0., 0.]])

    Args:
        hidden_states: (total, ...), any dtype.
        indices: (total,), those of `unpad_input`.
        batch: rows of the result.
        seqlen: length of each.

    Returns:
        (batch, seqlen, ...).
    """
    batch, seqlen = check_size("batch", batch), check_size("seqlen", seqlen)
    rows = index_put_first_axis(hidden_states, indices, first_axis_dim=batch * seqlen)
    return rows.view((batch, seqlen, *rows.shape[1:]))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Gathers rows by index.

    Example:
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).flatten()
        tensor([3., 1.])

    Args:
        input: (n, ...), any dtype.
        indices: int64 or int32 (m,).

    Returns:
        (m, ...).
    """
    _check_rows("input", input)
    _check_indices(indices, input, of="input", rows=input.shape[0])
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatters rows by index into zeros.

    Example:
        >>> index_put_first_axis(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), 3).flatten()
        tensor([2., 0., 1.])

    Args:
        values: (m, ...), any dtype.
        indices: int64 or int32 (m,), each once.
        first_axis_dim: rows of the result.

    Returns:
        (first_axis_dim, ...).
    """
    _check_rows("values", values)
    size = check_size("first_axis_dim", first_axis_dim)
    _check_indices(indices, values, of="the rows", rows=size)
    if len(values) != len(indices):
        raise ArgumentError(
            f"there are {len(indices)} indices and the rows have shape {tuple(values.shape)}: each "
            "row needs one"
        )
    zeros = values.new_zeros((size, *values.shape[1:]))
    return zeros.index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and the input again, whose gradient is added to that of the rows.

    Example:
        >>> rows, x = index_first_axis_residual(torch.tensor([[1.0], [2.0]]), torch.tensor([1]))
        >>> rows, x.shape
        (tensor([[2.]]), torch.Size([2, 1]))

    Args:
        input: (n, ...), any dtype.
        indices: int64 or int32 (m,).

    Returns:
        The rows (m, ...), and the input.
    """
    return index_first_axis(input, indices), input


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> Unpadded:
    """The kept rows, their indices, where sequences of these lengths begin, and the longest."""
    indices = kept.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    torch._check(longest >= 0)  # pyright: ignore  # which a compiler would not know
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, starts, longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    _check_rows("hidden_states", hidden_states, dims="batch, seqlen")
    check_tensor(name, mask)
    if mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"{name} has shape {tuple(mask.shape)}: it must be (batch, seqlen), here "
            f"{tuple(hidden_states.shape[:2])}, as hidden_states has it"
        )
    check_device(name, mask, of="hidden_states", q=hidden_states)


def _check_kept(name: str, mask: Tensor) -> None:
    """Rows that are kept are told by True or 1, and the others by False or 0."""
    if mask.dtype.is_complex or (knows_values(mask) and bool(((mask != 0) & (mask != 1)).any())):
        raise ArgumentError(
            f"{name} is {mask.dtype} of shape {tuple(mask.shape)} and has other values than 0 and "
            "1: pass bools, or 1 for a row that is kept and 0 for one that is not"
        )


def _check_rows(name: str, x: Any, dims: str = "n") -> None:
    check_tensor(name, x)
    if x.dim() < 1 + dims.count(","):
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be ({dims}, ...)")


def _check_indices(indices: Tensor, x: Tensor, of: str, rows: int) -> None:
    """Indices into so many rows, on the device of `x`."""
    check_kind("indices", indices, q=x, dtypes=(torch.int64, torch.int32), of=of)
    check_dims("indices", indices, dims=1, remedy="it must have one dimension")
    if knows_values(indices) and bool(((indices < 0) | (indices >= rows)).any()):
        raise ArgumentError(
            f"indices of shape {tuple(indices.shape)} are from {int(indices.min())} to "
            f"{int(indices.max())}: they must be at least 0 and below the number of rows, {rows}"
        )
