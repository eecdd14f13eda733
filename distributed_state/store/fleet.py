"""The part of a store that is about the whole fleet: what happened, on whichever replica.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from distributed_state.errors import (
    CorruptState,
    InvalidValue,
    TooLarge,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.events import audit
from distributed_state.events.config import RECORD, Source, difference, field_of, of_fleet
from distributed_state.events.consumer import AsyncEvents
from distributed_state.events.handlers import Handler, Handling
from distributed_state.events.types import checked_subject, checked_type
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.tiers import actors, durability
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.model import SCOPES, Ref, escape, unescape
from distributed_state.values.results import Event, HeldLease, Replica
from distributed_state.warm import held_leases
from distributed_state.warm.answers import Draft

log = logging.getLogger(__name__)
MAX_EVENT_BYTES = 256 * 1024
_LONGEST_PATH = 4096  # also of a name


class Fleet:
    """The part of a store that is about the whole fleet. What its methods do is said on those of the store."""

    def __init__(self, store: StoreContext) -> None:
        self._store = store

    async def emit(self, type: str, data: Mapping[str, Any] | None = None, *, subject: str | AsyncRecord = "") -> Event:
        """Write an event for every replica and the archive; the event as it was written."""
        text = checked_subject(subject)
        tiers = self._store.tiers()
        ref, _ = audit.about(None, subject.ref if isinstance(subject, AsyncRecord) else text)
        self._store.allow("write", ref, scope="session")
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
        actor = actors.present()
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
        """Publish that a client goes on with this agent: `agent.switched`."""
        named = {"agent": agent, "previous_agent": previous_agent}
        self._check_client(client=client, conversation_id=conversation_id, **_given(named))
        if previous_agent is None:
            previous_agent = await self._last_of(client, "agent.switched", "next_agent")
        data = {"previous_agent": previous_agent, "next_agent": agent, "conversation_id": conversation_id}
        return await self.emit("agent.switched", {**data, "client": client}, subject=f"client:{client}")

    async def change_directory(self, new_path: str, *, client: str = "", old_path: str | None = None) -> Event:
        """Publish that a client's user works from this folder: `directory.changed`."""
        self._check_client(client=client, new_path=new_path, **_given({"old_path": old_path}))
        if old_path is None:
            old_path = await self._last_of(client, "directory.changed", "new_path")
        data = {"old_path": old_path, "new_path": new_path, "client": client}
        return await self.emit("directory.changed", data, subject=f"client:{client}")

    def _check_client(self, **given: Any) -> None:
        for name, value in given.items():
            if not isinstance(value, str) or len(value) > _LONGEST_PATH:
                raise InvalidValue(f"{name} is a str of at most {_LONGEST_PATH} characters, not {value!r:.80}")
        checked_subject(f"client:{given['client']}")

    async def _last_of(self, client: str, type: str, name: str) -> str:
        """What a client's last event of a type says, for one who may read events."""
        self._store.allow("read", scope="session")
        wanted = audit.sought(f"client:{client}", type, None, None, 1, None)
        try:
            found = await audit.audit(self._store.tiers(), wanted)
        except Unavailable as error:
            # Better without a name than not published: agents that hear it know whom the client had.
            log.warning("%s of client %.80r: what was before is not known: %s", type, client, error)
            return ""
        said = found[0].data.get(name) if found else None
        return said if isinstance(said, str) else ""

    def events(self, *types: str, group: str | None = None, since: str | None = None) -> AsyncEvents:
        """Events as they come."""
        self._store.allow("read", scope="session")
        self._store.tiers().consumers.check(since)
        return AsyncEvents(self._store.tiers(), types or ("*",), group, since)

    def on(self, types: str | Iterable[str], handler: Handler, group: str | None, since: str | None) -> None:
        """Call `handler(event)` for each event of these types from now on."""
        chosen = list(types) if isinstance(types, Iterable) and not isinstance(types, str) else [types]
        tiers = self._store.tiers()
        events = self.events(*chosen, group=group, since=since)
        tiers.handlings.append(Handling(tiers, events, handler))

    async def off(self, handler: Handler) -> None:
        """Call this handler no more."""
        tiers = self._store.tiers()
        for handling in [each for each in tiers.handlings if each.handler == handler]:
            tiers.handlings.remove(handling)
            await handling.close()

    async def ready(self) -> None:
        """Wait until every handler listens."""
        if not await self._store.tiers().listening():
            raise WarmUnavailable("a handler does not listen yet: Redis did not answer it in time; call ready() again")

    async def replicas(self) -> list[Replica]:
        """The replicas that have this namespace open, the oldest first."""
        self._store.allow("admin")
        return await self._store.tiers().presence.replicas()

    async def leases(self, scope: str | None, prefix: str, limit: int, after: str | None) -> list[HeldLease]:
        """Who holds what, those longest first."""
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        if not isinstance(prefix, str):
            raise InvalidValue(f"prefix is a str, not {prefix!r:.80}")
        scopes = SCOPES if scope is None else (Ref(scope, "any").scope,)
        self._store.allow("admin", scope=scope, prefix=prefix or None)
        begins = tuple(f"{each}:{escape(prefix)}" for each in scopes)
        tiers = self._store.tiers()
        found = held_leases.HeldLeases(tiers.port, tiers.keys, tiers.clock)
        all_of_them = scope is None and not prefix
        return await found.page(limit, after, None if all_of_them else lambda text: text.startswith(begins))

    async def end_lease(self, id: str, token: int, scope: str) -> bool:
        """End a lease, whoever holds it."""
        ref = Ref(scope, id)
        self._store.allow("admin", ref)
        return await held_leases.end(self._store.tiers().leases, self._store.keys.of(ref), token)

    def announce(self, **fields: Any) -> None:
        """Add these values to the status that this replica publishes with each beat."""
        self._store.allow("write")
        self._store.tiers().presence.announce(fields)

    async def reload_config(self, config: Source, *, agent: str = "") -> int:
        """Store a config for all agents of the fleet, or for one; the version of its record."""
        ref = Ref("app", RECORD)
        self._store.allow("admin", ref)
        record = RecordContext(self._store, ref)
        tiers = self._store.tiers()
        found = await tiers.port.thread(of_fleet, config)
        await tiers.clock.know()
        field = field_of(agent)

        def changed(raw: bytes | None) -> tuple[Changes, bytes]:
            try:
                before = None if raw is None else record.codec.decode(raw, field)
            except CorruptState:
                before = None  # of a key that is gone, or somebody else's: it is replaced
            changes = record.changes()
            changes.set(field, {"config": found, "time": tiers.clock.now()})
            return changes, codec.encode(difference(before, found, agent), "config")

        def draft(change: tuple[Changes, bytes]) -> Draft:
            changes, data = change
            if len(data) > MAX_EVENT_BYTES:
                raise TooLarge(f"config: its names are {len(data)} bytes, more than the {MAX_EVENT_BYTES} of an event")
            draft = record.sign(changes.draft("reload_config"))
            draft.events.append((b"e", b"config.changed", data))
            return draft

        name = codec.encode_key(field)
        return (await write_path.swap(tiers, record.keys, name, changed, draft))[1].version

    async def audit(
        self,
        *,
        conversation: str | None = None,
        subject: str | AsyncRecord | None = None,
        type: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Event]:
        """What happened, from SQL."""
        ref, text = audit.about(conversation, subject.ref if isinstance(subject, AsyncRecord) else subject)
        wanted = audit.sought(text, type, since, until, limit, after)
        if ref is None:
            self._store.allow("read", scope="session")
        else:
            self._store.allow("read", ref)
        return await audit.audit(self._store.tiers(), wanted)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
