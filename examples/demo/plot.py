"""The picture: memory and time against length, on log axes, where powers are straight lines."""

from __future__ import annotations

from pathlib import Path

from .lengths import Grown, Point

# Okabe and Ito's colours, distinct in any colour vision; markers and dashes say it again.
LOOKS = {
    "standard": dict(color="#D55E00", marker="s", label="standard attention"),
    "sdpa": dict(color="#0072B2", marker="^", label="torch SDPA", linestyle=(0, (4, 2)), zorder=6),
    "tilewise": dict(
        color="#009E73", marker="o", label="tilewise", linewidth=3.4, markersize=9, zorder=5
    ),
}


def draw(grown: Grown, path: Path) -> Path:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (memory, time) = pyplot.subplots(1, 2, figsize=(11.5, 5), layout="constrained")
        figure.suptitle(grown.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        draw_panel(memory, grown.points, "peak_mib", "MiB beyond the inputs", "Memory")
        draw_panel(time, grown.points, "ms", "milliseconds", "Time")
        add_guide(memory, of(grown, "standard"), "peak_mib", 2, "O(N²)", lift=1.8)
        leanest = min(("sdpa", "tilewise"), key=lambda name: of(grown, name)[-1].peak_mib)
        add_guide(memory, of(grown, leanest), "peak_mib", 1, "O(N)", lift=0.5)
        fastest = min(("sdpa", "tilewise"), key=lambda name: of(grown, name)[-1].ms)
        add_guide(time, of(grown, fastest), "ms", 2, "O(N²)", lift=0.5)
        add_gap(memory, grown)
        for axes in (memory, time):
            low, high = axes.get_ylim()
            axes.set_ylim(low, high * 2)
            axes.set_xlim(200, max(point.seqlen for point in grown.points) * 1.8)
        memory.legend(frameon=False, loc="upper left")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return path


def of(grown: Grown, name: str) -> list[Point]:
    """One attention's points."""
    return [point for point in grown.points if point.provider == name]


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


def add_guide(axes, points: list[Point], field: str, power: int, label: str, lift: float) -> None:
    """A dotted line of slope `power` beside the end of a curve, `lift` times as high."""
    if len(points) < 2:
        return
    last, first = points[-1], points[-min(len(points), 4)]
    end = getattr(last, field) * lift
    start = end * (first.seqlen / last.seqlen) ** power
    axes.plot([first.seqlen, last.seqlen], [start, end], ":", color="#666666", linewidth=1.4)
    axes.annotate(
        label,
        (last.seqlen, end),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color="#444444",
    )


def add_gap(axes, grown: Grown) -> None:
    """An arrow from tilewise to standard attention at the last length that both could do."""
    both = grown.largest_common()
    low, high = both["tilewise"].peak_mib, both["standard"].peak_mib
    seqlen = both["standard"].seqlen
    arrow = dict(arrowstyle="<->", color="#222222", shrinkA=6, shrinkB=6)
    axes.annotate("", (seqlen, low), (seqlen, high), arrowprops=arrow)
    axes.annotate(
        f"{high / low:.0f}× less",
        (seqlen, (low * high) ** 0.5),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontweight="bold",
    )
    if seqlen < max(point.seqlen for point in grown.points):
        axes.annotate(
            "longer: its scores\ndo not fit",
            (seqlen, high),
            xytext=(9, -2),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=LOOKS["standard"]["color"],
        )


def tick(length: int) -> str:
    """256, 1k, 16k."""
    return f"{length // 1024}k" if length >= 1024 else str(length)
