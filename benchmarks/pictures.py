"""Results as PNG: a line or bars a name, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.cli.picture import STYLES, Axes, drawn_area, save

HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def lines(path: str, axes: Axes, series: Mapping[str, Mapping[float, float]]) -> None:
    """A line a name, through its points."""
    area = drawn_area(axes)
    for (name, points), (marker, dash) in zip(series.items(), STYLES * len(series)):
        if points:
            area.plot(list(points), list(points.values()), dash, marker=marker, label=name)
    save(path, area)


def bars(
    path: str, axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> None:
    """For each group a bar a name; None leaves a gap."""
    area = drawn_area(axes)
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        at = [group + (place - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [float("nan") if value is None else value for value in values]
        hatch = HATCHES[place % len(HATCHES)]
        area.bar(at, heights, width, label=name, hatch=hatch, edgecolor="black", linewidth=0.5)
    area.margins(y=0.25)  # above the bars, for the legend
    is_long = max(map(len, groups), default=0) * len(groups) > 60
    area.set_xticks(range(len(groups)), groups, rotation=45 if is_long else 0)
    if is_long:
        for label in area.get_xticklabels():
            label.set_horizontalalignment("right")
    save(path, area)
