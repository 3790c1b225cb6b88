"""flash-attn's `bert_padding`: rows of a padded batch, packed end to end for
`flash_attn_varlen_func`, and back.

    q, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, attention_mask)
    ...
    out = pad_input(out, indices, batch, seqlen)

Indices count the rows of (batch * seqlen, ...). How many rows there are is for the host to know, so
that the functions that find them wait for the device. All are differentiable.
"""

from .frontend.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
