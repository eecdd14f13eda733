"""The hot tier: records cached in this process. Law: a record never goes back to an older version.

A load under way is called a flight. It ends with the `with` block that started it (`Loads`), even if that is
interrupted.

An entry is kept only if it was read after the subscription to its channel was confirmed; every later change then
arrives on that channel. Entries answer only while the subscription under which they were read proves that it is up to
date (`Freshness`). When the subscription ends, its entries are put aside, within the same bounds, until the server
confirms that they are still current (`tiers/refill.py`), or sends the record again.

Design: sections 6, 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import Port
from distributed_state.port.bodies import Body, leaving
from distributed_state.values.journal import Operation
from distributed_state.values.levels import Freshness

_SWEPT = 1000  # number of records with flights above which abandoned flights are removed


class Flight:
    """A load in progress. Its result is kept only if nothing newer was published meanwhile.

    - `freshness`: that of the subscription under which it started; None: the result is not kept.
    - `open`: whether other readers may join it. `lost`: no answer came.
    - `floor`: epoch and version of the newest commit seen since it started; an older result is not accepted.
    """

    __slots__ = ("began", "body", "done", "floor", "freshness", "here", "lost", "open", "result")

    def __init__(
        self, done: Any, freshness: Freshness | None, open: bool, here: object, body: Body, began: float
    ) -> None:
        self.began = began  # the result may be as old as this
        self.body = body  # the leader's `with` block: if it ended before the flight landed, the leader was interrupted
        self.done = done
        self.here = here  # the leader's event loop, whose tasks may join: see `Port.here`
        self.freshness = freshness
        self.open = open
        self.lost = False
        self.floor = ("", 0)
        self.result: CachedRecord | None = None


class Loads:
    """The loads of one reader. Their results go into `loaded`, by record; all flights land when the `with` ends."""

    def __init__(self, hot: Hot) -> None:
        self.loaded: dict[str, CachedRecord] = {}
        self.body = Body()
        self._hot = hot
        self._own: list[tuple[str, Flight]] = []

    def __enter__(self) -> Self:
        self.body.begin()
        return self

    def take_off(
        self, text: str, *, freshness: Freshness | None, alone: bool, private: bool = False
    ) -> tuple[Flight, bool]:
        """Join the flight for this record, or start one and return True as its leader.

        Others cannot join a `private` flight.
        """
        flight, ours = self._hot.take_off(text, freshness=freshness, alone=alone, private=private, body=self.body)
        if ours:
            self._own.append((text, flight))
        return flight, ours

    @leaving("body")
    def __exit__(self, *_: object) -> None:
        for text, flight in self._own:
            self._hot.land(text, flight, self.loaded.get(text))


class Hot:
    """A bounded cache of entries, evicted by SIEVE (Zhang et al., NSDI 2024): hits set one flag and move nothing."""

    def __init__(
        self,
        port: Port,
        *,
        entries: int,
        size: int,
        recent: int,
        max_staleness: float,
        evicted: Callable[[str], None],
    ) -> None:
        self.entries: dict[str, CachedRecord] = {}
        self.hits = self.misses = self.bytes = 0
        self.clock = port.monotonic
        self._port = port
        self._mutex = port.mutex()
        self._most = entries
        self._size = size
        self._recent = recent
        self._max_staleness = max_staleness
        self._evicted = evicted
        self._flights: dict[str, list[Flight]] = {}
        self._swept_at = _SWEPT
        self._aside: dict[str, CachedRecord] = {}  # evicted from its end

    def get(self, text: str) -> CachedRecord | None:
        """The entry, if hot may answer from it now."""
        entry = self.entries.get(text)
        if entry is None or self.clock() >= entry.freshness.good_until:
            self.misses += 1
            return None
        entry.used = True
        self.hits += 1
        return entry

    def cached(self, text: str) -> CachedRecord | None:
        """The copy of a record, even if hot may not answer from it: the server is then asked whether it is current."""
        return self.entries.get(text) or self._aside.get(text)

    def aside(self, text: str) -> CachedRecord | None:
        """The copy of a record that was read under a subscription that has ended."""
        entry = self.cached(text)
        return entry if entry is not None and entry.freshness.over else None

    def all_aside(self) -> list[str]:
        """The records whose copies were put aside."""
        return list(self._aside)

    def count(self, known: CachedRecord | None) -> None:
        """Count a hit if the server confirmed the copy when a turn took its lease; None counts a miss."""
        if known is None:
            self.misses += 1
        else:
            self.hits += 1
            known.used = True

    def take_off(
        self, text: str, *, freshness: Freshness | None, alone: bool, private: bool = False, body: Body | None = None
    ) -> tuple[Flight, bool]:
        """Like `Loads.take_off`; without a body, the leader leads until the flight lands."""
        here, now = self._port.here(), self.clock()
        with self._mutex:
            if len(self._flights) >= self._swept_at:
                self._sweep()
            flights = self._flights.setdefault(text, [])
            flights[:] = [each for each in flights if each.body.there]
            # The result of an earlier flight may be older than `max_staleness`.
            since = now - self._max_staleness
            shared = (each for each in flights if each.open and each.here in (None, here) and each.began >= since)
            joinable = [] if alone else list(shared)
            if joinable:
                return joinable[-1], False
            flight = Flight(self._port.signal(), freshness, not private, here, body or Body(), now)
            flights.append(flight)
            return flight, True

    def _sweep(self) -> None:
        """Remove flights whose leaders were interrupted and whose records were not read again."""
        led = ((text, [each for each in flights if each.body.there]) for text, flights in self._flights.items())
        self._flights = {text: flights for text, flights in led if flights}
        self._swept_at = max(_SWEPT, 2 * len(self._flights))

    def land(self, text: str, flight: Flight, entry: CachedRecord | None) -> None:
        """End a flight: keep its result if that is still the newest known, and release its followers."""
        dropped: list[str] = []
        with self._mutex:
            flights = self._flights[text]
            flights.remove(flight)
            if not flights:
                del self._flights[text]
            epoch, version = flight.floor
            if entry is not None:
                self._note_seen(text, entry)
            if entry is not None and (entry.version >= version or entry.epoch != epoch):
                flight.result = entry
                if epoch in ("", entry.epoch):
                    dropped = self._keep(text, entry, flight.freshness)
        flight.done.set()
        for each in dropped:
            self._evicted(each)

    def apply(self, text: str, epoch: str, version: int, operations: Sequence[Operation] | None) -> None:
        """Apply a published change: merge the next version, ignore an older one, drop the entry after a gap."""
        dropped: list[str] = []
        with self._mutex:
            for flight in self._flights.get(text, ()):
                newer = flight.floor[0] != epoch or version > flight.floor[1]
                flight.floor = (epoch, version) if newer else flight.floor
            entry = self.entries.get(text)
            if entry is None or (entry.epoch == epoch and version <= entry.version):
                return
            del self.entries[text]
            self.bytes -= entry.size
            if entry.epoch == epoch and version == entry.version + 1 and operations is not None:
                following = entry.after(version, operations, self._recent)
                following.used = entry.used
                following.freshness = entry.freshness
                if not following.deleted:
                    dropped = self._put(text, following)
        for each in dropped:
            self._evicted(each)

    def expect(self, text: str, epoch: str, version: int) -> None:
        """Note that the server has this version: older copies are dropped, older results of loads are refused."""
        self.apply(text, epoch, version, None)

    def forget(self, text: str) -> None:
        """Drop one record.

        The results of its flights are not kept either, and later readers do not join these flights.
        """
        with self._mutex:
            self._drop(text)
            for flight in self._flights.get(text, ()):
                flight.freshness = None
                flight.open = False

    def let_go(self, text: str) -> None:
        """Drop the copy of a record that was read under a subscription that has ended."""
        with self._mutex:
            if self.aside(text) is not None:
                self._drop(text)

    def lose(self, gone: Collection[Freshness]) -> None:
        """Put aside the entries of these ended subscriptions; their flights can no longer be joined.

        An entry that was not used since it was read is dropped.
        """
        with self._mutex:
            lost = {text: entry for text, entry in reversed(self.entries.items()) if entry.freshness.over}
            if lost:
                # In this order, so that readers without the mutex find each entry in at least one place.
                self._aside = {text: entry for text, entry in lost.items() if entry.used} | self._aside
                self.entries = {text: entry for text, entry in self.entries.items() if text not in lost}
                self.bytes -= sum(entry.size for text, entry in lost.items() if text not in self._aside)
            for flights in self._flights.values():
                for flight in flights:
                    if flight.freshness is None or flight.freshness in gone:
                        flight.freshness = None
                        flight.open = False

    def clear(self) -> None:
        """Drop everything. The results of flights are not kept either."""
        with self._mutex:
            self.entries.clear()
            self._aside.clear()
            self.bytes = 0
            for flights in self._flights.values():
                for flight in flights:
                    flight.freshness = None
                    flight.open = False

    def _note_seen(self, text: str, entry: CachedRecord) -> None:
        """Make sure that later readers get this version or a newer one.

        Another thread's load may have been sent earlier on another connection, and arrive later with an older version.
        The published message about this version may not have arrived yet.
        """
        for flight in self._flights.get(text, ()):
            epoch, version = flight.floor
            if epoch in ("", entry.epoch) and version < entry.version:
                flight.floor = (entry.epoch, entry.version)
        present = self.entries.get(text)
        if present is not None and present.epoch == entry.epoch and present.version < entry.version:
            self._drop(text)

    def _keep(self, text: str, entry: CachedRecord, freshness: Freshness | None) -> list[str]:
        """Keep an entry, unless its subscription has ended or hot has an entry that is at least as new."""
        if freshness is None or freshness.over:
            return []
        present = self.entries.get(text)
        # Hot never answers from a copy of an earlier subscription, so it may be replaced.
        good = present is not None and not present.freshness.over
        if present is not None and good and present.epoch == entry.epoch and present.version >= entry.version:
            return []
        entry.freshness = freshness
        self._drop(text)
        return self._put(text, entry)

    def _put(self, text: str, entry: CachedRecord) -> list[str]:
        """Keep an entry of a record that is not in hot; returns the records that were evicted to make room.

        Entries put aside are evicted first. An entry used since the last pass gets a second chance and moves to the
        young end.
        """
        entry.untrack()
        self.entries[text] = entry
        self.bytes += entry.size
        dropped = []
        while len(self.entries) + len(self._aside) > self._most or self.bytes > self._size:
            if self._aside:
                lost, aside = self._aside.popitem()
                self.bytes -= aside.size
                dropped.append(lost)
                continue
            oldest = next(iter(self.entries))
            candidate = self.entries[oldest]
            if candidate.used and len(self.entries) > 1:
                candidate.used = False
                self.entries[oldest] = self.entries.pop(oldest)
            else:
                self._drop(oldest)
                dropped.append(oldest)
        return dropped

    def _drop(self, text: str) -> None:
        for entry in (self.entries.pop(text, None), self._aside.pop(text, None)):
            if entry is not None:
                self.bytes -= entry.size
