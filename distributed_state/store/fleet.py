"""The part of a store that is about the whole fleet: what happened, on whichever replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

from distributed_state.errors import (
    ColdUnavailable,
    CorruptState,
    DurabilityUnknown,
    InvalidValue,
    TooLarge,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.events import audit
from distributed_state.events.config import RECORD, Source, field_of, of_fleet, told
from distributed_state.events.handlers import AsyncEvents, Handler, Handling, checked_subject, checked_type
from distributed_state.records.access import Action
from distributed_state.records.record import AsyncRecord
from distributed_state.store.records import AsyncHandles
from distributed_state.tiers import actors
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.model import Ref, unescape
from distributed_state.values.results import Event, Replica
from distributed_state.warm.answers import Draft

log = logging.getLogger(__name__)
H = TypeVar("H", bound=Handler)
MAX_EVENT_BYTES = 256 * 1024
_LONGEST_PATH = 4096  # also of a name
_ROUNDS = 100


class AsyncFleet(AsyncHandles):
    """The part of a store that tells of the fleet."""

    async def emit(self, type: str, data: Mapping[str, Any] | None = None, *, subject: str | AsyncRecord = "") -> Event:
        """Publish an event to every replica and to the archive; return it as it was written.

        Example::

            event = await store.emit("mail.sent", {"to": "ada@example.com"}, subject=session)

        `type` is a word like "mail.sent", `data` a JSON object of at most 256 KiB, `subject` a record or a text:
        events of one subject keep their order. Repeated while replies are lost, written once. `data` is encrypted if
        the store has keys; type and subject are not.

        Known to all by convention: `agent.switched` (`previous_agent`, `next_agent`, `conversation_id`, `client`) and
        `directory.changed` (`old_path`, `new_path`, `client`), both about `client:<client>`, as `activate_agent` and
        `change_directory` publish them. Published by the store itself:
        `replica.lost` (`replica`, `host`, `pid`) and, as far as Redis can be reached, `lock.lost` (`token`, `holder`)
        about the record whose lock was lost, by a turn that another request took over, too.
        """
        text = checked_subject(subject)
        tiers = self.tiers()
        ref, _ = audit.about(None, subject.ref if isinstance(subject, AsyncRecord) else text)
        self._allow("write", ref, scope="session")
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
        for _ in range(_ROUNDS):
            written = await tiers.stream.emit(keys, checked_type(type), text, actor, encoded)
            if written is not None:
                break
            await tiers.start(partition)
        else:
            raise WarmUnavailable(f"partition {partition} does not start")
        epoch, offset, time_ms, id = written
        if self.settings.durability == "archived":
            try:
                await write_path.reach(tiers, keys)
                if not await tiers.port.sql(tiers.cold.event_archived, partition, epoch, offset, id):
                    raise ColdUnavailable(f"partition {partition}: Redis lost it before it was archived")
            except Unavailable as error:
                raise DurabilityUnknown(f"event {id} is told, but not archived yet: {error}") from error
        return Event(
            id=id, type=type, subject=text, time=time_ms / 1000, data=given, source=tiers.replica, sequence=offset,
            epoch=epoch, partition=partition, version=0, actor=unescape(actor),
        )  # fmt: skip

    async def activate_agent(
        self, agent: str | None, *, client: str = "", conversation_id: str = "", previous_agent: str | None = None
    ) -> Event:
        """Tell every replica that a client goes on with this agent, None: with none; return the event.

        `agent.switched`, for which the hooks `on_agent_deactivated` and `on_agent_activated` run. The agent before is
        the one of the client's last such event, as SQL has it, unless `previous_agent` names another, or with "" none.
        """
        named = {"agent": agent, "previous_agent": previous_agent}
        self._check_client(client=client, conversation_id=conversation_id, **_given(named))
        if previous_agent is None:
            previous_agent = await self._last_of(client, "agent.switched", "next_agent")
        data = {"previous_agent": previous_agent, "next_agent": agent, "conversation_id": conversation_id}
        return await self.emit("agent.switched", {**data, "client": client}, subject=f"client:{client}")

    async def change_directory(self, new_path: str, *, client: str = "", old_path: str | None = None) -> Event:
        """Tell every replica that a client's user works from this folder now; return the event.

        `directory.changed`, for which the hook `on_invocation_directory_changed` runs. The folder before is the one of
        the client's last such event, as SQL has it, unless `old_path` is given.
        """
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
        self._allow("read", scope="session")
        wanted = audit.sought(f"client:{client}", type, None, None, 1, None)
        try:
            found = await audit.audit(self.tiers(), wanted)
        except Unavailable as error:
            # Better unnamed than untold: agents that hear know whom the client had.
            log.warning("%s of client %.80r: what was before is not known: %s", type, client, error)
            return ""
        said = found[0].data.get(name) if found else None
        return said if isinstance(said, str) else ""

    def events(self, *types: str, group: str | None = None, since: str | None = None) -> AsyncEvents:
        """Events as they come, for `async for`; better inside `async with`, which says when that is over.

        Example::

            async with store.events("conversation.*", "mail.*") as events:
                await store.emit("mail.sent", {"to": "ada@example.com"}, subject=session)
                event = await events.next(timeout=5.0)

        `types` are names as "conversation.deleted", or patterns as "conversation.*"; without any, all. Each comes
        once, those of one conversation in order, whichever replica wrote them. `since` is the `position` of other
        events, to go on from there across restarts, or "oldest" for what Redis still keeps (`kept_events`).
        Where that is not kept any more, or Redis lost it, there comes one event of type `resync`, whatever `types`
        say: reload what you keep.

        With a `group` its members share the events, in all replicas: each event is one member's, and where the group
        is, is kept in Redis. A group of one is a subscriber that goes on after a restart. After a crash another
        member takes over within ten seconds, and from a member that is at one event for more than `handler_timeout`
        seconds, too: it may get again, under the same id, what was not seen to be handled.
        """
        self._allow("read", scope="session")
        self.tiers().consumers.check(since)
        return AsyncEvents(self.tiers(), types or ("*",), group, since)

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
        """Call `handler(event)` for each event of these types from now on; without a handler, a decorator.

        Example::

            @store.on("conversation.deleted", group="cleaners")
            def clean(event):
                print("to clean up after:", event.conversation_id)

            await store.ready()

        Each handler gets its events one at a time, in a task or thread of its own; see `events` for `types`, `group`
        and `since`. One that fails is logged with the event, and the next event comes; one that takes more than
        `slow_handler` seconds is logged. A plain function runs in a thread on the asyncio face, too. `resync` comes
        only to handlers that name it, as `on(["conversation.*", "resync"], ...)` or "*".
        """
        if handler is None:
            return lambda given: self.on(types, given, group=group, since=since)
        chosen = list(types) if isinstance(types, Iterable) and not isinstance(types, str) else [types]
        tiers = self.tiers()
        events = self.events(*chosen, group=group, since=since)
        tiers.handlings.append(Handling(tiers, events, handler))
        return handler

    async def off(self, handler: Handler) -> None:
        """Call this handler no more. Returns when what it is at is done, or after 5 s."""
        tiers = self.tiers()
        for handling in [each for each in tiers.handlings if each.handler == handler]:
            tiers.handlings.remove(handling)
            await handling.close()

    async def ready(self) -> None:
        """Wait until every handler given to `on` listens: none of them misses what is written afterwards."""
        await self.tiers().listening()

    async def replicas(self) -> list[Replica]:
        """List the replicas that have this namespace open, the oldest first, as their last heartbeats describe them.

        Each sends one every `beat` seconds, and is listed until it is closed, or silent for three times that; then it
        is lost, and another one publishes the event `replica.lost` within another `beat`.
        """
        self._allow("admin")
        return await self.tiers().presence.replicas()

    def announce(self, **fields: Any) -> None:
        """Publish these JSON values as the `status` of this replica, listed by `replicas`, from its next heartbeat on.

        Example::

            store.announce(model="small", queue=3)

        Fields announced before stay; None removes one. Raises TooLarge beyond 16 KiB. Not encrypted. No I/O.
        """
        self._allow("write")
        self.tiers().presence.announce(fields)

    async def reload_config(self, config: Source, *, agent: str = "") -> int:
        """Give all agents of the fleet, or one by its name, another config; return the version of its record.

        `config` is a mapping, or the path of a YAML or JSON file read here. Every replica takes it and calls
        `on_config_update` if it is another one; of two that come at once, all end with the same. A replica that starts
        later takes it unless its own file is newer. The event `config.changed` says which names changed, and a digest;
        what to, only the record does. Raises ConfigurationError for a file that is broken; what an agent
        finds not valid, it logs, and goes on with what it had.
        """
        ref = Ref("app", RECORD)
        self._allow("admin", ref)
        handle = self.app(ref.id)
        tiers = self.tiers()
        found = await tiers.port.thread(of_fleet, config)
        await tiers.clock.know()
        field = field_of(agent)
        record_codec = self.codec_of(ref.text)

        def changed(raw: bytes | None) -> tuple[Changes, bytes]:
            try:
                before = None if raw is None else record_codec.decode(raw, field)
            except CorruptState:
                before = None  # of a key that is gone, or somebody else's: it is replaced
            changes = handle._changes()
            changes.set(field, {"config": found, "time": tiers.clock.now()})
            return changes, codec.encode(told(before, found, agent), "config")

        def draft(change: tuple[Changes, bytes]) -> Draft:
            changes, data = change
            if len(data) > MAX_EVENT_BYTES:
                raise TooLarge(f"config: its names are {len(data)} bytes, more than the {MAX_EVENT_BYTES} of an event")
            draft = handle._sign(changes.draft("reload_config"))
            draft.events.append((b"e", b"config.changed", data))
            return draft

        name = codec.encode_key(field)
        return (await write_path.swap(tiers, handle._names, name, changed, draft))[1].version

    def _allow(
        self, action: Action, ref: Ref | None = None, *, user: str | None = None, scope: str | None = None
    ) -> None:
        if self.guard is not None:
            self.guard.ask(action, ref, actor=actors.present(), user=user, scope=scope)

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
        """Read what happened from SQL, the newest `limit` events in the order of the servers' clocks, newest last.

        Example::

            for event in await store.audit(conversation="c1", type="conversation.*", limit=20):
                print(event.time, event.type, event.data)

        Only those of a conversation, by its id; about a subject (a record, its text, or what `emit` was given); of a
        type, or of several as "conversation.*"; from a time on, and before another (seconds since 1970). To read on,
        give the `cursor` of the last event as `after`: the first `limit` that follow it, an empty list if there are
        none yet; `after="oldest"` is the beginning. Events that were purged or forgotten are gone.
        Raises ColdUnavailable if the events so far cannot be archived.
        """
        ref, text = audit.about(conversation, subject.ref if isinstance(subject, AsyncRecord) else subject)
        wanted = audit.sought(text, type, since, until, limit, after)
        if ref is None:
            self._allow("read", scope="session")
        else:
            self._allow("read", ref)
        return await audit.audit(self.tiers(), wanted)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
