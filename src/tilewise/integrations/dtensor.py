"""Sharding rules: attention is sharded over the batch or over the heads, independently.

`register()` registers these rules. Other placements, a sharded sequence among them, are
redistributed to the cheapest of these, never refused. What is learned of a head is shared by the
batch, so with a sharded batch its gradient is a partial sum.
"""

from ..ops.sharding import register

__all__ = ["register"]
