"""Copies the sessions of any ADK session service into ours, with the state of users and apps.

Law: changes that others made in the target are not overwritten. An event is stored with all its content, but does not
change the state again: the state itself is copied.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from google.adk.sessions.base_session_service import BaseSessionService, GetSessionConfig
from sqlalchemy import Connection, exc, inspect, text

from distributed_state import AsyncRecord, AsyncStateStore, InvalidValue, NotFound, StateStore
from distributed_state.adapters.adk.service import (
    REVISION,
    UPDATED,
    Delta,
    DistributedSessionService,
    as_message,
    continues,
    dumped,
    state_of,
    stored_name,
)
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    canonical,
    deleted,
    demand,
    opened,
    read_only_url,
    sqlite_path,
    untouched,
)
from distributed_state.adapters.stores import joined, parted

_AT_ONCE = 200
_SHARED = ("app:", "user:")
_WITH_NAMES = (
    "SELECT DISTINCT app_name, user_id FROM sessions UNION SELECT app_name, user_id FROM user_states ORDER BY 1, 2"
)


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[Any], DistributedSessionService] = DistributedSessionService,
    apps: Sequence[str] = (),
) -> Threads:
    """The sessions of a service, or of a DatabaseSessionService's URL, and of the target; of `apps`, or of all apps."""
    service = await (
        _of_url(stack, source) if isinstance(source, str) else opened(stack, source, (BaseSessionService,))
    )
    owners = await _owners(service)
    if not apps and owners is None:
        raise InvalidValue("ADK has no listing of apps: name yours by --app")
    chosen = list(apps) or sorted({app for app, _ in owners or ()})
    return Threads(service, into(store), chosen, [each for each in owners or () if each[0] in chosen])


class Threads:
    """The sessions of a service and of the target, the state of each user, and that of each app."""

    def __init__(
        self,
        source: BaseSessionService,
        target: DistributedSessionService,
        apps: Sequence[str],
        owners: Sequence[tuple[str, str]],
    ) -> None:
        self._source = source
        self._target = target
        self._apps = apps
        self._owners = owners
        self._sessions: dict[str, tuple[str, str]] = {}  # one session of each app, used to read the app's state

    async def names(self) -> Sequence[Name]:
        """App, user and id of each session, app and user of each user, and each app."""
        found: list[Name] = []
        for app in self._apps:
            listed = (await self._source.list_sessions(app_name=app)).sessions
            found += [_name(app, each.user_id, each.id) for each in listed]
            users = {each.user_id for each in listed} | {user for of, user in self._owners if of == app}
            found += [_name(app, user) for user in sorted(users)]
            if listed:
                self._sessions[app] = (listed[-1].user_id, listed[-1].id)
                found.append(_name(app))
        return found

    async def compare(self, name: Name) -> Found:
        """Compare a session, or the state that a user's or an app's sessions share."""
        parts = parted("/".join(name))
        return await (
            self._compare_session(*parts) if len(parts) == len(("app", "user", "id")) else self._compare_shared(*parts)
        )

    async def copy(self, name: Name, work: Any) -> None:
        """Copy the missing parts, unless the record has changed since the comparison."""
        record, version, steps = work
        for fields, gone, messages in steps:
            written = await record.write(set=fields, delete=gone, append=messages, expect_version=version)
            version = written.version

    # Sessions

    async def _compare_session(self, app: str, user: str, id: str) -> Found:
        where: Any = {"app_name": app, "user_id": user, "session_id": id}
        record = self._target.session_record(**where)
        if await deleted(record):
            return DELETED
        version = await record.version(fresh=True)
        theirs, ours = await self._source.get_session(**where), await self._target.get_session(**where)
        if theirs is None:
            return EQUAL  # deleted after it was listed
        events = [dumped(event) for event in theirs.events]
        there = [dumped(event) for event in ours.events] if ours else []
        state, has = _own(theirs.state), _own(ours.state) if ours else {}
        ahead = len(there) > len(events) or list(map(canonical, there)) != list(map(canonical, events[: len(there)]))
        same = (
            canonical(state) == canonical(has) and ours is not None and ours.last_update_time == theirs.last_update_time
        )
        if same and not ahead and len(there) == len(events):
            return EQUAL
        if ahead or not await untouched(record):
            return Found(differs="its events are not the same here" if ahead else "it was changed here")
        fields = {**Delta.of(state).session, UPDATED: theirs.last_update_time}
        gone = [stored_name(key) for key in has if key not in state]
        steps = []
        for at in range(len(there), max(len(events), len(there) + 1), _AT_ONCE):
            end = min(at + _AT_ONCE, len(events))
            revision = sum(map(continues, events[:end]))
            steps.append(({**fields, REVISION: revision}, gone, [as_message(each) for each in events[at:end]]))
            gone = []
        return Found(work=(record, version, steps))

    # State that sessions share

    async def _compare_shared(self, app: str, user: str | None = None) -> Found:
        record: AsyncRecord
        if user is None:
            record, state = self._target.app_record(app_name=app), await self._app_state(app)
        else:
            record = self._target.user_record(app_name=app, user_id=user)
            state = await self._source.get_user_state(app_name=app, user_id=user)
        if state and await deleted(record):
            return DELETED
        version = await record.version(fresh=True)
        has = state_of(await record.get_all(fresh=True))
        unlike = sorted(
            key
            for key in {*state, *has}
            if canonical(state.get(key, [])) != canonical(has.get(key, [])) or (key in state) != (key in has)
        )
        if not unlike:
            return EQUAL
        if not await untouched(record):
            return Found(differs=f"it was changed here: {', '.join(unlike)[:200]}")
        fields = {stored_name(key): state[key] for key in unlike if key in state}
        gone = [stored_name(key) for key in unlike if key not in state]
        return Found(work=(record, version, [(fields, gone, [])]))

    async def _app_state(self, app: str) -> dict[str, Any]:
        user, id = self._sessions[app]
        config = GetSessionConfig(num_recent_events=1)
        session = await self._source.get_session(app_name=app, user_id=user, session_id=id, config=config)
        state = session.state if session else {}
        return {key.removeprefix("app:"): value for key, value in state.items() if key.startswith("app:")}


def _name(*parts: str) -> Name:
    return tuple(joined(part) for part in parts)


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a session's state that is not shared."""
    return {key: value for key, value in state.items() if not key.startswith(_SHARED)}


# ADK's own services


async def _owners(service: Any) -> list[tuple[str, str]] | None:
    """The apps of a service and their users; None if unknown, as the interface cannot list them."""
    if hasattr(service, "db_engine"):
        await service.prepare_tables()
        async with service.db_engine.connect() as connection:
            return [(str(app), str(user)) for app, user in await connection.execute(text(_WITH_NAMES))]
    if isinstance(sessions := getattr(service, "sessions", None), dict):
        users = {(app, user) for each in (sessions, service.user_state) for app in each for user in each[app]}
        return sorted(users)
    return None


async def _of_url(stack: AsyncExitStack, url: str) -> Any:
    """ADK's service of a database, closed with the stack. Raises NotFound if the database lacks ADK's tables."""
    from google.adk.sessions.database_session_service import DatabaseSessionService

    class ReadOnly(DatabaseSessionService):  # type: ignore[misc, unused-ignore] # it has no types
        async def prepare_tables(self) -> None:
            """Do nothing: ADK's implementation creates tables and indexes here."""

        async def find_schema(self) -> None:
            try:
                async with self.db_engine.connect() as connection:
                    self._db_schema_version = await connection.run_sync(_schema_version)
            except exc.DatabaseError as error:
                if error.connection_invalidated or "not a database" not in str(error.orig):
                    raise
                raise NotFound(f"no tables of ADK in the source: {error.orig}") from error

    path = sqlite_path(url)
    if path is not None:
        url = read_only_url(path, "sqlite+aiosqlite")
    elif url.startswith("postgresql:"):
        # psycopg also works with asyncio; SQLAlchemy's default is another driver.
        url = "postgresql+psycopg" + url[len("postgresql") :]
    service = ReadOnly(url)
    stack.push_async_callback(service.close)
    await service.find_schema()
    return service


def _schema_version(connection: Connection) -> str:
    """The version of ADK's schema that the tables have. Raises NotFound if they match neither."""
    from google.adk.sessions.schemas import v0, v1

    looked = inspect(connection)
    columns = {each["name"] for each in looked.get_columns("events")} if looked.has_table("events") else set()
    is_former = "actions" in columns and "event_data" not in columns
    tables = (v0 if is_former else v1).Base.metadata.sorted_tables
    demand(connection, "ADK", {table.name: [column.name for column in table.columns] for table in tables})
    return "0" if is_former else "1"
