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

    Raises:
        ArgumentError: an argument is wrong.
    """
    _check_mask("attention_mask", attention_mask, hidden_states=hidden_states)
    mask = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states=hidden_states)
        mask = attention_mask + unused_mask
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

    Raises:
        ArgumentError: an argument is wrong.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states=hidden_states)
    mask = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
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

    Raises:
        ArgumentError: an argument is wrong.
    """
    rows = index_put_first_axis(hidden_states, indices, first_axis_dim=batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


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

    Raises:
        ArgumentError: an argument is wrong.
    """
    _check_indices(indices)
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

    Raises:
        ArgumentError: an argument is wrong.
    """
    _check_indices(indices)
    if not isinstance(values, Tensor) or values.dim() < 1 or len(values) != len(indices):
        shape = getattr(values, "shape", type(values).__name__)
        raise ArgumentError(
            f"there are {len(indices)} indices and the rows have shape {shape}: each row needs one"
        )
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


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

    Raises:
        ArgumentError: an argument is wrong.
    """
    return index_first_axis(input, indices), input


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> Unpadded:
    """The kept rows, their indices, where sequences of these lengths begin, and the longest."""
    indices = kept.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    torch._check(longest >= 0)  # which a compiler would not know
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
        shown = repr(indices)
        if is_tensor:
            shown = f"a {indices.dtype} tensor of shape {tuple(indices.shape)}"
        raise ArgumentError(f"indices is {shown}: it must be int64 or int32, of one dimension")
