"""The replicas of a store and their reports. Law: one other replica publishes the loss of a silent replica, once.

The roll holds the time when each counts as lost, by the server's clock. A replica that was late itself does not report
others for a while: probably Redis was down for the others as well. In a large fleet replicas send heartbeats less
often, and report with each one how long it is valid.

Design: section 12.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from distributed_state.errors import CorruptState, StateError, TooLarge, WarmUnavailable
from distributed_state.port import Job, Port
from distributed_state.port.commands import of_its_disk
from distributed_state.results import Replica
from distributed_state.settings import Settings
from distributed_state.values import codec
from distributed_state.values.keys import Keys
from distributed_state.warm.client import Warm
from distributed_state.warm.clock import Rounds
from distributed_state.warm.scripts import BEAT, ROLL
from distributed_state.warm.stream import Stream

log = logging.getLogger(__name__)
MAX_STATUS_BYTES = 16 * 1024
_BEATS = 3  # a replica counts as lost after this many missed beats
_ROLL_BEATS = 2  # beats between two reads of the roll
_CALM = 50  # up to this many replicas beat at the configured interval; larger fleets keep the same total rate
_RAREST = 5.0  # but the interval is at most this many times longer
_LISTED = 100  # a roll of more replicas is read less often
_KEPT_MS = 3_600_000
_REASONS = ("replica", "disk", "away")
"""Why a heartbeat was refused: Redis is a read-only replica, cannot write to its disk, or gave no answer."""
_SHOWN = 300  # letters of a failure
_NAMED = 10  # partitions of which nothing is archived


class Figures(NamedTuple):
    """A replica's own figures, collected without a request: its progress, its counters, and why its archiver stopped.

    `archiving` is "" while the archiver runs; `diverged` has the reason for each partition that cannot be archived.
    """

    positions: dict[str, int]
    stats: dict[str, int]
    archiving: str
    diverged: dict[int, str]


class Heartbeat:
    """Reports this replica, and lists the others."""

    def __init__(
        self,
        port: Port,
        warm: Warm,
        stream: Stream,
        keys: Keys,
        settings: Settings,
        rounds: Rounds,
        figures: Callable[[], Figures],
    ) -> None:
        self._port = port
        self._warm = warm
        self._stream = stream
        self._keys = keys
        self._rounds = rounds
        self._figures = figures
        self._every = settings.beat
        self._pause = settings.beat  # seconds until the job's next beat, which determine the reported validity
        self._members = 1  # reported by the answer to the last beat
        self._started = port.wall()
        self._judges_from = 0.0
        self._status: dict[str, Any] = {}
        self._reached = True
        self.refusing = ""
        """Why Redis did not take the last heartbeat, one of _REASONS; "" if it did."""
        self.lost = 0
        self._seen: dict[str, float] = {}  # replicas that were on the roll, and when last, by the monotonic clock
        self._roll_at = 0.0
        self._job: Job | None = None

    def begin(self) -> None:
        """Report this replica from now on, unless that is switched off."""
        if self._every:
            self._job = self._port.spawn(self._run, "distributed-state-beat")

    def announce(self, fields: Mapping[str, Any]) -> None:
        """Report these fields with the next beat, in addition to earlier ones; None removes a field."""
        stated = {name: value for name, value in {**self._status, **fields}.items() if value is not None}
        text = codec.encode(stated, "status")
        if len(text) > MAX_STATUS_BYTES:
            raise TooLarge(f"status: {len(text)} bytes are more than the {MAX_STATUS_BYTES} of a replica")
        self._status = codec.decode(text)

    async def replicas(self) -> list[Replica]:
        """Return all present replicas, the oldest first."""
        if self._every:
            await self._warm.retry(self._beat)
        # By the clock of the server that has the roll.
        _, time, listed = await self._warm.script(ROLL, [self._keys.roll], [])
        now = int(time)
        due = {listed[at].decode(): float(listed[at + 1]) for at in range(0, len(listed), 2)}
        if not due:
            return []
        cards = await self._warm.command(b"MGET", *(self._keys.replica(id) for id in due))
        found = [_read(id, card, due[id] - now) for id, card in zip(due, cards, strict=True)]
        return sorted(found, key=lambda each: (each.started, each.id))

    async def replica_ids(self) -> set[str]:
        """Return the ids of replicas on the roll now or lately: Redis may have lost the roll with the rest.

        Never raises: without an answer it returns the earlier ones. Without heartbeats only this replica is known.
        """
        if self._every:
            try:
                await self._read_roll()
            except StateError as error:
                log.warning("heartbeat: the list of replicas cannot be read: %s", error)
        after = self._port.monotonic() - self._kept
        return {id for id, seen in list(self._seen.items()) if seen >= after} | {self._warm.replica}

    async def _read_roll(self) -> None:
        listed = await self._port.command(b"ZRANGE", self._keys.roll, 0, -1)
        now = self._roll_at = self._port.monotonic()
        self._seen.update((each.decode(), now) for each in listed)
        for id, seen in list(self._seen.items()):
            # Kept after the replica left the roll, which is long after its last beat.
            if seen < now - self._kept:
                self._seen.pop(id, None)

    @property
    def refusals(self) -> dict[tuple[str, ...], float]:
        """1 for the reason why Redis did not take the last heartbeat, 0 for the others."""
        return {(reason,): float(reason == self.refusing) for reason in _REASONS}

    @property
    def _ttl_ms(self) -> int:
        return int(self._pause * _BEATS * 1000)

    @property
    def _roll_every(self) -> float:
        """Seconds between two reads of the roll; longer in a large fleet."""
        return self._pause * max(_ROLL_BEATS, self._members / _LISTED)

    @property
    def _kept(self) -> float:
        """Seconds for which a replica that was on the roll counts as known."""
        return self._pause * _BEATS + self._roll_every

    async def _run(self) -> None:
        while True:
            # Computed before the beat, which reports its validity, so that the next one comes in time even in a larger
            # fleet.
            self._pause = self._every * min(max(self._members / _CALM, 1.0), _RAREST)
            try:
                for each in await self._beat():
                    await self._publish_loss(each)
                if self._port.monotonic() >= self._roll_at + self._roll_every:
                    await self._read_roll()
                self._reached, self.refusing = True, ""
            except StateError as error:
                reason = _reason(error)
                log.log(logging.WARNING if self.refusing != reason else logging.DEBUG, "heartbeat: %s", error)
                self._reached, self.refusing = False, reason
            await self._port.sleep(self._rounds.pause(self._pause) if self._reached else self._every)

    async def _beat(self) -> list[str]:
        """Report this replica; return the replicas that are found to be lost."""
        keys = self._keys
        replica = self._warm.replica
        stated = codec.encode(self._card(), "replica")
        ttl_ms = self._ttl_ms
        answer = await self._port.script(BEAT, [keys.roll, keys.replica(replica)], [replica, stated, ttl_ms])
        self._members = int(answer[1])
        self._rounds.spread(self._members)
        if answer[0] == b"late":
            self._judges_from = self._port.monotonic() + ttl_ms / 1000
        if self._port.monotonic() < self._judges_from:
            return []
        return [each.decode() for each in answer[2:]]

    def _card(self) -> dict[str, Any]:
        figures = self._figures()
        return {
            "host": platform.node(),
            "pid": os.getpid(),
            "version": release(),
            "started": self._started,
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
            "positions": figures.positions,
            "stats": figures.stats,
            "status": self._status,
            "archiving": figures.archiving[:_SHOWN],
            "diverged": {str(each): why[:_SHOWN] for each, why in sorted(figures.diverged.items())[:_NAMED]},
            "ttl_ms": self._ttl_ms,
        }

    async def _publish_loss(self, id: str) -> None:
        card = self._keys.replica(id)
        lost = _read(id, await self._port.command(b"GET", card), 0)
        # Before it leaves the roll, after which no replica would look at its report again.
        await self._port.command(b"PEXPIRE", card, _KEPT_MS)
        data = codec.encode({"replica": id, "host": lost.host, "pid": lost.pid})
        written = await self._stream.emit(
            self._keys.partition(0), "replica.lost", f"replica:{id}", "", data, roll=self._keys.roll, member=id
        )
        if written[1]:
            self.lost += 1
            archived = lost.positions.get("archives", 0)
            more = f"; it archived {archived} partitions" if archived else ""
            log.warning("replica %s, process %d on %s, was lost%s", id, lost.pid, lost.host, more)

    async def close(self) -> None:
        """Leave at once; this is not published as a loss."""
        if self._job is None:
            return
        replica = self._warm.replica
        try:
            await self._job.stop()
        finally:
            self._job = None
            await self._port.exchange([(b"ZREM", self._keys.roll, replica), (b"DEL", self._keys.replica(replica))])


def _read(id: str, card: bytes | None, left_ms: float) -> Replica:
    """Parse a replica's report; if it cannot be read, only its id is set."""
    try:
        stated = codec.decode(card or b"{}", "replica")
        return Replica(
            id=id,
            host=str(stated.get("host", "")),
            pid=int(stated.get("pid", 0)),
            version=str(stated.get("version", "")),
            started=float(stated.get("started", 0.0)),
            seen=max(0.0, (stated.get("ttl_ms", left_ms) - left_ms) / 1000),
            load=float(stated.get("load", 0.0)),
            positions=dict(stated.get("positions", {})),
            stats=dict(stated.get("stats", {})),
            status=dict(stated.get("status", {})),
            archiving=str(stated.get("archiving", "")),
            diverged=dict(stated.get("diverged", {})),
        )
    except (CorruptState, AttributeError, TypeError, ValueError) as error:
        log.warning("the heartbeat of replica %s cannot be read: %s", id, error)
        return Replica(id, "", 0, "", 0.0, 0.0, 0.0, {}, {}, {})


@cache
def release() -> str:
    """The version of this package."""
    try:
        return metadata.version("distributed-state")
    except metadata.PackageNotFoundError:
        return ""  # the package is run from its source


def _reason(error: StateError) -> str:
    if isinstance(error, WarmUnavailable) and error.demoted:
        return "replica"
    return "disk" if of_its_disk(error) else "away"
