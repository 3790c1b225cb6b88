"""torch's `context_parallel`, in which sequences are shards and torch replaces only its own
attention: any other would silently attend within its shard. The steps of torch's ring that
`enable_sdpa` serves are over whole shards, and are not refused.
"""

from __future__ import annotations

import sys

import torch

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_shards() -> None:
    """NotImplementedError inside of `context_parallel`, however the call came there."""
    module = sys.modules.get(_MODULE)
    # torch's replacement while the context is entered; the table keeps it afterwards
    if module is not None and torch.nn.functional.scaled_dot_product_attention in getattr(
        module, "_replaced_functions", ()
    ):
        raise NotImplementedError(
            "tilewise inside of torch's context_parallel: q, k and v are shards of sequences, "
            "and the keys of the other shards would be left out; inside call "
            "torch.nn.functional.scaled_dot_product_attention, which torch replaces and "
            "tilewise.enable_sdpa() has us compute, and call tilewise outside, on whole sequences "
            "(DTensors may be sharded by batch or heads)"
        )
