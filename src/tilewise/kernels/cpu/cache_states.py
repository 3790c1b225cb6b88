"""The states of a cache's spans, before they are folded: what is exchanged where a sequence's
pieces lie on several ranks. Each span, and the fold, are those of `cache.forward`, and so are bits.
"""

from __future__ import annotations

import math

import torch

from ...tile.paging import lengths_of
from ...tile.quantize import by_row, of_sequence
from ...tile.split_kv import SplitState, finish, fold, key_without_value
from ..common.cached import Cached
from .cache import SPAN, open_sequence, states_of, tiles_of
from .cache_rows import Memory
from .softmax import fold_spans

Tensor = torch.Tensor


def states_in(keys: int, split_size: int) -> int:
    """How many states so many keys have, in whole pieces: one for each span."""
    return -(-keys // split_size) * -(-split_size // SPAN)


def write_states(cached: Cached, keys: int) -> Tensor:
    """O, m and l of each span of up to so many keys: (spans, batch, seqlen_q, nheads, columns). The
    call has no window, which would skip spans.
    """
    q, used = cached.q, cached.extras.seqused_k
    dtype = torch.promote_types(q.dtype, torch.float32)
    width, nheads_k = cached.v.shape[3] + 2, cached.k.shape[2]
    states = q.new_zeros((states_in(keys, cached.split_size), *q.shape[:-1], width), dtype=dtype)
    states[..., -2] = -math.inf
    memory = Memory()
    for row, length in enumerate(lengths_of(cached.k, cached.page_table, used, len(q))):
        sequence = open_sequence(cached, row, length, q.shape[1], dtype)
        for tile in tiles_of(sequence, q[row], dtype=dtype):
            state = states_of(sequence, tile, memory)
            if state is not None:
                tokens = slice(tile.start - sequence.diagonal, tile.stop - sequence.diagonal)
                target = states[: len(state.m_i), row, tokens].unflatten(2, (nheads_k, -1))
                x = torch.cat((state.acc_o, state.m_i, state.l_i), -1)
                by_group = x.unflatten(2, (-1, tile.stop - tile.start))
                target.copy_(by_group.permute(0, 3, 1, 2, 4))
    return states


def fold_states(cached: Cached, states: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the states of all ranks, (ranks, ...), of which each has `turn` pieces of
    a sequence, and then the next rank; in their order.
    """
    spans = states_in(turn * cached.split_size, cached.split_size)
    x = states.unflatten(1, (-1, spans)).transpose(0, 1).flatten(0, 2).flatten(1, 2)
    parts = (part.contiguous() for part in x.split((x.shape[-1] - 2, 1, 1), -1))
    state, sinks = fold_spans(SplitState._make(parts)), cached.extras.sinks
    if sinks is not None:
        scores = sinks.to(states.dtype).view(1, -1, 1).repeat(len(state.m_i), 1, 1)
        state = fold(state, key_without_value(scores, like=state.acc_o))
    out, lse = (part.unflatten(0, states.shape[2:4]) for part in finish(state))
    scale = cached.v_descale
    if scale is not None and not by_row(scale):
        for row, of_row in enumerate(out):
            factors = of_sequence(scale, row).to(out.dtype).view(-1, 1, 1)
            of_row.unflatten(1, (cached.k.shape[2], -1)).mul_(factors)
    return out.to(cached.q.dtype), lse.transpose(1, 2).contiguous()
