"""How what the store costs grows with what there is: the same measurement at three sizes each, and its slope.

    python deploy/load/growth.py [--only starts,claims] [--sizes 30,100,300] [--png growth.png] [--json growth.json]

The slope is that of cost over size on logarithmic axes: 0 is flat, 1 grows as the size does. Starts its own servers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.curves.archiving import archiving
from deploy.load.curves.claims import claims
from deploy.load.curves.collection import collection
from deploy.load.curves.curve import Curve, Progress
from deploy.load.curves.events import events, unwanted
from deploy.load.curves.first_writes import first_writes
from deploy.load.curves.forgetting import forgetting
from deploy.load.curves.idle import idle
from deploy.load.curves.purging import purging
from deploy.load.curves.refill import refill
from deploy.load.curves.small_sessions import small_sessions
from deploy.load.curves.sql_bytes import (
    encrypted_sql_bytes,
    packed_encrypted_sql_bytes,
    packed_sql_bytes,
    sql_bytes,
)
from deploy.load.curves.starts import starts

MEASURED: dict[str, tuple[Callable[[Sequence[int], Progress], Curve], list[int]]] = {
    "starts": (starts, [30, 100, 300]),
    "claims": (claims, [16, 64, 192]),
    "first": (first_writes, [300, 3_000, 30_000]),
    "small": (small_sessions, [1, 4, 16]),
    "idle": (idle, [20, 80, 320]),
    "sql": (sql_bytes, [300, 1_000, 3_000]),
    "sql-packed": (packed_sql_bytes, [300, 1_000, 3_000]),
    "sql-encrypted": (encrypted_sql_bytes, [300, 1_000, 3_000]),
    "sql-encrypted-packed": (packed_encrypted_sql_bytes, [300, 1_000, 3_000]),
    "archive": (archiving, [20, 200, 2_000]),
    "purge": (purging, [10_000, 40_000, 160_000]),
    "forget": (forgetting, [100, 300, 1_000]),
    "collection": (collection, [1_000, 10_000, 100_000]),
    "refill": (refill, [1_000, 10_000, 100_000]),
    "events": (events, [10, 100, 500]),
    "unwanted": (unwanted, [10, 100, 500]),
}


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Each on logarithmic axes, with its goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for axes, curve in zip(every[0], curves, strict=True):
        axes.loglog(curve.sizes, curve.costs, marker="o", color="#2a7f62" if curve.reached else "#b3392f")
        axes.axhline(curve.goal, color="#444444", linestyle="--", linewidth=1)
        axes.set_title(f"{curve.name}\nslope {curve.slope:.2f}", fontsize=10)
        axes.set_xlabel(curve.of)
        axes.set_ylabel(curve.unit)
        axes.set_ylim(bottom=min([*curve.costs, curve.goal]) / 2, top=max([*curve.costs, curve.goal]) * 2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _given(only: str, sizes: str) -> Iterator[tuple[str, list[int]]]:
    names = only.split(",") if only else list(MEASURED)
    if unknown := set(names) - MEASURED.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(MEASURED)}")
    try:
        wanted = sorted({int(each) for each in sizes.split(",")}) if sizes else []
    except ValueError:
        raise typer.BadParameter(f"sizes are numbers, as 30,100,300, not {sizes!r}") from None
    if wanted and wanted[0] < 1:
        raise typer.BadParameter("a size is at least 1")
    for name in names:
        yield name, wanted or MEASURED[name][1]


def main(
    only: Annotated[str, typer.Option(help=f"of {', '.join(MEASURED)}, with commas between")] = "",
    sizes: Annotated[str, typer.Option(help="instead of those of each measurement, with commas between")] = "",
    png: Annotated[Path | None, typer.Option(help="write the curves as a picture")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the curves as JSON")] = None,
) -> None:
    """Measure how costs grow. Exits 1 if a cost at the largest size is beyond its goal."""
    console, said = Console(), Console(stderr=True)
    curves = []
    with said.status("") as status:
        for name, wanted in _given(only, sizes):
            curves.append(MEASURED[name][0](wanted, status.update))
    table = Table("what", "at", "costs", "slope", "goal", "")
    for curve in curves:
        costs = " / ".join(f"{each:.3g}" for each in curve.costs)
        at = f"{' / '.join(map(str, curve.sizes))} {curve.of}"
        verdict = "ok" if curve.reached else "MISSED"
        table.add_row(curve.name, at, f"{costs} {curve.unit}", f"{curve.slope:.2f}", f"<= {curve.goal:g}", verdict)
    console.print(table)
    if as_json:
        as_json.write_text(json.dumps([asdict(each) | {"slope": each.slope} for each in curves], indent=1) + "\n")
    if png:
        plot(curves, png)
    sys.exit(0 if all(each.reached for each in curves) else 1)


if __name__ == "__main__":
    typer.run(main)
