"""Questions that a whole table answers: `{grid over fa3: fwd H100}`, a line a headdim and mask.

`{grid rate fa3: ...}` asks for our TFLOP/s, `{grid share tilewise:deterministic: ...}` for the
share of our rate that another of our ways has. Each is of the newest run in which both took part.
"""

from __future__ import annotations

from collections.abc import Callable

from ..evidence import Evidence, Timing
from ..page import times
from .calls import CLASSIC, NONE, marked, timings

LENGTHS = 512, 1024, 2048, 4096, 8192, 16384
CELLS: dict[str, Callable[[Timing, str], str]] = {
    "rate": lambda timing, peer: f"{timing.rate(timing.subject):.0f}",
    "over": lambda timing, peer: marked(timing.ratios[peer].median),
    "share": lambda timing, peer: times(1 / timing.ratios[peer].median),
}


def grid(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Lines of a table: headdim and mask, then a cell for each length."""
    what, peer = names
    found = {
        (timing.shape.headdim, timing.shape.causal, timing.shape.seqlen_q): timing
        for timing in timings(evidence, [peer], words)
    }
    lines = []
    for headdim in CLASSIC:
        for causal in (False, True):
            mine = [found.get((headdim, causal, length)) for length in LENGTHS]
            cells = [CELLS[what](timing, peer) if timing else NONE for timing in mine]
            name = f"D{headdim} {'causal' if causal else 'full'}"
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


ANSWERS = {"grid": grid}
