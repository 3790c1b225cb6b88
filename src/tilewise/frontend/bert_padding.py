"""flash-attn's `bert_padding`: rows of a padded batch, packed end to end for
`flash_attn_varlen_func`, and back.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError

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
    """The rows that a mask keeps, packed: flash-attn 2.7's `unpad_input`, with its five results.

    >>> x, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    >>> rows.flatten(), indices, cu_seqlens, longest
    (tensor([0., 1., 3.]), tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)

    hidden_states: (batch, seqlen, ...), any dtype.
    attention_mask: (batch, seqlen), bools, or 1 for a row that is kept and 0 for one that is not.
    unused_mask: the same, for rows that are kept and not used.
    Returns the rows (total, ...), their indices (total,), int64, cu_seqlens (batch + 1,), int32,
    the longest sequence, an int, and how many rows of each are used (batch,), int32. Raises
    ArgumentError.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> Unpadded:
    """The rows of several sequences in each row of a batch, packed, each sequence on its own.

    >>> x, lengths = torch.arange(8.0).view(2, 4, 1), torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    >>> rows.flatten(), cu_seqlens, longest
    (tensor([0., 1., 2., 4., 5., 6.]), tensor([0, 2, 3, 6], dtype=torch.int32), 3)

    hidden_states: (batch, seqlen, ...), any dtype.
    attention_mask_in_length: integers (batch, seqlen): the lengths of a row's sequences, which
    stand side by side from its begin, among zeros.
    Returns the rows (total, ...), their indices, cu_seqlens (sequences + 1,), int32, and the
    longest sequence. Raises ArgumentError.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    kept = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    return _packed(hidden_states, kept, lengths[lengths != 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows back in a batch, zeros where there are none: (batch, seqlen, ...).

    >>> pad_input(torch.ones(3, 1), torch.tensor([0, 1, 3]), 2, 3).squeeze(-1)
    tensor([[1., 1., 0.],
            [1., 0., 0.]])

    hidden_states (total, ...), any dtype; indices (total,), those of `unpad_input`. Raises
    ArgumentError.
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows at these indices: (n, ...) to (len(indices), ...).

    >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).flatten()
    tensor([3., 1.])

    Any dtype; indices int64 or int32. Raises ArgumentError.
    """
    _check_indices(indices)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows put at these indices of zeros: (len(indices), ...) to (first_axis_dim, ...).

    >>> index_put_first_axis(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), 3).flatten()
    tensor([2., 0., 1.])

    Any dtype; indices int64 or int32, each once. Raises ArgumentError.
    """
    _check_indices(indices)
    if not isinstance(values, Tensor) or values.dim() < 1 or len(values) != len(indices):
        shape = getattr(values, "shape", type(values).__name__)
        raise ArgumentError(
            f"there are {len(indices)} indices and the rows have shape {shape}: each row needs one"
        )
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and the input again, whose gradient joins that of the rows.

    >>> rows, x = index_first_axis_residual(torch.tensor([[1.0], [2.0]]), torch.tensor([1]))
    >>> rows, x.shape
    (tensor([[2.]]), torch.Size([2, 1]))

    Dtypes and errors are those of `index_first_axis`.
    """
    return index_first_axis(input, indices), input


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> Unpadded:
    """The kept rows, their indices, where sequences of these lengths begin, and the longest."""
    indices = kept.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if not isinstance(hidden_states, Tensor) or hidden_states.dim() < 2:
        shape = getattr(hidden_states, "shape", type(hidden_states).__name__)
        raise ArgumentError(f"hidden_states has shape {shape}: it must be (batch, seqlen, ...)")
    wanted = tuple(hidden_states.shape[:2])
    if not isinstance(mask, Tensor) or tuple(mask.shape) != wanted:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError(
            f"{name} has shape {shape}: it must be (batch, seqlen), here {wanted}, as "
            "hidden_states has it"
        )


def _check_indices(indices: Tensor) -> None:
    is_tensor = isinstance(indices, Tensor)
    if not is_tensor or indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        what = f"a {indices.dtype} tensor of shape {tuple(indices.shape)}" if is_tensor else indices
        raise ArgumentError(f"indices is {what!r}: it must be int64 or int32, of one dimension")
