"""Pictures of results as PNG, readable in black and white; Matplotlib is the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

MISSING = "a picture needs Matplotlib: install it with `pip install 'tilewise[plot]'`"
STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("x", "--"), ("P", "-.")]
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


class Axes(NamedTuple):
    """What a picture says around its data."""

    title: str
    x: str
    y: str
    is_log: tuple[bool, bool] = (False, False)


def _wanted(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Before anything is measured, not after."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError(MISSING)
    return path


png_option = click.option(
    "--png",
    type=click.Path(dir_okay=False),
    callback=_wanted,
    help="Draw the result there; needs the extra `plot`.",
)


def lines(path: str, axes: Axes, series: Mapping[str, Mapping[float, float]]) -> None:
    """A line a name, through its points."""
    figure, area = _figure(axes)
    for (name, points), (marker, dash) in zip(series.items(), STYLES * len(series)):
        if points:
            area.plot(list(points), list(points.values()), dash, marker=marker, label=name)
    _save(path, figure, area)


def bars(
    path: str, axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]]
) -> None:
    """For each group a bar a name; NaN leaves a gap."""
    figure, area = _figure(axes)
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        at = [group + (place - (len(series) - 1) / 2) * width for group in range(len(groups))]
        hatch = HATCHES[place % len(HATCHES)]
        area.bar(at, list(values), width, label=name, hatch=hatch, edgecolor="black", linewidth=0.5)
    area.margins(y=0.25)  # above the bars, for the legend
    is_long = max(map(len, groups), default=0) * len(groups) > 60
    area.set_xticks(range(len(groups)), groups, rotation=45 if is_long else 0)
    if is_long:
        for label in area.get_xticklabels():
            label.set_horizontalalignment("right")
    _save(path, figure, area)


def roofline(path: str, title: str, roof: Any, points: Mapping[str, float]) -> None:
    """Attainable TFLOP/s over FLOPs a byte, and where each name stands."""
    figure, area = _figure(Axes(title, "FLOPs a byte", "TFLOP/s at most", (True, True)))
    low = min([roof.ridge, *points.values()]) / 8
    high = max([roof.ridge, *points.values()]) * 8
    area.plot([low, roof.ridge, high], [low * roof.bandwidth, roof.tflops, roof.tflops], "k-")
    area.axvline(roof.ridge, color="grey", linestyle=":", label=f"ridge, {roof.ridge:.0f}")
    for (name, at), (marker, _) in zip(points.items(), STYLES * len(points)):
        top = min(roof.tflops, at * roof.bandwidth)
        area.plot([at], [top], marker=marker, linestyle="none", label=f"{name}, {at:.0f}")
    _save(path, figure, area)


def _figure(axes: Axes):
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(7, 4.2))
    area = figure.add_subplot()
    area.set_title(axes.title, fontsize=10)
    area.set_xlabel(axes.x)
    area.set_ylabel(axes.y)
    for is_log, scale, axis in zip(axes.is_log, (area.set_xscale, area.set_yscale), "xy"):
        if is_log:
            scale("log", base=2 if axis == "x" else 10)
            of_axis = area.xaxis if axis == "x" else area.yaxis
            of_axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            of_axis.set_minor_formatter(NullFormatter())
    area.grid(True, alpha=0.3)
    return figure, area


def _save(path: str, figure, area) -> None:
    if area.get_legend_handles_labels()[1]:
        area.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    click.echo(f"picture: {path}", err=True)
