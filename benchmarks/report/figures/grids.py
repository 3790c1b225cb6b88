"""Questions that a whole table answers: `{grid over fa3 cudnn: fwd H100}`, a line for each headdim
and mask.

`{grid rate fa3: ...}` asks for our TFLOP/s, `{grid share tilewise:deterministic: ...}` for the
share of our rate that another of our ways has. Each is of the newest run in which both took part.
`{grid versions: bwd Triton-3.8 H100}` asks for our time with the usual Triton over that with this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..evidence import CLASSIC, Evidence, Timing
from ..page import times
from .calls import NONE, WAYS, marked, over_versions, slashed, timings

LENGTHS = 512, 1024, 2048, 4096, 8192, 16384
CELLS: dict[str, Callable[[Timing, str], str]] = {
    "rate": lambda timing, peer: f"{timing.rate(timing.subject):.0f}",
    "over": lambda timing, peer: marked(timing.ratios[peer].median),
    "share": lambda timing, peer: times(1 / timing.ratios[peer].median),
}


def grid(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Lines of a table: headdim and mask, then a cell for each length, with a figure for each peer,
    and for each of our ways where words name several.
    """
    what, *peers = names
    if what == "versions":
        ratios = over_versions(evidence, words)
        of = {(shape.headdim, shape.causal, shape.seqlen_q): x for shape, x in ratios.items()}
        return lines_of(lambda *shape: marked(of[shape]) if shape in of else NONE)
    ways = [word for word in words if word in WAYS] or [""]
    rest = [word for word in words if word not in WAYS]
    sides = list(itertools.product(ways, peers))
    found = {side: by_shape(evidence, side[1], [*rest, side[0]]) for side in sides}

    def cell(*shape: int) -> str:
        mine = [(found[side].get(shape), side[1]) for side in sides]
        return slashed([CELLS[what](x, peer) if x else NONE for x, peer in mine])

    return lines_of(cell)


def lines_of(cell: Callable[[int, bool, int], str]) -> str:
    """The lines, of what a cell says of headdim, mask and length."""
    lines = []
    for headdim, causal in itertools.product(CLASSIC, (False, True)):
        name = f"D{headdim} {'causal' if causal else 'full'}"
        cells = (cell(headdim, causal, length) for length in LENGTHS)
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def by_shape(evidence: Evidence, peer: str, words: list[str]) -> dict[tuple, Timing]:
    """Timings by headdim, mask and length."""
    found = timings(evidence, [peer], [word for word in words if word])
    return {(of.shape.headdim, of.shape.causal, of.shape.seqlen_q): of for of in found}


ANSWERS = {"grid": grid}
