"""The states of a cache's pieces in memory, before they are folded: what ranks exchange where a
sequence's pieces lie on several of them. In fp32: O of all, by piece, sequence, query and head,
then their m, then their l.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...tile.split_kv import SplitState
from .cached import Cached
from .decode_step import run
from .operand import Within
from .program import Launch

Tensor = torch.Tensor


def write_states(
    launches_of: Callable[..., Sequence[Launch]], cached: Cached, pieces: int
) -> Tensor:
    """The states of so many pieces, undefined where a sequence has none, by launches as `run` takes
    them.
    """
    q, headdim_v = cached.q, cached.v.shape[3]
    states = q.new_empty(pieces * q.shape[:3].numel() * (headdim_v + 2), dtype=torch.float32)
    if cached.k.shape[0]:
        acc_o, numbers = planes(states, q, headdim_v)
        run(cached, acc_o, numbers, launches_of)
    return states


def planes(states: Tensor, q: Tensor, headdim_v: int) -> tuple[Tensor, Tensor]:
    """Views of O, (..., pieces, rows of q, nheads, headdim_v), and of m and l together."""
    rows = states.shape[-1] // (headdim_v + 2)
    acc_o, numbers = states.split((rows * headdim_v, 2 * rows), -1)
    return acc_o.unflatten(-1, (-1, q.shape[:2].numel(), q.shape[2], headdim_v)), numbers


def states_in(work: Any, rows: Sequence[int], headdim_v: int) -> SplitState:
    """The operands of states of so many rows, in a workspace."""
    acc_o = work.add("acc_o", (*rows, headdim_v))
    return SplitState(acc_o, work.add("m_i", rows), l_i=work.add("l_i", rows))


def states_at(acc_o: Any, numbers: Any) -> SplitState:
    """The operands of states, of those of their planes."""
    l_i = Within("l_i", numbers.name, numbers.numel() // 2, numbers.dtype)
    return SplitState(acc_o, numbers, l_i=l_i)


def by_position(states: Tensor, q: Tensor, headdim_v: int, turn: int) -> tuple[Tensor, Tensor]:
    """The planes of the states of all ranks, (ranks, ...), of which each has `turn` pieces of a
    sequence and then the next rank: in the sequence's order.
    """
    acc_o, numbers = planes(states, q, headdim_v)
    acc_o = acc_o.unflatten(1, (-1, turn)).transpose(0, 1).flatten(0, 2)
    numbers = numbers.unflatten(1, (2, -1, turn * q.shape[:3].numel())).permute(1, 2, 0, 3)
    return acc_o.contiguous(), numbers.flatten()
