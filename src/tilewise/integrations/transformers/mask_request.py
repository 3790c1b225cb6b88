"""The arguments of the mask function: a predicate over some queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .visible import Lengths, Predicate

Tensor = torch.Tensor


class MaskRequest(NamedTuple):
    """A mask, as transformers describes it."""

    predicate: Predicate
    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor  # the position of the first query
    kv_offset: int
    padding: Tensor | None  # bool (batch, positions)
    local_size: int | None
    device: torch.device | str
    is_causal: bool
    chunk: int | None
    use_vmap: bool  # the predicate may take numbers alone
    is_step: bool  # one query over a cache whose shape stays
    cache_position: Tensor | None  # transformers before 5.4

    @property
    def lengths(self) -> Lengths:
        """How many queries and keys there are."""
        return Lengths(self.q_length, self.kv_length)

    def is_whole(self) -> bool:
        """Whether the queries are the keys, from the first position on, without padding."""
        is_first = all(isinstance(x, int) and x == 0 for x in (self.q_offset, self.kv_offset))
        return is_first and self.padding is None and self.q_length == self.kv_length

    def is_on_device(self) -> bool:
        """Whether the first query's position is a tensor, as over a static cache."""
        return isinstance(self.q_offset, torch.Tensor)

    def is_union(self) -> bool:
        """Whether transformers joined predicates by `or`: blocks of tokens that see each other."""
        return getattr(self.predicate, "__name__", "") == "or_mask"

    def used(self) -> Tensor:
        """int32 (batch,): the keys of a static cache that are written once these queries' are."""
        used = self.q_offset + self.q_length - self.kv_offset
        return torch.as_tensor(used, dtype=torch.int32, device=self.device).expand(self.batch)
