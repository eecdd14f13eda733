"""All curves in one picture, on a grid. Law: both axes are logarithmic, and the goal is in sight."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.load.curves.curve import Curve, short

_COLUMNS = 4
_INCHES = (4.2, 3.2)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture."""
    placed(curves).savefig(path, dpi=90)


def placed(curves: Sequence[Curve]) -> Any:
    """The figure: green is a curve whose goal is reached at the largest size, the dashed line is the goal."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(_INCHES[0] * columns, _INCHES[1] * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, curve in zip(places, curves, strict=False):
        _draw(axes, curve)
    for axes in places[len(curves) :]:
        axes.set_axis_off()
    return figure


def _draw(axes: Any, curve: Curve) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.loglog(curve.sizes, curve.shown, marker="o", color="#2a7f62" if curve.reached else "#b3392f")
    axes.axhline(curve.goal, color="#444444", linestyle="--", linewidth=1)
    title = textwrap.fill(curve.name, 40)
    axes.set_title(f"{title}\nslope {curve.slope:.2f}, goal {short(curve.goal)}", fontsize=10)
    axes.set_xlabel(curve.of, fontsize=9)
    axes.set_ylabel(curve.unit, fontsize=9)
    low, high = min([*curve.shown, curve.goal]), max([*curve.shown, curve.goal])
    axes.set_ylim(bottom=low / 2, top=high * 2)
    axes.set_xticks(curve.sizes, [f"{size:,}" for size in curve.sizes], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", labelsize=8)
    for size, cost, shown in zip(curve.sizes, curve.costs, curve.shown, strict=True):
        axes.annotate(short(cost), (size, shown), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(x=0.15)
