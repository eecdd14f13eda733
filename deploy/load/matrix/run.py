"""Runs one cell: servers, workers, the fault, what is there afterwards. Law: a cell ends with all that it started.

Both the matrix and the soak are made of this.
"""

from __future__ import annotations

import random
import re
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.load.matrix import events_judge, judge
from deploy.load.matrix.audit import Audit, audit
from deploy.load.matrix.cells import Cell
from deploy.load.matrix.histories import now
from deploy.load.matrix.judge import Tally
from deploy.load.matrix.proxy import Network
from deploy.load.matrix.scene import Scene, binary_with_clock, database
from deploy.load.matrix.topology import topology
from deploy.load.matrix.workers import Interrupted, Said, Workers
from distributed_state.programs.servers import PostgresServer, redis_binary

PARTITIONS = 4
MAX_STALENESS = 1.0
_WENT_ON = 20.0
_HEARD = 10.0
_DETECTED = re.compile(r"partition \d+.*(fit|lost|diverg|epoch|data id|older|empt)", re.IGNORECASE)


@dataclass(slots=True)
class Outcome:
    """What one cell came to. `levels` by name; `not_reached`: levels that nothing could be acknowledged at, and why."""

    cell: Cell
    levels: dict[str, Tally] = field(default_factory=dict)
    not_reached: dict[str, str] = field(default_factory=dict)
    detected: list[str] = field(default_factory=list)
    unread: int = 0
    missed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """The longest time without an acknowledged write, at any level."""
        return max((tally.gap for tally in self.levels.values()), default=0.0)

    def count(self, what: str) -> int:
        """The sum of one column over the levels."""
        found = (getattr(tally, what) for tally in self.levels.values())
        return sum(each if isinstance(each, int) else len(each) for each in found)

    @property
    def errors(self) -> int:
        """What users saw: writes that raised, and reads."""
        return self.unread + sum(tally.errors.total() for tally in self.levels.values())


class Lane:
    """Where cells run one after the other: a folder, and a PostgreSQL that those share that leave it whole."""

    def __init__(self, folder: Path, stop: threading.Event) -> None:
        self.folder = folder
        self.stop = stop
        self._stack = ExitStack()
        self._sql: PostgresServer | None = None

    @contextmanager
    def sql(self, kind: str, folder: Path) -> Iterator[PostgresServer]:
        """The shared one, or one for this cell alone."""
        if kind != "shared":
            with database(folder / "sql", small=kind == "small") as own:
                yield own
            return
        if self._sql is None:
            self._sql = self._stack.enter_context(database(self.folder / "sql"))
        yield self._sql
        self._sql.start()

    def close(self) -> None:
        """End it."""
        self._stack.close()


def run(cell: Cell, lane: Lane, seconds: float, seed: int) -> Outcome:
    """Run a cell for about so many seconds, beside what the fault takes. Raises Interrupted at the lane's stop."""
    outcome = Outcome(cell)
    began = now()
    folder = lane.folder / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # PostgreSQL may run as another user
    try:
        with ExitStack() as stack:
            scene = _scene(stack, cell, lane, folder, seconds * cell.stretch, seed)
            _run(outcome, scene)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a cell that breaks is a cell that missed; the others go on
        outcome.missed.append(f"the cell broke: {type(error).__name__}: {' '.join(str(error).split())[-400:]}")
    outcome.seconds = now() - began
    return outcome


def _scene(stack: ExitStack, cell: Cell, lane: Lane, folder: Path, seconds: float, seed: int) -> Scene:
    server_clock, worker_clock = folder / "server-clock", folder / "worker-clock"
    clocks = any(each.clocks for each in cell.faults)
    binary = binary_with_clock(server_clock) if clocks else redis_binary()
    network = stack.enter_context(Network(seed))
    warm = stack.enter_context(topology(cell.topology, cell.options, folder / "warm", network, binary))
    sql = stack.enter_context(lane.sql(cell.sql, folder))
    settings: dict[str, Any] = {
        "url": warm.url, "archive": sql.url, "namespace": f"m{folder.name}", "partitions": PARTITIONS,
        "archive_every": 0.05, "timeout": 2.0, "retry_for": 10.0, "max_staleness": MAX_STALENESS,
    } | cell.settings  # fmt: skip
    workers = Workers(
        folder, settings, cell.levels, records=cell.records, tasks=cell.tasks, stop=lane.stop,
clock=worker_clock,
    )  # fmt: skip
    stack.enter_context(workers)
    chance = random.Random(seed)
    return Scene(warm, sql, workers, network, folder, chance, stack, server_clock, worker_clock, seconds, settings)


def _run(outcome: Outcome, scene: Scene) -> None:
    workers, cell = scene.workers, outcome.cell
    workers.start()
    if cell.at_once:
        struck, over = _strike(scene, cell)
    else:
        moments = [_strike(scene, Cell((each,), cell.topology)) for each in cell.faults]
        struck, over = moments[0][0], moments[-1][1]
    reached = [level for level in workers.levels() if workers.acknowledged_since(level, 0.0)]
    workers.until(lambda: all(workers.acknowledged_since(level, over) for level in reached), _WENT_ON)
    went_on = {level for level in reached if workers.acknowledged_since(level, over)}
    scene.rest(scene.seconds / 4)
    ended = now()
    workers.stop()
    records = [f"{level}/{number}" for level in workers.levels() for number in range(cell.records)]
    found = audit(scene.settings, records, scene.warm.primaries())
    outcome.levels = judge.tallies(workers.said.writes, workers.said.reads, found.found, max_staleness=MAX_STALENESS)
    for level, tally in outcome.levels.items():
        ends = [each.end for each in workers.said.writes if each.version and each.level == level]
        tally.gap = judge.longest_gap(ends, struck, ended)
        tally.went_on = level in went_on or level not in reached
    workers.until(lambda: not _unheard(workers.said, workers.dead, found), _HEARD)
    _conclude(outcome, scene, found, reached)


def _strike(scene: Scene, cell: Cell) -> tuple[float, float]:
    """Let the workers work, and the faults strike; when they began and ended."""
    scene.rest(scene.seconds / 4)
    for fault in cell.faults:
        if fault.prepare is not None:
            fault.prepare(scene)
    scene.rest(scene.seconds / 4)
    struck = now()
    with ThreadPoolExecutor(len(cell.faults)) as pool:
        for strike in [pool.submit(fault.strike, scene) for fault in cell.faults]:
            strike.result()
    return struck, now()


def _conclude(outcome: Outcome, scene: Scene, found: Audit, reached: list[str]) -> None:
    workers, cell = scene.workers, outcome.cell
    said = workers.said
    logs = workers.logs()
    outcome.unread = said.unread
    outcome.not_reached = dict(said.refused)
    for level in workers.levels():
        if level not in reached:
            errors = outcome.levels[level].errors.most_common(1)
            outcome.not_reached[level] = f"nothing was acknowledged: {errors[0][0] if errors else 'no answer'}"
    outcome.detected = list(_detected(found, logs, said.heard))
    report = "\n".join([logs, *found.advice])
    for level, tally in outcome.levels.items():
        outcome.missed += judge.missed(tally, level, cell.required, workers.dead, report)
    outcome.missed += _unheard(said, workers.dead, found)
    if found.undrained:
        outcome.missed.append(f"archiving does not end: {found.undrained}")


def _unheard(said: Said, dead: set[str], found: Audit) -> list[str]:
    return list(events_judge.amiss(list(said.emitted), said.heard, dead, found.events))


def _detected(found: Audit, logs: str, heard: dict[str, Any]) -> Iterator[str]:
    if found.epochs:
        yield "epoch"
    if any("partition" in each for each in found.advice):
        yield "doctor"
    if _DETECTED.search(logs):
        yield "log"
    if any("resync" in each for events in heard.values() for each in events):
        yield "resync"
