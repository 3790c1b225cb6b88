"""README's picture: speed against length beside the peers, drawn from the rows."""

from __future__ import annotations

from .. import charts
from ..evidence import OURS, Evidence
from ..svg import mark, path, style_of, text
from . import calls

PEERS = "fa3", "cudnn"
TITLES = {"fwd": "Forward", "bwd": "Backward"}
NAMES = {OURS: "tilewise", "fa3": "FlashAttention-3", "cudnn": "cuDNN"}
WIDTH, HEIGHT = charts.SMALL
TOP, BELOW = 26, 30  # room for a title, and for the names
STYLE = """
svg { color-scheme: light dark; --ink: #1b2027; --quiet: #57606c; --line: #d9dde3; --grid: #e7eaee;
  --c0: #0b57d0; --c1: #c2410c; --c2: #157a3c; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ee; --quiet: #a3adba; --line: #333b46;
  --grid: #262d36; --c0: #7fb0ff; --c1: #ff9d5c; --c2: #5fd08a; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--quiet); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.label { font-weight: 600; fill: var(--ink); }
path { fill: none; } .grid { stroke: var(--grid); } .base { stroke: var(--line); }
.l { stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.m { fill: currentColor; stroke: currentColor; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
"""


def speed(evidence: Evidence) -> str:
    """An SVG of its own: headdim 128 under a causal mask, forward and backward."""
    place = calls.where(evidence)
    words = f"TFLOP/s over sequence length on {place.device if place else 'no GPU'}: headdim 128"
    panels = [_panel(evidence, way, n * WIDTH) for n, way in enumerate(TITLES)]
    size = f'viewBox="0 0 {len(panels) * WIDTH} {TOP + HEIGHT + BELOW}"'
    shown = f'role="img" aria-label="{words}, causal, beside FlashAttention-3 and cuDNN"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {shown}><style>{STYLE}</style>'
    return "\n".join([start, *panels, *_names(len(panels) * WIDTH), "</svg>\n"])


def _panel(evidence: Evidence, way: str, left: int) -> str:
    """One direction, so far from the left."""
    names = OURS, *PEERS
    timings = calls.timings(evidence, PEERS, (way, "D128", "causal"))
    points = {name: sorted((t.shape.seqlen_q, t.rate(name)) for t in timings) for name in names}
    title = text(left + 8, 16, f"{TITLES[way]}, headdim 128, causal, bf16", "label")
    if not timings:
        return title
    series = [charts.Series(name, of) for name, of in points.items()]
    drawn = charts.lines(series, "TFLOP/s", TITLES[way])
    at = f'<svg x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" '
    return title + drawn.replace("<svg ", at, 1)


def _names(width: int) -> list[str]:
    """Whose line is which."""
    step, top = 150, TOP + HEIGHT + 16
    left = (width - step * len(NAMES)) // 2
    found = []
    for n, (name, said) in enumerate(NAMES.items()):
        style, x = style_of(name), left + n * step
        found.append(path([(x, top - 4), (x + 26, top - 4)], f"l {style[0]}", style[2]))
        found.append(mark(style, x + 13, top - 4, "", 3.6) + text(x + 32, top, said))
    return found
