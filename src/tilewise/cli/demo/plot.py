"""The picture: memory and time against length, on log axes, where powers are straight lines."""

from __future__ import annotations

from pathlib import Path

from .lengths import Grown, Point

# Okabe and Ito's colours, told apart by every kind of sight; markers and dashes say it again.
LOOKS = {
    "standard": dict(color="#D55E00", marker="s", label="standard attention"),
    "sdpa": dict(color="#0072B2", marker="^", label="torch SDPA", linestyle=(0, (4, 2))),
    "tilewise": dict(color="#009E73", marker="o", label="tilewise", linewidth=2.6, zorder=5),
}


def draw(grown: Grown, path: Path) -> Path:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, (memory, time) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
        figure.suptitle(grown.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        draw_panel(memory, grown.points, "peak_mib", "MiB beyond the inputs", "Memory")
        draw_panel(time, grown.points, "ms", "milliseconds", "Time")
        add_guide(memory, grown.points, "peak_mib", "tilewise", 1, "O(N)")
        add_guide(memory, grown.points, "peak_mib", "standard", 2, "O(N²)")
        add_guide(time, grown.points, "ms", "tilewise", 2, "O(N²)")
        memory.legend(frameon=False, loc="upper left")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return path


def draw_panel(axes, points: list[Point], field: str, unit: str, title: str) -> None:
    """One quantity of every attention."""
    for name, look in LOOKS.items():
        mine = [point for point in points if point.provider == name]
        if mine:
            look = {"linewidth": 1.8, "markersize": 6, "markeredgecolor": "white", **look}
            axes.plot([p.seqlen for p in mine], [getattr(p, field) for p in mine], **look)
    lengths = sorted({point.seqlen for point in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [tick(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("sequence length N (tokens)")
    axes.set_ylabel(unit)


def add_guide(axes, points: list[Point], field: str, name: str, power: int, label: str) -> None:
    """A dotted line of slope `power` beside the last of a curve."""
    mine = [point for point in points if point.provider == name]
    if len(mine) < 2:
        return
    last, first = mine[-1], mine[-min(len(mine), 4)]
    lift = 1.7
    end = getattr(last, field) * lift
    start = end * (first.seqlen / last.seqlen) ** power
    axes.plot([first.seqlen, last.seqlen], [start, end], ":", color="#666666", linewidth=1.4)
    axes.annotate(
        label,
        (last.seqlen, end),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color="#444444",
    )


def tick(length: int) -> str:
    """256, 1k, 16k."""
    return f"{length // 1024}k" if length >= 1024 else str(length)
