"""How what the store costs grows with what there is: the same measurement at three sizes each, and its slope.

    python deploy/load/growth.py [--only starts,claims] [--sizes 30,100,300] [--png growth.png] [--json growth.json]

The slope is that of cost over size on logarithmic axes: 0 is flat, 1 grows as the size does. Starts its own Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import redis
import typer
from rich.console import Console
from rich.table import Table

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.servers import redis_server
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref

_PARTITIONS = 64


def _one_each() -> list[str]:
    """Ids of sessions, one in each partition."""
    keys = Keys("default", _PARTITIONS)
    found: dict[int, str] = {}
    for number in itertools.count():
        found.setdefault(keys.partition_of(Ref("session", f"s{number}").text), f"s{number}")
        if len(found) == _PARTITIONS:
            return list(found.values())
    raise AssertionError("there are ids without end")


@dataclass(frozen=True)
class Curve:
    """One cost at several sizes; `goal` is the highest that it may be at the largest."""

    name: str
    unit: str
    of: str
    sizes: list[int]
    costs: list[float]
    goal: float

    @property
    def slope(self) -> float:
        """By least squares, of the logarithms; 0 with one size."""
        xs, ys = [list(map(math.log, values)) for values in (self.sizes, self.costs)]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((each - x) ** 2 for each in xs)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0

    @property
    def reached(self) -> bool:
        """Whether the cost at the largest size is within the goal."""
        return self.costs[-1] <= self.goal


def _start(archive: str, ids: Sequence[str]) -> float:
    """Seconds to open an embedded store, and to write to these sessions."""
    began = time.perf_counter()
    with StateStore.open(archive=archive, partitions=_PARTITIONS) as store:
        for id in ids:
            store.session(id).set("n", 1)
        return time.perf_counter() - began


def starts(sizes: Sequence[int], progress: Callable[[str], None]) -> Curve:
    """What a start of an embedded store takes that was started so often before: the median of five."""
    costs, ids = [], _one_each()
    with tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        taken: list[float] = []
        for size in sizes:
            while len(taken) < size:
                taken.append(_start(f"sqlite:///{folder}/state.db", ids))
                progress(f"start {len(taken)} of {sizes[-1]}")
            costs.append(sorted(taken[-5:])[len(taken[-5:]) // 2])
    return Curve("open and touch 64 partitions", "s", "embedded starts", list(sizes), costs, 0.5)


async def _claims(url: str, archive: str, members: int, seconds: float) -> float:
    """Scripts a second and replica, of replicas that archive and have nothing to do."""

    def calls() -> int:
        with redis.Redis.from_url(url) as client:
            stats = client.info("commandstats")
        return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)

    stores = [
        await AsyncStateStore.open(url, archive=archive, namespace=f"g{members}", max_staleness=0)
        for _ in range(members)
    ]
    try:
        await asyncio.sleep(12)  # each has its share by then
        before = calls()
        await asyncio.sleep(seconds)
        return (calls() - before) / seconds / members
    finally:
        await asyncio.gather(*(store.close() for store in stores))


def claims(sizes: Sequence[int], progress: Callable[[str], None], *, seconds: float = 10.0) -> Curve:
    """What replicas at rest send."""
    costs = []
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        for size in sizes:
            progress(f"{size} replicas at rest")
            archive = f"sqlite:///{folder}/{size}.db"
            costs.append(asyncio.run(_claims(server.url, archive, size, seconds)))
    return Curve("scripts a second, each replica at rest", "/s", "replicas", list(sizes), costs, 2.0)


MEASURED: dict[str, tuple[Callable[[Sequence[int], Callable[[str], None]], Curve], list[int]]] = {
    "starts": (starts, [30, 100, 300]),
    "claims": (claims, [16, 64, 192]),
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
