"""The session service of ADK over a store. Law: an event and what it does to its session's state are one commit.

What it does to keys `app:` and `user:` is in records of their own, and follows in one exchange. A crash between the two
leaves the event with all that it was to change in it; appended once more, it is recognised, and the rest is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit, urlunsplit
from weakref import WeakValueDictionary

from google.adk.cli.service_registry import get_service_registry
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.platform import time as platform_time
from google.adk.platform import uuid as platform_uuid
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import BaseSessionService, GetSessionConfig, ListSessionsResponse

from distributed_state import ABSENT, PRESENT, AsyncRecord, AsyncSession, AsyncStateStore, Conflict, Deleted, StateStore
from distributed_state.adapters.adk.layout import (
    REVISION,
    UPDATED,
    Delta,
    as_events,
    as_message,
    changed,
    continues,
    dumped,
    holds,
    joined,
    listed,
    look,
    merged,
    newest,
    state_of,
    trimmed,
)
from distributed_state.adapters.stores import open_store

_RECENT = 100  # messages among which an event is looked for that may have been stored before


class DistributedSessionService(BaseSessionService):
    """Sessions of ADK in a store: in place of `DatabaseSessionService(url)`.

    Example::

        async with AsyncStateStore.open(archive="memory") as store:  # or with the URLs of Redis and of PostgreSQL
            service = DistributedSessionService(store)
            runner = Runner(app_name="shop", agent=agent, session_service=service)
            session = await service.create_session(app_name="shop", user_id="ada", state={"city": "Oslo"})
            await service.append_event(session, Event(author="user", actions=EventActions(state_delta={"nights": 2})))
            assert session.state == {"city": "Oslo", "nights": 2}

    An append raises StaleSessionError if somebody else went on with the conversation since the session was read: two
    workers that run one session do not mix their events. Who only sets state, by an event without content, makes no
    session stale and finds none so; `append_beside` adds any event so. Of one key the last writer counts. One service
    may be used from several event loops.
    """

    def __init__(self, store: AsyncStateStore | StateStore, *, owned: bool = False) -> None:
        # `owned`: opened at first use and closed with the service
        self._store = open_store(store).aio
        self._owned = owned
        self._closed = False
        self._appending: WeakValueDictionary[tuple[int, int], asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store if the service was made of a URI; one that was given stays open."""
        if self._owned:
            self._closed = True
            await self._store.close()

    # The records, for whatever the store can do beside

    def session_record(self, *, app_name: str, user_id: str, session_id: str) -> AsyncSession:
        """Return the record of a session. No I/O. Its fields are the state, its messages hold the events."""
        return self._store.session(joined(app_name, user_id, session_id), user=joined(app_name, user_id))

    def user_record(self, *, app_name: str, user_id: str) -> AsyncRecord:
        """Return the record of a user's state. No I/O. `increment("visits")` adds to what sessions see as user:visits.

        `store.forget` of its id removes it with all sessions of that user in this app.
        """
        return self._store.user(joined(app_name, user_id))

    def app_record(self, *, app_name: str) -> AsyncRecord:
        """Return the record of the state that all users of the app share. No I/O."""
        return self._store.app(joined(app_name))

    # BaseSessionService

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Create a session and return it. Raises AlreadyExistsError; of two that create one, one does."""
        await self._ready()
        id = trimmed(session_id or "") or platform_uuid.new_uuid()
        delta = Delta.of(changed(dumped(Event(actions=EventActions(state_delta=state or {})))))
        record = self.session_record(app_name=app_name, user_id=user_id, session_id=id)
        now = platform_time.get_time()
        try:
            # Something may be there that is no session yet: what somebody wrote to its record. It becomes part of it.
            fields = {**delta.session, UPDATED: now, REVISION: 0}
            written = await record.write(set=fields, expect={UPDATED: ABSENT}, revive=True)
        except Conflict as error:
            raise AlreadyExistsError(f"Session with id {id} already exists.") from error
        # Behind it: who is refused has changed nothing.
        await self._share(app_name, user_id, delta)
        user, app = await self._shared(app_name, user_id)
        stored = fields if written.version == 1 else {**await record.get_all(), **fields}
        return self._session(app_name, user_id, id, fields, merged(stored, user, app))

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Read a session as it is now, None if there is none; its state and its events are of one version."""
        await self._ready()
        id = trimmed(session_id)
        record = self.session_record(app_name=app_name, user_id=user_id, session_id=id)
        seen, (user, app) = await asyncio.gather(look(record, config), self._shared(app_name, user_id))
        if seen is None:
            return None
        return self._session(
            app_name, user_id, id, seen.fields, merged(seen.fields, user, app), as_events(seen.messages)
        )

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """List the sessions of a user, or of all users of the app, the one that changed longest ago first.

        They come with their states and without their events.
        """
        await self._ready()
        ids = await listed(self._store, app_name, user_id)
        owners = sorted({joined(app, user) for app, user, _ in ids})
        shared = await self.app_record(app_name=app_name).get_all(fresh=True)
        users = dict(zip(owners, await newest(map(self._store.user, owners)), strict=True))
        sessions = await newest(self.session_record(app_name=app, user_id=user, session_id=id) for app, user, id in ids)
        found = []
        for (app, user, id), fields in zip(ids, sessions, strict=True):
            if UPDATED in fields:
                state = merged(fields, users[joined(app, user)], shared)
                found.append(self._session(app, user, id, fields, state))
        found.sort(key=lambda session: (session.last_update_time, session.user_id, session.id))
        return ListSessionsResponse(sessions=found)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Remove a session for good, its events and history too. One that is not there is no error."""
        await self._ready()
        await self._store.erase(joined(app_name, user_id, trimmed(session_id)))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Read the state of a user, keys without their prefix."""
        await self._ready()
        return state_of(await self.user_record(app_name=app_name, user_id=user_id).get_all(fresh=True))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Append an event to a session, here and in the store; return it.

        Raises StaleSessionError if the conversation went on elsewhere, SessionNotFoundError if there is none.
        Appended once more after any other error, an event that continues the conversation is stored once.
        """
        if event.partial:
            return event
        await self._ready()
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        # Branches that run at once append to one session object, and neither makes it stale for the other.
        key = (id(asyncio.get_running_loop()), id(session))
        lock = self._appending.setdefault(key, asyncio.Lock())
        async with lock:
            stored = dumped(event)
            revision = await self._revision(session) if continues(stored) else None
            await self._store_event(session.app_name, session.user_id, session.id, stored, revision)
            if revision is not None:
                session._storage_update_marker = str(revision + 1)  # noqa: SLF001
            session.last_update_time = event.timestamp
            return self._commit_event_to_session(session, event)

    async def append_beside(self, event: Event, *, app_name: str, user_id: str, session_id: str) -> Event:
        """Append an event to a stored session whoever runs it meanwhile, and make no session stale by it.

        For a second writer that knows its event to be in order wherever it comes: a note of an operator, a step of an
        agent that runs beside. Who has read the session does not see it before the session is read again.
        Raises SessionNotFoundError.
        """
        if not event.partial:
            await self._ready()
            event = self._trim_temp_delta_state(event)
            await self._store_event(app_name, user_id, trimmed(session_id), dumped(event), None)
        return event

    async def flush(self) -> None:
        """Return at once: what was appended is stored."""

    # Storing

    async def _ready(self) -> None:
        if self._owned and not self._closed:
            await self._store

    async def _store_event(
        self, app_name: str, user_id: str, session_id: str, stored: dict[str, Any], revision: int | None
    ) -> None:
        """Store an event, as the one that continues this revision of the conversation, or beside it."""
        record = self.session_record(app_name=app_name, user_id=user_id, session_id=session_id)
        delta = Delta.of(changed(stored))
        fields = {**delta.session, UPDATED: stored["timestamp"]}
        expect: dict[str, Any] = {UPDATED: PRESENT}
        if revision is not None:
            fields[REVISION] = revision + 1
            expect = {REVISION: revision}
        try:
            await record.write(set=fields, append=[as_message(stored)], expect=expect)
        except (Conflict, Deleted) as error:
            await self._refused(record, session_id, stored, error)
        await self._share(app_name, user_id, delta)

    async def _refused(self, record: AsyncSession, session_id: str, stored: dict[str, Any], error: Exception) -> None:
        """Say why an event was refused; return if it is stored already, as it was appended before."""
        if UPDATED not in await record.get_all(fresh=True):
            raise SessionNotFoundError(f"Session {session_id} not found.") from error
        if not holds(await record.raw_messages(last=_RECENT), stored):
            raise StaleSessionError(
                f"Session {session_id} was continued by somebody else since it was read; read it again. {error}"
            ) from error

    async def _share(self, app_name: str, user_id: str, delta: Delta) -> None:
        """Set keys of the user and of the app, in one exchange; each record is changed wholly or not at all."""
        if not delta.user and not delta.app:
            return
        async with self._store.batch() as batch:
            if delta.user:
                batch.on(self.user_record(app_name=app_name, user_id=user_id)).set_many(delta.user)
            if delta.app:
                batch.on(self.app_record(app_name=app_name)).set_many(delta.app)

    # Reading

    async def _shared(self, app_name: str, user_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        user, app = await newest(
            [self.user_record(app_name=app_name, user_id=user_id), self.app_record(app_name=app_name)]
        )
        return user, app

    async def _revision(self, session: Session) -> int:
        """The revision of the conversation that this session shows."""
        marker = session._storage_update_marker  # noqa: SLF001
        if marker is not None and marker.isdecimal():
            return int(marker)
        # It was not read from here, or came by JSON, which leaves the marker out. It shows what it has seen.
        record = self.session_record(app_name=session.app_name, user_id=session.user_id, session_id=session.id)
        seen = await look(record, GetSessionConfig(num_recent_events=1))
        if seen is None:
            raise SessionNotFoundError(f"Session {session.id} not found.")
        last = [event.id for event in as_events(seen.messages)]
        if seen.fields[UPDATED] > session.last_update_time and last != [event.id for event in session.events[-1:]]:
            raise StaleSessionError(f"Session {session.id} was changed since it was read; read it again.")
        revision: int = seen.fields[REVISION]
        return revision

    def _session(
        self,
        app_name: str,
        user_id: str,
        id: str,
        fields: dict[str, Any],
        state: dict[str, Any],
        events: Iterable[Event] = (),
    ) -> Session:
        session = Session(
            app_name=app_name,
            user_id=user_id,
            id=id,
            state=state,
            events=list(events),
            last_update_time=fields[UPDATED],
        )
        session._storage_update_marker = str(fields[REVISION])  # noqa: SLF001 - where the services of ADK keep theirs
        return session


# Services by URI, for ADK's command line and web server

_SERVERS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_SETTINGS = ("archive", "namespace")


def register(scheme: str = "distributed") -> None:
    """Let ADK make services of URIs: `distributed+redis://host/0?archive=...&namespace=...`, for each kind of server.

    Called in the `services.py` beside the agents, it serves ADK's command line and web server, as in `adk web
    --session_service_uri "distributed+redis://localhost:6379/0?archive=postgresql://localhost/agents"`.
    `distributed://?archive=...` alone runs in this process, archived to SQLite. Further parameters are those of the
    server's URL; an `&` or `%` within the archive's is written as %26 or %25.
    """
    registry = get_service_registry()
    for name in (scheme, *(f"{scheme}+{server}" for server in _SERVERS)):
        registry.register_session_service(name, _service)


def _service(uri: str, **kwargs: Any) -> DistributedSessionService:
    """The service that a URI names. It opens its store at its first use."""
    parts = urlsplit(uri)
    settings: dict[str, str] = {}
    rest: list[str] = []
    for option in filter(None, parts.query.split("&")):
        name, _, value = option.partition("=")
        if name in _SETTINGS:
            settings[name] = unquote(value)  # no plus becomes a space: databases are named as postgresql+psycopg://
        else:
            rest.append(option)
    server = parts.scheme.partition("+")[2]
    url = urlunsplit(parts._replace(scheme=server, query="&".join(rest))) if server else None
    return DistributedSessionService(
        AsyncStateStore.open(url, archive=settings.get("archive"), namespace=settings.get("namespace")), owned=True
    )
