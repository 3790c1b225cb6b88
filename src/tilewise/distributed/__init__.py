"""One sequence over several processes, exact: `import tilewise.distributed as td`.

Nothing of it is imported by `import tilewise`.
"""

from .attention import attention
from .context import context_parallel
from .deal import contiguous, documents, from_positions, striped, zigzag
from .failure import RankLost, RankMismatch
from .layout import Layout
from .plan import Plan, plan

__all__ = [
    "Layout",
    "Plan",
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
