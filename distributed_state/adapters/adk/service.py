"""The session service of ADK over a store. Law: an event and its changes to the session's state are one commit.

| ADK | here |
|---|---|
| session (app, user, id) | `store.session("app/user/id", user="app/user")`, its events as messages |
| keys `k` of it | field `k` of that |
| keys `user:k` of (app, user) | field `k` of `store.user("app/user")` |
| keys `app:k` of app | field `k` of `store.app("app")` |
| keys `temp:k` | nowhere |

A session has two more fields: `adk:updated`, the time of its last event, by which ADK orders sessions, and
`adk:revision`, the number of events that continued its conversation. An event reads back equal to the stored one.
Reads return the server's current state, each record at one version.

An event's changes to `app:` and `user:` keys go to separate records, in one exchange after the commit. A crash between
the two leaves the event stored with all its changes; when it is appended again, it is recognised and the second step is
completed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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

from distributed_state import (
    ABSENT,
    PRESENT,
    AsyncRecord,
    AsyncSession,
    AsyncStateStore,
    Conflict,
    Deleted,
    InvalidValue,
    StateStore,
)
from distributed_state.adapters.stores import Streamed, Used, joined, newest, open_store, parted, sessions_below

UPDATED = "adk:updated"
REVISION = "adk:revision"
_OURS = "adk:"
_APP, _USER, _TEMP = "app:", "user:", "temp:"
_EVENT = "event"
_USER_AUTHOR = "user"
# Parts of an event that a model does not see: its author, its time, and its changes to the state.
_ASIDE = {
    "id",
    "timestamp",
    "author",
    "invocationId",
    "branch",
    "isolationScope",
    "nodeInfo",
    "actions",
    "customMetadata",
}
_ASIDE_ACTIONS = {"stateDelta", "artifactDelta"}
_PAGE = 100
_ROUNDS = 20


def trimmed(id: str) -> str:
    """A session's id without surrounding whitespace, as in ADK's own services."""
    if not isinstance(id, str):
        raise InvalidValue(f"a session's id is a str, not {id!r:.80}")
    return id.strip()


def stored_name(key: str) -> str:
    """The field that holds a key of the state: the same name, unless that is invalid or used by the adapter."""
    return f"%{key}" if not key or key[0] in "#%" or key.startswith(_OURS) else key


def state_of(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The state in these fields, each key with the prefix."""
    return {
        prefix + (name[1:] if name[0] == "%" else name): value
        for name, value in fields.items()
        if not name.startswith(_OURS)
    }


def merged(session: Mapping[str, Any], user: Mapping[str, Any], app: Mapping[str, Any]) -> dict[str, Any]:
    """The state that a session shows, merged from the fields of the three records."""
    return {**state_of(session), **state_of(app, _APP), **state_of(user, _USER)}


@dataclass(frozen=True, slots=True)
class Delta:
    """A change of the state as fields of the three records. `temp:` keys are left out."""

    session: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    app: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Split a change in ADK's form by record."""
        delta = cls()
        for key, value in state.items():
            if key.startswith(_APP):
                delta.app[stored_name(key.removeprefix(_APP))] = value
            elif key.startswith(_USER):
                delta.user[stored_name(key.removeprefix(_USER))] = value
            elif not key.startswith(_TEMP):
                delta.session[stored_name(key)] = value
        return delta


# Events


def dumped(event: Event) -> dict[str, Any]:
    """The event as JSON values, as ADK writes it: bytes in base64, non-JSON values as null or their `repr`."""
    found: dict[str, Any] = event.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def changed(stored: dict[str, Any]) -> dict[str, Any]:
    """The changes that an event makes to the state."""
    found: dict[str, Any] = stored["actions"]["stateDelta"]
    return found


def continues(stored: dict[str, Any]) -> bool:
    """Whether the event continues the conversation; an event that only changes state or artifacts does not.

    Every part that is not in the lists above continues it: a summary, a rewind, the state of an agent, an error.
    """
    said = {name for name, value in stored.items() if value not in (None, False)}
    acted = {name for name, value in stored["actions"].items() if value}
    return not (said <= _ASIDE and acted <= _ASIDE_ACTIONS)


def as_message(stored: dict[str, Any]) -> dict[str, Any]:
    """The message that holds an event."""
    return {"type": "adk.event", _EVENT: stored}


def as_events(messages: Iterable[dict[str, Any]]) -> list[Event]:
    """The events among a session's messages; messages from other sources are left out."""
    return [Event.model_validate(message[_EVENT]) for message in messages if _EVENT in message]


def holds(messages: Iterable[dict[str, Any]], stored: dict[str, Any]) -> bool:
    """Whether this event is among the messages. Events that share only an id are different."""
    return any(message.get(_EVENT) == stored for message in messages)


# Reading


@dataclass(frozen=True, slots=True)
class Seen:
    """A session at one version: its fields, and the requested messages."""

    fields: dict[str, Any]
    messages: list[dict[str, Any]]


async def look(record: AsyncSession, config: GetSessionConfig | None) -> Seen | None:
    """The session's current state, with the events that `config` requests; None if it does not exist."""
    version = await record.version(fresh=True)
    for _ in range(_ROUNDS):
        # These reads send no request unless the record changes.
        fields = await record.get_all()
        if UPDATED not in fields:
            return None
        messages = await _messages(record, config or GetSessionConfig())
        now = await record.version()
        if now == version:
            break
        version = now
    # The record changes constantly. The fields are then older than the messages: at worst an append finds the session
    # stale.
    return Seen(fields, messages)


async def _messages(record: AsyncSession, config: GetSessionConfig) -> list[dict[str, Any]]:
    if config.after_timestamp is None:
        return await record.raw_messages(last=config.num_recent_events)
    if config.num_recent_events is not None:
        page = await record.raw_messages(last=config.num_recent_events)
        return page[_first_after(page, config.after_timestamp) :]
    found: list[dict[str, Any]] = []
    before = None
    while page := await record.raw_messages(last=_PAGE, before=before):
        first = _first_after(page, config.after_timestamp)
        found = page[first:] + found
        if first or len(page) < _PAGE:
            break
        before = page[0]["number"]
    return found


def _first_after(page: list[dict[str, Any]], timestamp: float) -> int:
    """The length of the page's start that ends with an event before `timestamp`."""
    for at in range(len(page), 0, -1):
        if page[at - 1].get("event", {}).get("timestamp", timestamp) < timestamp:
            return at
    return 0


async def listed(store: AsyncStateStore, app: str, user: str | None) -> list[tuple[str, str, str]]:
    """The sessions of an app, or of one of its users, each as app, user and id."""
    names = [app] if user is None else [app, user]
    # With an owner, callers that may see only their own records can list them.
    owner = None if user is None else joined(*names)
    parts = map(parted, await sessions_below(store, joined(*names, ""), user=owner))
    # A name with more parts does not come from ADK: a session was forked to an id that begins with its own.
    return [(each[0], each[1], each[2]) for each in parts if len(each) == len(("app", "user", "id"))]


_RECENT = 100  # number of messages searched for an event that may already be stored


class DistributedSessionService(BaseSessionService):
    """Sessions of ADK in a store: in place of `DatabaseSessionService(url)`.

    Example::

        async with AsyncStateStore.open(archive="memory") as store:  # or with the URLs of Redis and of PostgreSQL
            service = DistributedSessionService(store)
            runner = Runner(app_name="shop", agent=agent, session_service=service)
            session = await service.create_session(app_name="shop", user_id="ada", state={"city": "Oslo"})
            await service.append_event(session, Event(author="user", actions=EventActions(state_delta={"nights": 2})))
            assert session.state == {"city": "Oslo", "nights": 2}

    An append raises StaleSessionError if another writer has continued the conversation since the session was read, so
    two workers that run one session do not mix their events. Events without content, which only set state, neither make
    a session stale nor fail on a stale one; `append_beside` adds any event in this way. The last write of a key wins.
    One service may be used from several event loops.
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
        """Close the store if the service was created from a URI; a store passed by the caller stays open."""
        if self._owned:
            self._closed = True
            await self._store.close()

    # The records, for other operations of the store

    def session_record(self, *, app_name: str, user_id: str, session_id: str) -> AsyncSession:
        """Return the record of a session. No I/O. Its fields are the state, its messages hold the events."""
        return self._store.session(joined(app_name, user_id, session_id), user=joined(app_name, user_id))

    def user_record(self, *, app_name: str, user_id: str) -> AsyncRecord:
        """Return the record of a user's state. No I/O. Sessions see its field `visits` as `user:visits`.

        `store.forget` with its id removes it and all sessions of that user in this app.
        """
        return self._store.user(joined(app_name, user_id))

    def app_record(self, *, app_name: str) -> AsyncRecord:
        """Return the record of the state that all users of the app share. No I/O."""
        return self._store.app(joined(app_name))

    # BaseSessionService

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Create a session and return it. Raises AlreadyExistsError; only one of two concurrent calls succeeds."""
        await self._ready()
        id = trimmed(session_id or "") or platform_uuid.new_uuid()
        delta = Delta.of(changed(dumped(Event(actions=EventActions(state_delta=state or {})))))
        record = self.session_record(app_name=app_name, user_id=user_id, session_id=id)
        now = platform_time.get_time()
        try:
            # The record may exist without being a session yet; its fields become part of the session.
            fields = {**delta.session, UPDATED: now, REVISION: 0}
            written = await record.write(set=fields, expect={UPDATED: ABSENT}, revive=True)
        except Conflict as error:
            raise AlreadyExistsError(f"Session with id {id} already exists.") from error
        # Written after the commit, so that a refused call has changed nothing.
        await self._share(app_name, user_id, delta)
        user, app = await self._shared(app_name, user_id)
        stored = fields if written.version == 1 else {**await record.get_all(), **fields}
        return self._session(app_name, user_id, id, fields, merged(stored, user, app))

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Read a session as it is now, None if it does not exist; state and events are from one version."""
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
        """List the sessions of a user, or of all users of the app, the least recently changed first.

        Sessions have their states but not their events.
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
        """Remove a session permanently, with its events and history. A missing session is not an error."""
        await self._ready()
        await self._store.erase(joined(app_name, user_id, trimmed(session_id)))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Read the state of a user, keys without their prefix."""
        await self._ready()
        return state_of(await self.user_record(app_name=app_name, user_id=user_id).get_all(fresh=True))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Append an event to the session object and to the store; return it.

        Raises StaleSessionError if another writer continued the conversation, SessionNotFoundError if it does not
        exist. The append can be repeated after other errors: an event that continues the conversation is stored once.
        """
        if event.partial:
            return event
        await self._ready()
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        # Concurrent branches append to one session object; none of them makes it stale for the others.
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
        """Append an event to a stored session while another worker may run it; no session becomes stale.

        For a second writer whose event fits at any place: a note of an operator, a step of an agent that runs in
        parallel. A session object read earlier does not show it until it is read again. Raises SessionNotFoundError.
        """
        if not event.partial:
            await self._ready()
            event = self._trim_temp_delta_state(event)
            await self._store_event(app_name, user_id, trimmed(session_id), dumped(event), None)
        return event

    async def flush(self) -> None:
        """Return at once: appended events are already stored."""

    # Storing

    async def _ready(self) -> None:
        if self._owned and not self._closed:
            await self._store

    async def _store_event(
        self, app_name: str, user_id: str, session_id: str, stored: dict[str, Any], revision: int | None
    ) -> None:
        """Store an event that continues this revision of the conversation, or any revision if it is None."""
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
        """Raise the reason why an event was refused; return if an earlier append has already stored it."""
        if UPDATED not in await record.get_all(fresh=True):
            raise SessionNotFoundError(f"Session {session_id} not found.") from error
        if not holds(await record.raw_messages(last=_RECENT), stored):
            raise StaleSessionError(
                f"Session {session_id} was continued by somebody else since it was read; read it again. {error}"
            ) from error

    async def _share(self, app_name: str, user_id: str, delta: Delta) -> None:
        """Set keys of the user and of the app, in one exchange; each record's change is atomic."""
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
        """The revision of the conversation in this session object."""
        marker = session._storage_update_marker  # noqa: SLF001
        if marker is not None and marker.isdecimal():
            return int(marker)
        # It was not read here, or came through JSON, which omits the marker. Its events show how far it was read.
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
        session._storage_update_marker = str(fields[REVISION])  # noqa: SLF001 - as in ADK's own services
        return session


# Streaming a run


def stream(turn: Any, events: AsyncIterator[Event]) -> Streamed[Event]:
    """Stream the events of a run into a turn; iterate over the return value, which yields the same events.

    Example::

        record = service.session_record(app_name="shop", user_id="ada", session_id="s1")
        async with record.turn(request_id="r1") as turn:
            answer = stream(turn, runner.run_async(user_id="ada", session_id="s1", new_message=question))
            async for event in answer:
                ...
            turn.outcome = answer.text

    Followers are shown the agents' texts as str, each once: with `StreamingMode.SSE` the deltas, otherwise whole texts.
    Each event that is more than a delta of text follows as ADK's own JSON. The turn counts the tokens that events
    report: see `turn.usage`.
    """
    streaming = False  # whether the text of the next whole event was shown by its deltas

    def shown(event: Event) -> Iterator[Any]:
        nonlocal streaming
        parts = (event.content.parts if event.content else None) or []
        texts = [part.text for part in parts if part.text and not part.thought]
        if event.author != _USER_AUTHOR and (event.partial or not streaming):
            yield from texts
        if not event.partial or len(texts) < len(parts):
            yield dumped(event)
        if event.author != _USER_AUTHOR:
            streaming = bool(event.partial) and (streaming or bool(texts))

    return Streamed(turn, events, shown, _used)


def _used(event: Event) -> Iterator[Used]:
    usage = event.usage_metadata
    if usage is not None and not event.partial:  # a delta repeats the numbers of its whole event
        written = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        yield Used(event.model_version, usage.prompt_token_count, written)


# Services by URI, for ADK's command line and web server

_SERVERS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_SETTINGS = ("archive", "namespace")


def register(scheme: str = "distributed") -> None:
    """Let ADK create services from URIs: `distributed+redis://host/0?archive=...&namespace=...`, for each server kind.

    Call it in the `services.py` next to the agents, for ADK's command line and web server, as in `adk web
    --session_service_uri "distributed+redis://localhost:6379/0?archive=postgresql://localhost/agents"`.
    `distributed://?archive=...` runs in this process, archived to SQLite. Further parameters are those of the
    server's URL; write an `&` or `%` in the archive's URL as %26 or %25.
    """
    registry = get_service_registry()
    for name in (scheme, *(f"{scheme}+{server}" for server in _SERVERS)):
        registry.register_session_service(name, _service)


def _service(uri: str, **kwargs: Any) -> DistributedSessionService:
    """The service for a URI. It opens its store at its first use."""
    parts = urlsplit(uri)
    settings: dict[str, str] = {}
    rest: list[str] = []
    for option in filter(None, parts.query.split("&")):
        name, _, value = option.partition("=")
        if name in _SETTINGS:
            settings[name] = unquote(value)  # a plus stays a plus: URLs begin with postgresql+psycopg://
        else:
            rest.append(option)
    server = parts.scheme.partition("+")[2]
    url = urlunsplit(parts._replace(scheme=server, query="&".join(rest))) if server else None
    return DistributedSessionService(
        AsyncStateStore.open(url, archive=settings.get("archive"), namespace=settings.get("namespace")), owned=True
    )
