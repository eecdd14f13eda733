"""How what the store costs grows with what there is: the same measurement at three sizes each, and its slope.

    python deploy/load/growth.py [--only starts,claims] [--sizes 30,100,300] [--json growth.json] [--png growth.png]
    python deploy/load/growth.py --sizing growth.json [--into docs/running/sizing.md]

The slope is that of cost over size on logarithmic axes: 0 is flat, 1 grows as the size does. Starts its own servers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.curves import sizing
from deploy.load.curves.archiving import archiving
from deploy.load.curves.beside import beside_compact, beside_purge
from deploy.load.curves.claims import claims
from deploy.load.curves.collection import collection
from deploy.load.curves.curve import Curve, Measure, short
from deploy.load.curves.events import events, unwanted
from deploy.load.curves.first_writes import first_writes
from deploy.load.curves.forgetting import forgetting
from deploy.load.curves.holders import holders
from deploy.load.curves.idle import idle
from deploy.load.curves.many_items import many_items
from deploy.load.curves.picture import plot
from deploy.load.curves.purging import compacting, purging
from deploy.load.curves.reads import reads
from deploy.load.curves.refill import refill
from deploy.load.curves.small_sessions import small_sessions
from deploy.load.curves.sql_bytes import (
    encrypted_sql_bytes,
    packed_encrypted_sql_bytes,
    packed_sql_bytes,
    sql_bytes,
)
from deploy.load.curves.sqlite_archiving import sqlite_archiving
from deploy.load.curves.starts import starts
from deploy.load.curves.stored import Stored, merged, setting
from deploy.load.curves.tagged import tagged
from deploy.load.curves.wal import wal
from deploy.load.curves.warm_bytes import warm_bytes

MEASURED: dict[str, tuple[Measure, list[int]]] = {
    "starts": (starts, [30, 100, 300]),
    "claims": (claims, [16, 64, 192]),
    "first": (first_writes, [300, 3_000, 30_000]),
    "items": (many_items, [10, 1_000, 10_000]),
    "small": (small_sessions, [1, 4, 16]),
    "redis": (warm_bytes, [200, 2_000, 20_000]),
    "idle": (idle, [80, 320, 1_000]),
    "sql": (sql_bytes, [300, 1_000, 3_000]),
    "sql-packed": (packed_sql_bytes, [300, 1_000, 3_000]),
    "sql-encrypted": (encrypted_sql_bytes, [300, 1_000, 3_000]),
    "sql-encrypted-packed": (packed_encrypted_sql_bytes, [300, 1_000, 3_000]),
    "archive": (archiving, [20, 200, 2_000]),
    "archive-sqlite": (sqlite_archiving, [20, 200, 2_000]),
    "wal": (wal, [20, 200, 2_000]),
    "purge": (purging, [10_000, 40_000, 160_000]),
    "compact": (compacting, [10_000, 40_000, 160_000]),
    "purge-beside": (beside_purge, [20_000, 60_000, 160_000]),
    "compact-beside": (beside_compact, [20_000, 60_000, 160_000]),
    "reads": (reads, [3_000, 10_000, 30_000]),
    "tags": (tagged, [300, 3_000, 30_000]),
    "forget": (forgetting, [100, 300, 1_000]),
    "collection": (collection, [1_000, 10_000, 100_000]),
    "refill": (refill, [1_000, 10_000, 100_000]),
    "events": (events, [10, 100, 500]),
    "unwanted": (unwanted, [10, 100, 500]),
    "holders": (holders, [10, 100, 300]),
}


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


def _report(curves: Iterable[Curve]) -> bool:
    """Print them; whether every goal is reached."""
    table = Table("what", "at", "costs", "slope", "goal", "")
    missed = False
    for curve in curves:
        costs = " / ".join(map(short, curve.costs))
        at = f"{' / '.join(map(str, curve.sizes))} {curve.of}"
        verdict = "ok" if curve.reached else "MISSED"
        missed |= not curve.reached
        table.add_row(curve.name, at, f"{costs} {curve.unit}", f"{curve.slope:.2f}", f"<= {short(curve.goal)}", verdict)
    Console().print(table)
    return not missed


def _size(path: Path, document: Path | None) -> None:
    """Print the table for sizing, or write it into a document."""
    try:
        stored = Stored.read(path)
        if document:
            sizing.write(stored, document)
        else:
            print(sizing.sizing(stored))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def main(
    only: Annotated[str, typer.Option(help=f"of {', '.join(MEASURED)}, with commas between")] = "",
    sizes: Annotated[str, typer.Option(help="instead of those of each measurement, with commas between")] = "",
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the curves as JSON; what the file has of others stays")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="write them as a picture, with those that the JSON has")] = None,
    table_of: Annotated[
        Path | None, typer.Option("--sizing", help="measure nothing; print the table for sizing of this JSON")
    ] = None,
    into: Annotated[Path | None, typer.Option(help="with --sizing: write it into this document instead")] = None,
) -> None:
    """Measure how costs grow. Exits 1 if a cost at the largest size is beyond its goal."""
    if table_of:
        return _size(table_of, into)
    if into:
        raise typer.BadParameter("--into is for the table of --sizing")
    measured = Stored(setting(), {})
    with Console(stderr=True).status("") as status:
        for name, wanted in _given(only, sizes):
            found = MEASURED[name][0](wanted, status.update)
            measured.curves[name] = found if isinstance(found, list) else [found]
            if as_json:  # at once: the whole takes long, and what was measured is not lost with what was not
                merged(as_json, measured, list(MEASURED)).write(as_json)
    reached = _report(measured.all)
    if png:
        plot((Stored.read(as_json) if as_json else measured).all, png)
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    typer.run(main)
