"""The arguments of the mask function: a predicate over some queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .visible import Predicate

Tensor = torch.Tensor


class MaskRequest(NamedTuple):
    """A mask, as transformers describes it."""

    predicate: Predicate
    batch: int
    lengths: tuple[int, int]  # of queries and keys
    offsets: tuple[int | Tensor, int]  # the positions of the first ones
    padding: Tensor | None  # bool (batch, positions)
    local_size: int | None
    device: torch.device | str
    is_causal: bool
    chunk: int | None
    use_vmap: bool  # the predicate may take numbers alone
    is_step: bool  # one query over a cache whose shape stays
    cache_position: Tensor | None  # transformers before 5.4

    def is_whole(self) -> bool:
        """Whether the queries are the keys, from the first position on, without padding."""
        is_first = all(isinstance(start, int) and start == 0 for start in self.offsets)
        return is_first and self.padding is None and self.lengths[0] == self.lengths[1]

    def is_on_device(self) -> bool:
        """Whether the first query's position is a tensor, as over a static cache."""
        return isinstance(self.offsets[0], torch.Tensor)

    def is_union(self) -> bool:
        """Whether transformers joined predicates by `or`: blocks of tokens that see each other."""
        return getattr(self.predicate, "__name__", "") == "or_mask"

    def used(self) -> Tensor:
        """int32 (batch,): the keys of a static cache that are written once these queries' are."""
        used = self.offsets[0] + self.lengths[0] - self.offsets[1]
        return torch.as_tensor(used, dtype=torch.int32, device=self.device).expand(self.batch)
