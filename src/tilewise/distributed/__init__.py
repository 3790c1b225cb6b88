"""One sequence over several processes, exact: `import tilewise.distributed as td`.

`import tilewise` does not import it.
"""

from typing import TYPE_CHECKING, Any

from .attention import attention
from .context import context_parallel
from .failure import PullTimeout, RankLost, RankMismatch
from .layout import Layout
from .partition import contiguous, documents, from_positions, striped, zigzag
from .plan import Plan, plan

if TYPE_CHECKING:
    from .style import ContextParallel

__all__ = [
    "ContextParallel",
    "Layout",
    "Plan",
    "PullTimeout",
    "RankLost",
    "RankMismatch",
    "attention",
    "context_parallel",
    "contiguous",
    "documents",
    "from_positions",
    "plan",
    "striped",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    """`ContextParallel`, whose base class takes a second to import."""
    if name == "ContextParallel":
        from .style import ContextParallel

        return ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
