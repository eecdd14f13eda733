"""What is broken during a run. Law: every fault is ended, and when it began and ended is noted."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LASTS = 3.0
KINDS = ("kill-worker", "kill-handler", "roll", "stop-redis", "pause-postgres", "kill-primary", "failover", "reshard")
WARM_KINDS = ("single", "sentinel", "cluster")
# What a fault needs; the others do everywhere.
ONLY_ON = {"failover": ("sentinel", "cluster"), "reshard": ("cluster",)}
# Replication is asynchronous: a primary that is replaced takes along what no replica had yet. Writers put it back, but
# not one that was killed as well.
REPLACES_A_PRIMARY = ("kill-primary", "failover")


class Breakable(Protocol):
    """A fleet whose parts can be broken.

    What replaces a primary returns when the new one was elected, by time.monotonic(), or None if none was.
    """

    warm_kind: str

    def kill_worker(self) -> None: ...
    def kill_handler(self) -> None: ...
    def roll(self) -> None: ...
    def stop_redis(self, seconds: float) -> None: ...
    def pause_postgres(self, seconds: float) -> None: ...
    def kill_primary(self, seconds: float) -> float | None: ...
    def failover(self) -> float | None: ...
    def reshard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen so many seconds after the beginning of the load."""

    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class Broke:
    """What happened, in seconds from the start of the run; `over` is None if it could not be ended.

    `elected` is when another primary stood in, None if that is not what the fault is about.
    """

    kind: str
    began: float
    over: float | None
    error: str = ""
    elected: float | None = None


def check(kinds: Sequence[str], warm: str) -> None:
    """Raise ValueError for a fault that this warm tier cannot have."""
    for kind in kinds:
        if warm not in ONLY_ON.get(kind, WARM_KINDS):
            raise ValueError(f"{kind!r} needs --warm {' or '.join(ONLY_ON[kind])}: this warm tier is {warm}")


def may_lose(broke: Sequence[Broke], warm: str) -> bool:
    """Whether acknowledged turns may be gone, with a primary that was replaced and a worker that was killed."""
    kinds = {each.kind for each in broke}
    return warm != "single" and "kill-worker" in kinds and not kinds.isdisjoint(REPLACES_A_PRIMARY)


def parse(texts: list[str], seconds: float) -> list[Fault]:
    """`kind` or `kind@seconds`; those without a time are spread over the run. Raises ValueError."""
    found = []
    free = sum("@" not in text for text in texts)
    placed = 0
    for text in texts:
        kind, at, when = text.partition("@")
        if kind not in KINDS or (at and not re.fullmatch(r"\d+(\.\d+)?", when)):
            raise ValueError(f"{text!r}: a fault is one of {', '.join(KINDS)}, with @seconds if you like")
        if at:
            moment = float(when)
        else:
            placed += 1
            moment = seconds * placed / (free + 1)
        if not 0 <= moment < seconds:
            raise ValueError(f"{text!r}: the load lasts {seconds:g} s")
        found.append(Fault(kind, moment))
    return sorted(found, key=lambda fault: fault.at)


class Breaking:
    """Breaks a fleet in the background: `begin` when the load begins, `join` when it ended."""

    def __init__(self, fleet: Breakable, faults: list[Fault], run_began: float) -> None:
        self.broke: list[Broke] = []
        self._fleet = fleet
        self._faults = faults
        self._run_began = run_began
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, moment: float) -> None:
        """The load begins at this moment."""
        self._thread = threading.Thread(target=self._break, args=(moment,))
        self._thread.start()

    def join(self, *, early: bool = False) -> list[Broke]:
        """Wait until all faults are over; `early` leaves out those that have not begun."""
        if early:
            self._left.set()
        if self._thread is not None:
            self._thread.join()
        return self.broke

    def _break(self, moment: float) -> None:
        acts: dict[str, Callable[[], float | None]] = {
            "kill-worker": lambda: self._fleet.kill_worker(),
            "kill-handler": lambda: self._fleet.kill_handler(),
            "roll": lambda: self._fleet.roll(),
            "stop-redis": lambda: self._fleet.stop_redis(LASTS),
            "pause-postgres": lambda: self._fleet.pause_postgres(LASTS),
            "kill-primary": lambda: self._fleet.kill_primary(LASTS),
            "failover": lambda: self._fleet.failover(),
            "reshard": lambda: self._fleet.reshard(),
        }
        for fault in self._faults:
            if self._left.wait(max(moment + fault.at - time.monotonic(), 0)):
                return
            began = time.monotonic() - self._run_began
            error = ""
            elected: float | None = None
            try:
                elected = acts[fault.kind]()
            except Exception as raised:  # noqa: BLE001 - the run goes on and tells of it
                error = f"{type(raised).__name__}: {raised}"
            over = None if error else time.monotonic() - self._run_began
            chosen = None if elected is None else elected - self._run_began
            self.broke.append(Broke(fault.kind, began, over, error, chosen))
