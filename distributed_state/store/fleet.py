"""The part of a store that concerns the whole fleet: events, and a live overview.

Law: a look asks only Redis, with a bounded number of commands, and writers do no extra work for it.

The number of writes is exact: each partition counts its commits. The busiest records are a sample of the ends of the
journals, which archivers trim: commits that were appended and trimmed between two looks are not in the sample.

Design: sections 12, 27.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import (
    InvalidValue,
    StateError,
    TooLarge,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.events import audit
from distributed_state.events.consumer import AsyncEvents
from distributed_state.events.handlers import Handler, Handling
from distributed_state.events.types import checked_subject, checked_type
from distributed_state.port.waited import bounded
from distributed_state.records.context import StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.results import Event, Replica
from distributed_state.store.doctor import ages
from distributed_state.store.work import Handlers, Plan, Serves, SessionWorker
from distributed_state.tiers import ambient, durability
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec
from distributed_state.values.journal import JournalEntry
from distributed_state.values.model import unescape
from distributed_state.warm.answers import PartitionState

log = logging.getLogger(__name__)
H = TypeVar("H", bound=Handler)
S = TypeVar("S", bound=Serves)
MAX_EVENT_BYTES = 256 * 1024
_LONGEST_PATH = 4096  # characters, also of a name


@bounded()
class AsyncFleet:
    """The part of a store that concerns the whole fleet: events, agents, replicas, leases, the config, the audit."""

    _context: StoreContext
    _handlers: Handlers
    _session_of: Callable[[str], AsyncSession]

    async def emit(self, type: str, data: Mapping[str, Any] | None = None, *, subject: str | AsyncRecord = "") -> Event:
        """Publish an event to every replica and to the archive; return it as written.

        Example::

            event = await store.emit("mail.sent", {"to": "ada@example.com"}, subject=session)

        `type` is a word like "mail.sent", `data` a JSON object of at most 256 KiB, `subject` a record or a text: events
        of one subject keep their order. If a reply is lost, the event is sent again, and still written only once.
        `data` is encrypted if the store has keys; type and subject are not.

        Types with a conventional meaning: `agent.switched` (`previous_agent`, `next_agent`, `conversation_id`,
        `client`) and `directory.changed` (`old_path`, `new_path`, `client`), both about `client:<client>`, as
        `activate_agent` and `change_directory` publish them. The store itself publishes `replica.lost` (`replica`,
        `host`, `pid`); if Redis can be reached, `lock.lost` (`token`, `holder`) about a record whose lock was lost,
        also by a turn that another request took over; and `conversation.diverged` (`branch`, `base`, `commits`,
        `cause`) about a record that has a new branch.
        """
        text = checked_subject(subject)
        tiers = self._context.tiers()
        ref, _ = audit.about(None, subject.ref if isinstance(subject, AsyncRecord) else text)
        self._context.allow("write", ref, scope="session")
        if not isinstance(data or {}, Mapping):
            raise InvalidValue(f"an event's data is an object, not {data!r:.80}")
        given = dict(data or {})
        encoded = codec.encode(given, "data")
        if len(encoded) > MAX_EVENT_BYTES:
            raise TooLarge(
                f"{checked_type(type)}: {len(encoded)} bytes are more than the {MAX_EVENT_BYTES} of an event"
            )
        await self.ready()
        partition = tiers.keys.partition_of(text)
        actor = ambient.actor()
        keys = tiers.keys.partition(partition)
        await durability.admit(tiers, durability.asked(tiers))
        epoch, offset, time_ms, id = await tiers.stream.emit(keys, checked_type(type), text, actor, encoded)
        await durability.ensure_event(tiers, keys, epoch, offset, id)
        return Event(
            id=id, type=type, subject=text, time=time_ms / 1000, data=given, source=tiers.replica, sequence=offset,
            epoch=epoch, partition=partition, version=0, actor=unescape(actor),
        )  # fmt: skip

    async def activate_agent(
        self, agent: str | None, *, client: str = "", conversation_id: str = "", previous_agent: str | None = None
    ) -> Event:
        """Publish that a client continues with this agent (None: without an agent), and return the event.

        Publishes `agent.switched`, for which the hooks `on_agent_deactivated` and `on_agent_activated` run. The
        previous agent is read from the client's last such event in SQL, unless `previous_agent` is given ("": none).
        """
        named = {"agent": agent, "previous_agent": previous_agent}
        self._check_client(client=client, conversation_id=conversation_id, **_given(named))
        if previous_agent is None:
            previous_agent = await self._last_of(client, "agent.switched", "next_agent")
        data = {"previous_agent": previous_agent, "next_agent": agent, "conversation_id": conversation_id}
        return await self.emit("agent.switched", {**data, "client": client}, subject=f"client:{client}")

    async def change_directory(self, new_path: str, *, client: str = "", old_path: str | None = None) -> Event:
        """Publish that a client's user now works in this folder; return the event.

        Publishes `directory.changed`, for which the hook `on_invocation_directory_changed` runs. The old folder is read
        from the client's last such event in SQL, unless `old_path` is given.
        """
        self._check_client(client=client, new_path=new_path, **_given({"old_path": old_path}))
        if old_path is None:
            old_path = await self._last_of(client, "directory.changed", "new_path")
        data = {"old_path": old_path, "new_path": new_path, "client": client}
        return await self.emit("directory.changed", data, subject=f"client:{client}")

    def events(self, *types: str, group: str | None = None, since: str | None = None) -> AsyncEvents:
        """Return a stream of events for `async for`. Use it inside `async with`, which closes it at the end.

        Example::

            async with store.events("conversation.*", "mail.*") as events:
                await store.emit("mail.sent", {"to": "ada@example.com"}, subject=session)
                event = await events.next(timeout=5.0)

        `types` are names like "conversation.deleted" or patterns like "conversation.*"; without types all events come.
        Each event comes once, and the events of one conversation come in order, even from several replicas. `since` is
        the `position` of an earlier stream, to continue after a restart, or "oldest" for all events that Redis still
        keeps (`kept_events`). If some events after that position are no longer available, one event of type `resync`
        comes, whatever the `types`: reload any data that you cached.

        With a `group`, its members in all replicas share the events: each event goes to one member, and the group's
        position is kept in Redis. A group with one member is a subscriber that continues after a restart. After a crash
        another member takes over within ten seconds; it also takes over from a member that handles one event for more
        than `handler_timeout` seconds. Events that were not confirmed as handled may come again, with the same ids.
        """
        self._context.allow("read", scope="session")
        self._context.tiers().consumers.check(since)
        return AsyncEvents(self._context.tiers(), types or ("*",), group, since)

    @overload
    def on(
        self, types: str | Iterable[str], handler: H, *, group: str | None = None, since: str | None = None
    ) -> H: ...
    @overload
    def on(
        self, types: str | Iterable[str], handler: None = None, *, group: str | None = None, since: str | None = None
    ) -> Callable[[H], H]: ...
    def on(
        self, types: str | Iterable[str], handler: Any = None, *, group: str | None = None, since: str | None = None
    ) -> Any:
        """Call `handler(event)` for each event of these types from now on; without a handler, return a decorator.

        Example::

            @store.on("conversation.deleted", group="cleaners")
            def clean(event):
                print("to clean up after:", event.conversation_id)

            await store.ready()

        Each handler gets its events one at a time, in a task or thread of its own; see `events` for `types`, `group`
        and `since`. If it fails, the error is logged with the event, and the next event comes; if it takes more than
        `slow_handler` seconds, that is logged. A plain function runs in a thread in the asyncio API as well. `resync`
        goes only to handlers that ask for it, by `on(["conversation.*", "resync"], ...)` or "*".
        """
        if handler is None:
            return lambda given: self.on(types, given, group=group, since=since)
        chosen = list(types) if isinstance(types, Iterable) and not isinstance(types, str) else [types]
        tiers = self._context.tiers()
        events = self.events(*chosen, group=group, since=since)
        tiers.handlings.append(Handling(tiers, events, handler))
        return handler

    @overload
    def handler(self, name: str, serves: S) -> S: ...
    @overload
    def handler(self, name: str, serves: None = None) -> Callable[[S], S]: ...
    def handler(self, name: str, serves: Any = None) -> Any:
        """Add a handler of sessions: `work` calls it with a turn of each session of this handler that is due.

        Example::

            @store.handler("support")
            async def support(turn):
                for each in turn.take():
                    turn.append(each.message, {"role": "assistant", "content": "I am looking into it."})

        A session gets its handler with `session.post(..., handler="support")` or `session.wake(..., handler="support")`
        and keeps it. It is due while inputs wait, and when a wake is due. The function takes the inputs with
        `turn.take()`; one that raises, or takes nothing, is called again later: see `work`. Without a function this
        returns a decorator.

        `store.handler("trip", workflow)` takes a Workflow, too: an input begins a task or is given to the one that is
        under way, and workers do its steps, each in a turn, until the task has ended or waits.

        Raises InvalidValue if the store has another handler of this name, or works already without this one.
        """
        if serves is None:
            return lambda given: self.handler(name, given)
        self._handlers.add(name, serves)
        return serves

    async def work(
        self, *, concurrency: int = 32, ttl: float = 30.0, max_attempts: int = 8, shutdown_timeout: float = 30.0
    ) -> None:
        """Serve sessions that are due, with this store's handlers, until the caller is cancelled or interrupted.

        Any number of workers may do this. A session is served by one of them, in a turn: it holds the lease, of `ttl`
        seconds, and its commit removes the inputs that it took. At most `concurrency` turns run at once, in tasks, or
        in threads in the blocking API. If a worker dies, another one serves its sessions after `ttl` seconds. A handler
        that raises is called again after one second, then two, four, at most 300. After `max_attempts` failures in a
        row the session is *stuck*: `sessions(stuck=True)` lists it, and `session.retry()` begins again. A turn that
        somebody stopped is not repeated. When `work` is cancelled, or by `stop_working`, it begins no further turn,
        waits up to `shutdown_timeout` seconds for the running turns, and hands the others back. Raises InvalidValue
        without a handler, or if the store works already. A plain function of an asyncio store runs in a thread, which
        cannot be interrupted; one that never returns does not keep the process from ending.
        """
        plan = Plan(concurrency, ttl, max_attempts, shutdown_timeout)
        self._context.allow("lock", scope="session")
        tiers = self._context.tiers()
        worker = SessionWorker(tiers, self._handlers, plan, self._session_of, self._context.dressed)
        await self._handlers.work(worker)

    def stop_working(self) -> None:
        """Let this store's call of `work` end, as if it were cancelled; from any thread, or a signal handler.

        Before the first call of `work`, this lets that one end at once. After the end of a call it has no effect.
        """
        self._handlers.stop()

    async def off(self, handler: Handler) -> None:
        """Stop calling this handler. Returns when its current call has ended, at the latest after 5 s."""
        tiers = self._context.tiers()
        for handling in [each for each in tiers.handlings if each.handler == handler]:
            tiers.handlings.remove(handling)
            await handling.close()

    async def ready(self) -> None:
        """Wait until every handler given to `on` receives events, so that later writes are not missed.

        Raises WarmUnavailable if this takes longer than `timeout`.
        """
        if not await self._context.tiers().listening():
            raise WarmUnavailable("a handler does not listen yet: Redis did not answer it in time; call ready() again")

    def announce(self, **fields: Any) -> None:
        """Publish these JSON values as the `status` of this replica, listed by `replicas`, from its next heartbeat on.

        Example::

            store.announce(model="small", queue=3)

        Fields announced earlier stay; None removes one. The status is not encrypted. Raises TooLarge beyond 16 KiB. No
        I/O.
        """
        self._context.allow("write")
        self._context.tiers().heartbeat.announce(fields)

    def _check_client(self, **given: Any) -> None:
        for name, value in given.items():
            if not isinstance(value, str) or len(value) > _LONGEST_PATH:
                raise InvalidValue(f"{name} is a str of at most {_LONGEST_PATH} characters, not {value!r:.80}")
        checked_subject(f"client:{given['client']}")

    async def _last_of(self, client: str, type: str, name: str) -> str:
        """The value in a client's last event of a type, if the caller may read events."""
        self._context.allow("read", scope="session")
        wanted = audit.sought(f"client:{client}", type, None, None, 1, None)
        try:
            found = await audit.audit(self._context.tiers(), wanted)
        except Unavailable as error:
            # Published without the previous name rather than not at all: agents that receive it know the client's
            # previous agent.
            log.warning("%s of client %.80r: the previous value is unknown: %s", type, client, error)
            return ""
        said = found[0].data.get(name) if found else None
        return said if isinstance(said, str) else ""


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_MOST = 50  # entries of one journal in one look
_BYTES = 128 * 1024  # and about this many bytes of the journal
_SAME_BEAT = 0.1  # minimum seconds between two heartbeats
_BUSIEST = 20  # number of records in `busiest`


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """A replica and its rates per second since the previous look; None if not known yet or not measured.

    `milliseconds` is the mean duration of its operations, `slow` counts those that took longer than 0.1 s.
    """

    replica: Replica
    archived: float | None
    hot: float | None
    operations: float | None
    milliseconds: float | None
    slow: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The result of one look. `commits` and `archived` are per second since the previous look, None at the first look.

    `waiting` counts commits that are not in SQL yet, `oldest` is the age of the oldest in seconds, `fullest` the fill
    of the fullest journal. `busiest` counts the `sampled` commits by record. `trouble` says why archivers make no
    progress, or that SQL does not answer this process; "" if no trouble is known.
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
    at: float  # when its last heartbeat was seen, by the monotonic clock
    rates: ReplicaRates


class FleetLooks:
    """Looks at a fleet repeatedly, and compares each look with the previous one."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._keys = [tiers.keys.partition(each) for each in range(tiers.keys.partitions)]
        self._at: float | None = None
        self._before: Mapping[int, PartitionState] = {}
        self._beats: dict[str, _Beat] = {}
        self._seen: dict[int, tuple[str, int]] = {}  # the epoch and offset up to which a journal was sampled
        self._counts: Counter[str] = Counter()

    async def look(self) -> Overview:
        """Look at the present state. Raises WarmUnavailable."""
        tiers = self._tiers
        places = await self.sample()
        now = tiers.port.monotonic()
        seconds = None if self._at is None else max(now - self._at, 1e-6)
        behind = {each: place for each, place in places.items() if place.offset > place.archived}
        waited = await ages(tiers, behind)
        replicas = await tiers.heartbeat.replicas()
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
        """Sample the commits since the last look that the journals still have; returns each partition's position."""
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
        """How far all partitions advanced. A partition in a new epoch counts from 0."""
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
            elif at - known.at < _SAME_BEAT:  # no heartbeat since: keep the known rates
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
        except (StateError, ValueError):  # other code reports this error
            continue
