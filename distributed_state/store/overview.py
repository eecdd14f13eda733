"""A fleet at work: who is there, how much is written, what waits for SQL, and which records are written most.

Law: it asks Redis alone, some bounded commands a look, and nobody writes a word more for it.

How much is written is exact: each partition counts its commits. Which records are busiest is a sample of the ends of
the journals, which archivers trim: what came and went between two looks is not in it.

Design: section 27.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from distributed_state.errors import StateError
from distributed_state.store.fleet_checks import ages
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.journal import JournalEntry
from distributed_state.values.results import Replica
from distributed_state.warm.answers import PartitionState

_MOST = 50  # entries of one journal in one look
_BYTES = 128 * 1024  # and about so many bytes of it
_SAME_BEAT = 0.1  # seconds that two beats are apart at least
_BUSIEST = 20  # records that are named


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """A replica with what it did since the look before, by the second; None: not known (yet), or it takes no times.

    `milliseconds` is how long one operation of it took on average, `slow` how many took longer than 0.1 s.
    """

    replica: Replica
    archived: float | None
    hot: float | None
    operations: float | None
    milliseconds: float | None
    slow: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """What one look showed. `commits` and `archived` are by the second since the look before, None at the first.

    `waiting` commits are not in SQL yet, the oldest for `oldest` seconds; `fullest` is how full the fullest journal is.
    `busiest` has, of `sampled` commits, how many were of each record. `trouble` says what keeps archivers from their
    work, or that SQL does not answer here; "" if nothing is known to.
    """

    seconds: float | None
    partitions: int
    commits: float | None
    archived: float | None
    waiting: int
    oldest: float
    fullest: float
    replicas: tuple[ReplicaRates, ...]
    busiest: tuple[tuple[str, int], ...]
    sampled: int
    trouble: str


@dataclass(frozen=True, slots=True)
class _Beat:
    at: float  # when a replica was last heard of, by the monotonic clock
    rates: ReplicaRates


class FleetLooks:
    """Looks at a fleet again and again; each look is compared with the one before."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._keys = [tiers.keys.partition(each) for each in range(tiers.keys.partitions)]
        self._at: float | None = None
        self._before: Mapping[int, PartitionState] = {}
        self._beats: dict[str, _Beat] = {}
        self._seen: dict[int, tuple[str, int]] = {}  # the epoch and offset up to which a journal was sampled
        self._counts: Counter[str] = Counter()

    async def look(self) -> Overview:
        """What there is now. Raises WarmUnavailable."""
        tiers = self._tiers
        places = await self.sample()
        now = tiers.port.monotonic()
        seconds = None if self._at is None else max(now - self._at, 1e-6)
        behind = {each: place for each, place in places.items() if place.offset > place.archived}
        waited = await ages(tiers, behind)
        replicas = await tiers.presence.replicas()
        counts, self._counts = self._counts, Counter()
        overview = Overview(
            seconds=seconds,
            partitions=len(places),
            commits=None if seconds is None else self._gained(places, "offset") / seconds,
            archived=None if seconds is None else self._gained(places, "archived") / seconds,
            waiting=sum(place.offset - place.archived for place in behind.values()),
            oldest=max(waited.values(), default=0.0),
            fullest=max((place.fill(tiers.settings) for place in places.values()), default=0.0),
            replicas=tuple(self._rates(replicas)),
            busiest=tuple(counts.most_common(_BUSIEST)),
            sampled=counts.total(),
            trouble=_trouble(replicas, tiers.cold.away),
        )
        self._at, self._before = now, places
        return overview

    async def sample(self) -> dict[int, PartitionState]:
        """Note what was written since the last time, as far as it lies in the journals; how far each partition is."""
        partitions = self._tiers.warm.partitions
        places = await partitions.states(self._keys)
        asked = []
        for each, place in places.items():
            epoch, offset = self._seen.get(each, ("", 0))
            if self._at is not None and place.offset > (offset if epoch == place.epoch else 0):
                count = max(1, min(_MOST, _BYTES * (place.offset - place.archived) // max(place.waiting, 1) or _MOST))
                asked.append((self._keys[each], offset if epoch == place.epoch else 0, count))
            self._seen[each] = (place.epoch, place.offset)
        for rows in await partitions.newest(asked):
            self._counts.update(entry.record for entry in _readable(rows) if entry.record)
        return places

    def _gained(self, places: Mapping[int, PartitionState], name: str) -> int:
        """How far all partitions are further; one that began another epoch began at 0."""
        total = 0
        for each, place in places.items():
            before = self._before.get(each)
            there = getattr(before, name) if before is not None and before.epoch == place.epoch else 0
            total += max(0, getattr(place, name) - there)
        return total

    def _rates(self, replicas: list[Replica]) -> Iterator[ReplicaRates]:
        beats = dict(self._beats)
        self._beats.clear()
        for each in replicas:
            at, known = self._tiers.port.monotonic() - each.seen, beats.get(each.id)
            if known is None:
                rates = ReplicaRates(each, None, None, None, None, None)
            elif at - known.at < _SAME_BEAT:  # it was not heard of since: what was known of it stays
                at, rates = known.at, replace(known.rates, replica=each)
            else:
                rates = _compared(each, known.rates.replica.stats, at - known.at)
            self._beats[each.id] = _Beat(at, rates)
            yield rates


def _compared(replica: Replica, before: Mapping[str, int], seconds: float) -> ReplicaRates:
    gained = {name: replica.stats[name] - before[name] for name in replica.stats.keys() & before.keys()}
    by_second = {name: max(0.0, number / seconds) for name, number in gained.items()}
    done = gained.get("operations", 0)
    mean = gained["operation_us"] / done / 1000 if done > 0 else None
    archived, hot, operations = (by_second.get(name) for name in ("archived", "hot_hits", "operations"))
    return ReplicaRates(replica, archived, hot, operations, mean, gained.get("slow_operations"))


def _trouble(replicas: list[Replica], away: str) -> str:
    for each in replicas:
        if each.archiving:
            return f"replica {each.id} does not archive: {each.archiving}"
    return f"SQL does not answer here: {away}" if away else ""


def _readable(rows: list[tuple[bytes, list[bytes]]]) -> Iterator[JournalEntry]:
    for row in rows:
        try:
            yield JournalEntry.read(*row)
        except (StateError, ValueError):  # it is somebody else's to say so
            continue
