"""Decode context parallelism: each rank has a part of each sequence's keys, interleaved by runs of
`cp_kv_cache_interleave_size`, and the query heads of a tensor-parallel rank.

All heads attend to the keys that a rank has, and results are merged by their log-sum-exp; then each
rank merges its heads with attention to the keys of the step itself, which every rank has.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank

from ..engines import Layer, Step

Tensor = torch.Tensor


class ContextLengths:
    """The keys before a step that this rank has, in memory that a graph may replay."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.world, self.rank = get_dcp_world_size_and_rank()
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        most = vllm_config.scheduler_config.max_num_seqs
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)

    def of(self, step: Step) -> Step:
        """A step whose queries attend to what was there before it."""
        cycle = self.interleave * self.world
        before = step.seqused_k - step.cu_seqlens_q.diff()
        last = before % cycle - self.rank * self.interleave
        lengths = self.lengths[: len(before)]
        lengths.copy_(before // cycle * self.interleave + last.clamp_(0, self.interleave))
        return Step(
            step.cu_seqlens_q,
            seqused_k=lengths.clamp_(min=0),
            page_table=step.page_table,
            max_seqlen_q=step.max_seqlen_q,
        )


def merge_ranks(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Out, (tokens, nheads, headdim), and lse, (nheads, tokens), of a rank's heads over all keys,
    from those of all heads over the rank's keys.
    """
    group = get_dcp_group()
    lses = group.all_gather(lse.contiguous(), dim=0).unflatten(0, (group.world_size, -1))
    total = lses.logsumexp(0)
    out = group.reduce_scatter(_share(out, lse, total=total), dim=1)
    return out, total.unflatten(0, (group.world_size, -1))[group.rank_in_group]


def _share(out: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """What a part of the keys adds to a row of all."""
    weight = (lse - total).exp().t().unsqueeze(-1).to(out.dtype)
    return (out * weight).masked_fill((lse == -torch.inf).t().unsqueeze(-1), 0)  # of any `out`


def attend_shards(
    layers: dict[bool, Layer],
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    step: Any,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Attention of a step's queries to what all ranks have."""
    all_heads = get_dcp_group().all_gather(query.contiguous(), dim=1)
    caches = dict(k_cache=k_cache, v_cache=v_cache)
    out, lse = layers[False].attend(all_heads, step.context, **caches, return_lse=True)
    out, lse = merge_ranks(out, lse)
    within = layers[step.causal].attend_within
    new_out, new_lse = within(query, key, v=value, step=step, return_lse=True)
    total = torch.logaddexp(lse, new_lse)
    return _share(out, lse, total=total) + _share(new_out, new_lse, total=total)
