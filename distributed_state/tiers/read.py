"""The read path: hot -> warm -> cold; the first tier that has the record answers. Law: a read never changes a record.

Design: sections 6, 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from distributed_state.errors import ColdUnavailable, StateError, WarmUnavailable
from distributed_state.hot.cache import Flight, Loads
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.port.waited import one_call
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.field_ttl import NEVER
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.warm.answers import Cold, Uninitialised
from distributed_state.warm.client import OpId
from distributed_state.warm.lease import AsyncLease
from distributed_state.warm.scripts import READ
from distributed_state.warm.telemetry import observed
from distributed_state.warm.telemetry import record as of_record

T = TypeVar("T")
ROUNDS = 100
"""How often one call asks the server again, if each answer requires something else first."""
_OVERTAKEN = 20  # loads that newer commits outdated, after which a reader accepts its own load as the answer
_FLIGHT_SECONDS = 15.0  # seconds for which a reader waits for another reader's load
_LOOK_SECONDS = 0.5  # between two checks that the leader of a flight still runs


async def read(tiers: Tiers, keys: RecordKeys, *, fresh: bool = False) -> CachedRecord:
    """Read a record from the nearest tier that has it; version 0: never written. `fresh` asks the server."""
    hot = tiers.hot
    text = keys.ref.text
    entry = hot.get(text)
    if entry is not None and not fresh:
        return entry if entry.expires == NEVER else entry.living(tiers.clock.now())
    return await _ask(tiers, keys, fresh=fresh)


@one_call
async def _ask(tiers: Tiers, keys: RecordKeys, *, fresh: bool) -> CachedRecord:
    """Load the record from the server. Concurrent readers of a record share one load, except `fresh` ones."""
    hot = tiers.hot
    text = keys.ref.text
    cached = hot.cached(text)
    alone = fresh
    away = False
    for attempt in range(ROUNDS):
        with Loads(hot) as loads:
            flight, ours = loads.take_off(text, freshness=tiers.listen(keys), alone=alone)
            if ours:
                try:
                    loads.loaded[text] = await _load(tiers, keys, cached)
                except WarmUnavailable:
                    flight.lost = True
                    raise
        if not ours:
            began = tiers.port.monotonic()
            if not await _landed(tiers, flight):
                alone = True
                flight.open = False  # later readers must not wait for this flight
            if (account := waited.present()) is not None and (away := away or flight.lost):
                account.add(began)  # the leader got no answer, so this wait counts as a wait for Redis
        elif attempt >= _OVERTAKEN:
            # Others write faster than this reads. The result lacks only changes that were made after the read began.
            return await _living(tiers, loads.loaded[text])
        if flight.result is not None:
            return await _living(tiers, flight.result)
        # A newer version was published meanwhile, or the leader of the flight failed: try again.
        cached = None
    raise WarmUnavailable(f"{text[:200]}: changes faster than it can be read")


async def _landed(tiers: Tiers, flight: Flight) -> bool:
    """Wait for another reader's load; False if it takes too long, or its leader was interrupted and cannot end it."""
    end = tiers.port.monotonic() + min(_FLIGHT_SECONDS, tiers.warm.left())
    while True:
        left = end - tiers.port.monotonic()
        if await flight.done.wait(max(0.0, min(_LOOK_SECONDS, left))):
            return True
        if left <= 0 or not flight.body.there:
            return False


async def load_uncached(tiers: Tiers, keys: RecordKeys) -> CachedRecord:
    """Load the record from the server, hydrated if necessary; hot does not keep it."""
    return await _load(tiers, keys, None)


async def _living(tiers: Tiers, entry: CachedRecord) -> CachedRecord:
    """The entry without the fields that have expired by the server's clock."""
    if entry.expires == NEVER:
        return entry
    await tiers.clock.know()
    return entry.living(tiers.clock.now())


async def read_many(tiers: Tiers, many: Sequence[RecordKeys], *, fresh: bool = False) -> list[CachedRecord]:
    """Read several records: those that hot does not have in one round trip. `fresh` asks the server for all."""
    entries = {keys: None if fresh else tiers.hot.get(keys.ref.text) for keys in many}
    missing = [keys for keys, entry in entries.items() if entry is None]
    cached = [tiers.hot.cached(keys.ref.text) for keys in missing]
    with Loads(tiers.hot) as loads:
        flights = [loads.take_off(keys.ref.text, freshness=tiers.listen(keys), alone=True)[0] for keys in missing]
        asked = [(keys, *_seen(entry)) for keys, entry in zip(missing, cached, strict=True)]
        answers = await tiers.warm.read_many(asked)
        for keys, entry, answer in zip(missing, cached, answers, strict=True):
            if isinstance(answer, StateError):
                raise answer
            found = None
            if answer is None:
                found = _unchanged(tiers, keys, entry)
            elif isinstance(answer, list):
                tiers.see(keys.partition, answer[0])
                found = CachedRecord.read(tiers.codec_of(keys.ref.text), answer[0], answer[1:])
            if found is not None:
                loads.loaded[keys.ref.text] = found
    for keys, flight in zip(missing, flights, strict=True):
        entries[keys] = flight.result or await read(tiers, keys, fresh=fresh)
    return [await _living(tiers, entry) for keys in many if (entry := entries[keys]) is not None]


async def hold(tiers: Tiers, keys: RecordKeys, lease: AsyncLease) -> CachedRecord:
    """Take a lease and read the record under it, in one round trip if no other holder has it."""
    hot = tiers.hot
    text = keys.ref.text
    cached = hot.cached(text)
    found = None
    with Loads(hot) as loads:
        # Private, because other readers must not wait for this lease.
        loads.take_off(text, freshness=tiers.listen(keys), alone=True, private=True)
        # Sent after acquire.lua (and repeated with it after NOSCRIPT), so it reads the record after the lease was
        # granted.
        answer = await lease.acquire_and((READ, *tiers.warm.read_call(keys, *_seen(cached))))
        if isinstance(answer, list):
            found = await _understand(tiers, keys, cached, tiers.warm.read_answer(answer))
            hot.count(cached if found is cached else None)
        if found is not None:
            loads.loaded[text] = found
    # None: the lease nests in another one of this task, or the read has to be repeated.
    return await _living(tiers, found) if found else await read(tiers, keys, fresh=True)


def _seen(cached: CachedRecord | None) -> tuple[str, int | None]:
    return (cached.epoch, cached.version) if cached else ("", None)


@observed("read", "warm", of_record)
async def _load(tiers: Tiers, keys: RecordKeys, cached: CachedRecord | None) -> CachedRecord:
    for _ in range(ROUNDS):
        entry = await _understand(tiers, keys, cached, await tiers.warm.read(keys, *_seen(cached)))
        if entry is not None:
            return entry
    raise WarmUnavailable(f"{keys.ref.text[:200]}: is deleted and created again faster than it can be read")


async def _understand(
    tiers: Tiers, keys: RecordKeys, cached: CachedRecord | None, answer: list[Any] | Cold | Uninitialised | None
) -> CachedRecord | None:
    """The record in an answer of read.lua, hydrated if it was not in Redis; None: ask again."""
    if answer is None:
        return _unchanged(tiers, keys, cached)
    if isinstance(answer, list):
        tiers.see(keys.partition, answer[0])
        return CachedRecord.read(tiers.codec_of(keys.ref.text), answer[0], answer[1:])
    if isinstance(answer, Cold):
        return await hydrate(tiers, keys, answer)
    await tiers.start(keys.partition)
    return None


def _unchanged(tiers: Tiers, keys: RecordKeys, cached: CachedRecord | None) -> CachedRecord | None:
    """The copy that the server confirmed as current; that also confirms its epoch."""
    if cached is not None:
        tiers.see(keys.partition, cached.epoch)
    return cached


@observed("hydrate", "cold", of_record)
async def hydrate(tiers: Tiers, keys: RecordKeys, cold: Cold, op: OpId | None = None) -> CachedRecord | None:
    """Load a record from SQL into Redis; None if it was changed or hydrated meanwhile. `op` is the write that waits."""
    tiers.see(keys.partition, cold.epoch)
    window = tiers.settings.recent_messages
    text = keys.ref.text
    try:
        loaded = await tiers.port.sql(partial(tiers.cold.load, text, window=window))
    except ColdUnavailable:
        # SQL is down. If Redis still has the token under which SQL did not have the record, SQL still does not have it.
        if not cold.token or cold.token != tiers.known_ids.get(text):
            raise
        loaded = None
    if loaded is None:
        if cold.token:
            tiers.known_ids.add(text, cold.token)
        return CachedRecord(tiers.codec_of(keys.ref.text), cold.epoch, 0, {}, {})
    if cold.token:
        came_ms = await tiers.warm.hydrate(keys, cold, loaded)
        if not came_ms:
            return None
        if op is not None and not op.doubted:
            op.since_ms = came_ms  # no reply was lost, so the write was not applied before
    # Without a token Redis is full, and the answer comes from SQL, which has the whole record, as it had left Redis.
    state = loaded.state
    return CachedRecord(tiers.codec_of(keys.ref.text), cold.epoch, state.version, state.fields, dict(loaded.messages))


async def load_whole(tiers: Tiers, keys: RecordKeys, cached: CachedRecord) -> CachedRecord:
    """Load the record with all messages that Redis has; hot keeps only the recent ones."""
    entry = await _load(tiers, keys, None)
    # A lagging server may answer with an older version than hot's copy, which is then returned.
    return await _living(tiers, entry if entry.version >= cached.version or entry.epoch != cached.epoch else cached)


async def reach(tiers: Tiers, keys: RecordKeys | PartitionKeys) -> None:
    """Archive everything that the partition holds now.

    Raises ColdUnavailable rather than allowing a shorter history.
    """
    await archived(tiers, keys, lambda: None)


async def archived(tiers: Tiers, keys: RecordKeys | PartitionKeys, read: Callable[[], T], *, long: bool = False) -> T:
    """The result of `read`, once SQL has everything that the partition holds now. Raises ColdUnavailable.

    `long`: for a read of whole pages of history, whose statements may take as long as those of maintenance.
    """
    for _ in range(ROUNDS):
        tail = await tiers.warm.partitions.tail(keys)
        if tail is not None:
            return await tiers.archiver.bring(keys.partition, *tail, read, long=long)
        await tiers.start(keys.partition)
    raise WarmUnavailable(f"partition {keys.partition} does not start")
