"""One sequence over several processes, exact: `import tilewise.distributed as td`.

`import tilewise` does not import it.
"""

from typing import TYPE_CHECKING, Any

from .api.attention import attention
from .api.cache import CacheShards
from .api.context import context_parallel
from .api.plan import Plan, plan
from .api.simulate import Simulation, simulate
from .layouts.layout import Layout
from .layouts.partition import contiguous, documents, from_positions, striped, zigzag
from .transport.failure import PullTimeout, RankLost, RankMismatch

if TYPE_CHECKING:
    from .api.style import ContextParallel

__all__ = [
    "CacheShards",
    "ContextParallel",
    "Layout",
    "Plan",
    "PullTimeout",
    "RankLost",
    "RankMismatch",
    "Simulation",
    "attention",
    "context_parallel",
    "contiguous",
    "documents",
    "from_positions",
    "plan",
    "simulate",
    "striped",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    """`ContextParallel`, whose base class takes a second to import."""
    if name == "ContextParallel":
        from .api.style import ContextParallel

        return ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
