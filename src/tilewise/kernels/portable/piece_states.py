"""The fold of a cache's pieces whose states came from several ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...problem import Problem
from ..common.cached import Cached
from ..common.decode_step import run
from ..common.outputs import empty_out
from ..common.piece_states import by_position, states_at
from ..common.program import Launch
from .decode_launch import launches_of

Tensor = torch.Tensor


def fold_states(cached: Cached, states: Tensor, used: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the states of all ranks, (ranks, ...), of sequences of so many keys;
    `turn` as `by_position` has it.
    """
    q, headdim_v = cached.q, cached.v.shape[3]
    planes = by_position(states, q, headdim_v, turn)
    room = len(planes[0]) * cached.piece_size
    out, lse = empty_out(q, headdim_v)
    extras = cached.extras._replace(seqused_k=used, captured=planes)
    whole = cached._replace(extras=extras, mask="")
    run(whole, out, lse, functools.partial(launches_of_fold, room=room))
    return out, lse


def launches_of_fold(
    cached: Cached, problem: Problem, out: Any, lse: Any, work: Any, room: int
) -> list[Launch]:
    """The launch that folds states, which were captured."""
    acc_o, numbers = cached.extras.captured
    states = states_at(acc_o, numbers)
    cached = cached._replace(extras=cached.extras._replace(captured=()))
    return launches_of(cached, problem, out, lse, work, states=states, room=room)[1:]
