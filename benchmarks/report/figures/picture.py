"""The pictures of README and of the page of figures, drawn from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilewise.explain.steps import Decode

from .. import charts
from ..evidence import OURS, Evidence
from ..svg import mark, path, quoted, style_of, text
from . import calls, steps

PEERS = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "sdpa": "SDPA"}
TITLES = {"fwd": "Forward", "bwd": "Backward"}
NAMES = {OURS: "tilewise", "fa3": PEERS["fa3"], "cudnn": PEERS["cudnn"]}
COLOURS = OURS, "fa3"  # of the first card and the other one
WIDTH, HEIGHT = charts.SMALL
TOP, BELOW = 26, 30  # room for a title, and for the names
LINES = ("fa3", "1 query"), ("fa3", "2 to 8"), ("fa3", "chunk"), ("sdpa", "1 query")
BESIDE = "left of 1 the peer is faster"
STYLE = """
svg { color-scheme: light dark; --ink: #1b2027; --quiet: #57606c; --line: #d9dde3; --grid: #e7eaee;
  --paper: #ffffff; --c0: #0b57d0; --c1: #c2410c; --c2: #157a3c; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ee; --quiet: #a3adba; --line: #333b46;
  --grid: #262d36; --paper: #12161c; --c0: #7fb0ff; --c1: #ff9d5c; --c2: #5fd08a; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--quiet); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.label { font-weight: 600; fill: var(--ink); }
path { fill: none; } .grid { stroke: var(--grid); } .base { stroke: var(--line); }
.paper { fill: var(--paper); } .one { stroke: var(--quiet); stroke-dasharray: 4 3; }
.mean { stroke: var(--ink); stroke-width: 2; } .soft { fill-opacity: .55; }
.l { stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.m { fill: currentColor; stroke: currentColor; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
"""


def speed(evidence: Evidence) -> str:
    """TFLOP/s against length: headdim 128 under a causal mask, forward and backward."""
    title = f"headdim 128, causal, bf16, {calls.card(evidence, [], [])}"
    panels = [_panel(evidence, way, n * WIDTH, title) for n, way in enumerate(TITLES)]
    width = len(panels) * WIDTH
    words = f"TFLOP/s over sequence length, {title}, beside FlashAttention-3 and cuDNN"
    return _picture(width, TOP + HEIGHT + BELOW, words, [*panels, *_names(width)])


def _picture(width: int, height: int, words: str, parts: Iterable[str]) -> str:
    """An SVG of its own, on paper of its own: it is legible in light and in dark."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    shown = f'role="img" aria-label="{quoted(words)}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {shown}><style>{STYLE}</style>'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([start, paper, *parts, "</svg>\n"])


def _placed(drawn: str, left: int, height: int) -> str:
    """A chart below its title."""
    at = f'<svg x="{left}" y="{TOP}" width="{WIDTH}" height="{height}" '
    return drawn.replace("<svg ", at, 1)


def _panel(evidence: Evidence, way: str, left: int, words: str) -> str:
    """One direction, so far from the left."""
    peers = [name for name in NAMES if name != OURS]
    timings = calls.timings(evidence, peers, (way, "D128", "causal"))
    points = {name: sorted((t.shape.seqlen_q, t.rate(name)) for t in timings) for name in NAMES}
    title = text(left + 8, 18, f"{TITLES[way]}, {words}", "label")
    if not timings:
        return title
    series = [charts.Series(name, of) for name, of in points.items()]
    return title + _placed(charts.lines(series, "TFLOP/s", TITLES[way]), left, HEIGHT)


def _names(width: int) -> list[str]:
    """Whose line is which."""
    step, top = 180, TOP + HEIGHT + 16
    left = (width - step * len(NAMES)) // 2
    found = []
    for n, (name, said) in enumerate(NAMES.items()):
        style, x = style_of(name), left + n * step
        found.append(path([(x, top - 4), (x + 26, top - 4)], f"l {style[0]}", style[2]))
        found.append(mark(style, x + 13, top - 4, "", 3.6) + text(x + 32, top, said))
    return found


def standing(evidence: Evidence) -> str:
    """The ratio to each peer at every dense shape, on each card."""
    found = []
    for peer, way in (("fa3", "fwd"), ("fa3", "bwd"), ("cudnn", "fwd"), ("cudnn", "bwd")):
        for colour, card in zip(COLOURS, _cards(evidence)):
            timings = calls.timings(evidence, [peer], [way, *card])
            figures = [(one.ratios[peer].median, str(one.shape)) for one in timings]
            name = f"{TITLES[way].lower()}, {_short(peer)}, {calls.card(evidence, [], card)}"
            found.append(charts.Strip(name, figures, colour))
    return _strips(found, f"Dense shapes: {BESIDE}")


def decoding(evidence: Evidence) -> str:
    """The ratio to each peer at every step of decoding, on each card."""
    found = []
    for peer, kind in (
        ("fa3", "1 query"),
        ("fa3", "2 to 8"),
        ("fa3", "chunk"),
        ("fa3", "append"),
        ("sdpa", "1 query"),
    ):
        for colour, card in zip(COLOURS, _cards(evidence)):
            ratios = steps.ratios(evidence, peer, card)
            figures = [(value, _said(of)) for of, value in ratios.items() if _kind(of) == kind]
            name = f"{kind}, {_short(peer)}, {calls.card(evidence, [], card)}"
            found.append(charts.Strip(name, figures, colour))
    return _strips(found, f"Decoding: {BESIDE}")


def _cards(evidence: Evidence) -> list[list[str]]:
    """The words for the card that goes without saying, and for the others."""
    first = calls.card(evidence, [], [])
    return [[], *([card] for card in sorted(calls.CARDS) if card != first)]


def _short(peer: str) -> str:
    return {"fa3": "FA3"}.get(peer, PEERS[peer])


def _kind(of: Decode) -> str:
    """Which line a step is in; a mixed step is a chunk's."""
    queries = max(of.seqlen_q, of.chunk)
    if of.appends:
        return "append"
    return "1 query" if queries == 1 else "2 to 8" if queries <= 8 else "chunk"


def _said(of: Decode) -> str:
    return " ".join(sorted(steps.words_of(of)))


def _strips(found: list[charts.Strip], title: str) -> str:
    """A picture of lines around 1; lines without figures are left out."""
    rows = [row for row in found if row.figures]
    heading = text(8, 18, title, "label")
    if not rows:
        return _picture(WIDTH, TOP, title, [heading])
    drawn = charts.strips(rows, title, "time of the peer / time of tilewise")
    height = int(drawn.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
    return _picture(WIDTH, TOP + height, title, [heading, _placed(drawn, 0, height)])


PICTURES: dict[str, Callable[[Evidence], str]] = {
    "speed.svg": speed,
    "standing.svg": standing,
    "decoding.svg": decoding,
}
