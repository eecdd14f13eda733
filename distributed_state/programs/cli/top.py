"""The screen of `top`, repeated in a terminal. Law: text from the store is escaped, and cut to fit."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

import distributed_state
from distributed_state.errors import StateError
from distributed_state.port.background import finish
from distributed_state.programs.cli.shell import printable
from distributed_state.store.fleet import FleetLooks, Overview, ReplicaRates
from distributed_state.store.lifecycle import core_of, lifecycle_of

_SAMPLE = 0.25  # seconds between two looks at the ends of the journals
_OLD = 10.0  # seconds that a commit waits for SQL before it is shown in red
_SILENT = 10.0  # seconds without a heartbeat before a replica is shown in red
_FRAME = 9  # lines of the screen besides the rows of its tables


class Watched:
    """A store's fleet, observed every `interval` seconds."""

    def __init__(self, store: distributed_state.StateStore, interval: float) -> None:
        core = core_of(store)
        self._watch = FleetLooks(lifecycle_of(core).tiers())
        self._namespace = core.settings.namespace
        self._interval = interval

    def once(self) -> Overview:
        """Look twice, an interval apart, and return the second overview. Raises WarmUnavailable."""
        finish(self._watch.look())
        self._wait()
        return finish(self._watch.look())

    def live(self, console: Console) -> None:
        """Show the fleet until Ctrl-C."""
        logging.disable(logging.ERROR)  # log lines would break the screen, which shows which server is unavailable
        seen: Overview | None = None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    seen, away = finish(self._watch.look()), ""
                except StateError as error:
                    away = str(error)
                live.update(self.shown(seen, away, rows=max(2, console.height - _FRAME)), refresh=True)
                self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + self._interval
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SAMPLE))
            try:
                finish(self._watch.sample())
            except StateError:
                return  # the next look reports it

    def shown(self, seen: Overview | None, away: str = "", *, rows: int) -> RenderableType:
        """One screen. If `away` says why Redis does not answer, the last overview is shown and marked as old."""
        head = Text.assemble(("distributed-state top", "bold"), f"  namespace {printable(self._namespace)}  ")
        head.append(time.strftime("%H:%M:%S"), style="dim")
        parts: list[RenderableType] = [head]
        if away:
            parts.append(
                Text(f"Redis does not answer; the figures below are the last ones seen: {printable(away)}", style="red")
            )
        if seen is None:
            return Group(*parts)
        if seen.trouble:
            parts.append(Text(printable(seen.trouble), style="red", no_wrap=True, overflow="ellipsis"))
        most = max(1, min(len(seen.replicas), rows * 2 // 3))
        total = round((seen.commits or 0.0) * (seen.seconds or 0.0))
        sample = f"Busiest records, from a sample of {seen.sampled} of {total} commits"
        parts += [_totals(seen), Text(), Text("Replicas, the slowest first", style="bold"), _replicas(seen, most)]
        parts += [Text(), Text(sample, style="bold"), _busiest(seen, max(1, rows - most))]
        return Group(*parts)


def fields(seen: Overview) -> dict[str, Any]:
    """An overview as JSON."""
    replicas = [asdict(each) | {"role": each.replica.role} for each in seen.replicas]
    return asdict(seen) | {"replicas": replicas, "busiest": [list(each) for each in seen.busiest]}


def _totals(seen: Overview) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{_number(seen.commits)} commits/s", style="bold green")
    text.append(f"   {_number(seen.archived)} archived/s   {len(seen.replicas)} replicas   ")
    late = "bold red" if seen.oldest > _OLD or seen.fullest > 0.5 else ""
    lag = (
        f"{seen.waiting} unarchived commits, the oldest {seen.oldest:.1f} s old"
        if seen.waiting
        else "all commits archived"
    )
    text.append(f"{lag}; fullest journal {seen.fullest:.0%}", style=late)
    return text


def _replicas(seen: Overview, rows: int) -> Table:
    columns = [
        "replica",
        "host",
        "pid",
        "role",
        "seen",
        "load",
        "ops/s",
        "mean",
        "slow",
        "hot/s",
        "archived/s",
        "events",
    ]
    table = Table(*(Column(each, no_wrap=True, overflow="ellipsis") for each in columns), box=None, pad_edge=False)
    ordered = sorted(seen.replicas, key=_slowness)
    for each in ordered[:rows]:
        table.add_row(*_row(each))
    if len(ordered) > rows:
        table.caption, table.caption_justify = f"and {len(ordered) - rows} more", "left"
    return table


def _slowness(each: ReplicaRates) -> tuple[bool, float]:
    """Sort archivers last: their operations are batches, which take longer than a turn's commit."""
    return each.replica.role == "archiver", -(each.milliseconds or 0.0)


def _row(each: ReplicaRates) -> list[Text]:
    replica = each.replica
    waiting = replica.stats.get("events_waiting", 0)
    texts = [
        replica.id,
        replica.host,
        str(replica.pid),
        replica.role,
        f"{replica.seen:.0f} s ago",
        f"{replica.load:.2f}",
    ]
    mean = "-" if each.milliseconds is None else f"{each.milliseconds:.1f} ms"
    texts += [_number(each.operations), mean, "-" if each.slow is None else str(each.slow)]
    texts += [_number(each.hot), _number(each.archived), f"{waiting} wait" if waiting else "-"]
    bad = replica.seen > _SILENT or replica.archiving or each.slow
    return [Text(printable(text), style="red" if bad else "") for text in texts]


def _busiest(seen: Overview, rows: int) -> Table:
    table = Table(
        Column("record", no_wrap=True, overflow="ellipsis", ratio=1), "share", "about", box=None, pad_edge=False
    )
    for record, count in seen.busiest[:rows]:
        share = count / seen.sampled
        table.add_row(Text(printable(record)), f"{share:.0%}", f"{_number(share * (seen.commits or 0.0))}/s")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
