"""Pictures of results as PNG, readable in black and white; Matplotlib is the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..errors import missing
from .options import NewFile

STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("x", "--"), ("P", "-.")]


class Axes(NamedTuple):
    """What a picture says around its data."""

    title: str
    x: str
    y: str
    is_log: tuple[bool, bool] = (False, False)


def _wanted(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Before anything is measured, not after."""
    if path is not None and (reason := missing("a picture", ["matplotlib"])):
        raise click.UsageError(reason)
    return path


png_option = click.option(
    "--png",
    type=NewFile(dir_okay=False),
    callback=_wanted,
    help="Draw the result to this file; needs the extra `plot`.",
)


def roofline(path: str, title: str, roof: Any, points: Mapping[str, float]) -> None:
    """Attainable TFLOP/s over FLOPs a byte, and where each name stands."""
    area = drawn_area(Axes(title, "FLOPs a byte", y="TFLOP/s at most", is_log=(True, True)))
    low = min([roof.ridge, *points.values()]) / 8
    high = max([roof.ridge, *points.values()]) * 8
    area.plot([low, roof.ridge, high], [low * roof.bandwidth, roof.tflops, roof.tflops], "k-")
    area.axvline(roof.ridge, color="grey", linestyle=":", label=f"ridge, {roof.ridge:.0f}")
    for (name, x), (marker, _) in zip(points.items(), STYLES * len(points)):
        area.plot([x], [roof.most(x)], marker=marker, linestyle="none", label=f"{name}, {x:.0f}")
    save(path, area)


def drawn_area(axes: Axes) -> Any:
    """Matplotlib's axes of a new figure, with title, labels and a grid."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    area = Figure(figsize=(7, 4.2)).add_subplot()
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
    return area


def save(path: str, area: Any) -> None:
    """The figure of these axes as a PNG, with a legend if something has a name."""
    if area.get_legend_handles_labels()[1]:
        area.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    area.figure.savefig(path, dpi=140, bbox_inches="tight")
    click.echo(f"picture: {path}", err=True)
