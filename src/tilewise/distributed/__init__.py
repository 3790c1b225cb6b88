"""One sequence over several processes, exact: `import tilewise.distributed as td`.

Nothing of it is imported by `import tilewise`.
"""

from .deal import contiguous, documents, from_positions, striped, zigzag
from .failure import RankLost, RankMismatch
from .layout import Layout

__all__ = [
    "Layout",
    "RankLost",
    "RankMismatch",
    "contiguous",
    "documents",
    "from_positions",
    "striped",
    "zigzag",
]
