"""Agno's sessions, runs and user memories as records of a store. Law: a save writes one record, and only its changes.

| Agno | here |
|---|---|
| session | `store.session("agno_sessions/id", user=user_id)` |
| its columns, its `session_data[k]`, its `session_state[k]` | fields `row/...`, `data/k`, `state/k` of that session |
| run | an item of its session's collection `runs`, whose key gives its place in the order |
| place of a run | `store.task("agno_runs/id", user=user_id)`: the id of its session, and the key there |
| user memory | field `agno_memories/id` of `store.user(user_id)`; without a user of `store.app("agno_memories")` |
| metrics of a user on a day | `store.task("agno_metrics/day/id", user=user_id)`, counted from the sessions here |

The first part of an id is the name of Agno's table. User records with memories have its name as a tag `agno`. Values
that two workers may change independently are in separate fields.

Agno reads a session, changes a key of its state and saves the whole session. So a session object keeps the fields that
were read, a save writes the difference, and two concurrent saves do not undo each other.

A run is an item of its session, stored in one commit, and is removed with its session. Agno requests a run only by its
id, so a record with that id points to the run: it is written before the run, and removed after it. A pointer without
its run, left by a worker killed in between, is ignored. A memory is a field of its user's record; a request without a
user searches all users.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any
from uuid import uuid4

from agno.db.base import SessionType
from agno.db.in_memory.utils import (
    apply_sorting,
    calculate_date_metrics,
    fetch_all_sessions_data,
    get_dates_to_calculate_metrics_for,
)
from agno.db.schemas.memory import UserMemory
from agno.db.utils import (
    build_single_run_row,
    deserialize_run,
    deserialize_session,
    filter_context_runs,
    get_run_type,
    json_serializer,
    metrics_starting_date_from_records,
    validate_pagination,
)
from agno.exceptions import AgnoError
from agno.run.base import RunStatus
from agno.session import AgentSession, TeamSession, WorkflowSession

from distributed_state import (
    ABSENT,
    PRESENT,
    AsyncRecord,
    AsyncSession,
    AsyncStateStore,
    Conflict,
    Deleted,
    DeleteItem,
    Item,
    PutItem,
)
from distributed_state.adapters.stores import every

ROW, DATA, STATE = "row/", "data/", "state/"
ID, OWNER, KIND = "row/session_id", "row/user_id", "row/session_type"
HAS_DATA, _HAS_STATE = "has/data", "has/state"  # they may exist and be empty
RUNS = "runs"  # the collection
TAG = "agno"


def joined(table: str, id: str) -> str:
    """The id of the record for an object of one of Agno's tables."""
    return f"{table.replace('%', '%25').replace('/', '%2F')}/{id}"


def plain(value: Any) -> Any:
    """The value as JSON values, by Agno's own rules."""
    return json.loads(json_serializer(value))


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that hold a session, without its runs."""
    fields: dict[str, Any] = {ROW + name: value for name, value in row.items() if name not in ("runs", "session_data")}
    data = row.get("session_data")
    if isinstance(data, dict):
        fields[HAS_DATA] = True
        fields.update({DATA + key: value for key, value in data.items() if key != "session_state"})
        state = data.get("session_state")
        if isinstance(state, dict):
            fields[_HAS_STATE] = True
            fields.update({STATE + key: value for key, value in state.items()})
        elif "session_state" in data:
            fields[DATA + "session_state"] = state
    return fields


def row_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The session that these fields hold, without its runs."""
    row = _behind(fields, ROW)
    row["session_data"] = None
    if HAS_DATA in fields:
        row["session_data"] = _behind(fields, DATA)
        if _HAS_STATE in fields:
            row["session_data"]["session_state"] = _behind(fields, STATE)
    return row


def run_key(index: int, run: Mapping[str, Any]) -> str:
    """The key of a run among those of its session: by its index, then its time."""
    return f"{max(index, 0):012}/{int(run.get('created_at') or time.time()):012}/{run['run_id']}"


def index_of(key: str) -> int:
    """The index that a run's key was made with."""
    return int(key.partition("/")[0])


def own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that belong to the session's row."""
    return {name: value for name, value in fields.items() if name.startswith((ROW, DATA, STATE, "has/"))}


def _behind(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


_PAGE = 1000
_RECORDS_AT_ONCE = 200
_RUNS_AT_ONCE = 100
_READ_AS = "_distributed_state_read_as"  # an attribute of a session object; Agno's to_dict leaves it out
_ROUNDS = 100
_KINDS = ((AgentSession, SessionType.AGENT), (TeamSession, SessionType.TEAM), (WorkflowSession, SessionType.WORKFLOW))
_COMPONENTS = {"agent": ("agent_id",), "team": ("team_id",), "workflow": ("workflow_id",)}


class NeedsOthers(AgnoError, NotImplementedError):
    """A method of a family of data that only another database keeps. AgentOS answers 501, and names this class."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status_code=501)


class Records:
    """The sessions, runs, memories and metrics of Agno's databases."""

    def __init__(self, store: AsyncStateStore, sessions: str, runs: str, memories: str, metrics: str) -> None:
        # The names of Agno's tables
        self._store = store
        self._sessions = sessions
        self._runs = runs
        self._memories = memories
        self._metrics = metrics

    def _session(self, id: str, user_id: str | None = None) -> AsyncSession:
        return self._store.session(joined(self._sessions, id), user=user_id)

    def _pointer(self, run_id: str, user_id: str | None = None) -> AsyncRecord:
        return self._store.task(joined(self._runs, run_id), user=user_id)

    def _of_user(self, user_id: str | None) -> AsyncRecord:
        return self._store.user(user_id) if user_id else self._store.app(self._memories)

    # Sessions

    async def get_session(
        self,
        session_id: str,
        session_type: SessionType | None = None,
        user_id: str | None = None,
        deserialize: bool | None = True,
        runs_limit: int | None = None,
    ) -> Any:
        """Read a session, None if that user has no such session; with `runs_limit` only its newest runs."""
        fields = await self._session(session_id).get_all(fresh=True)
        if ID not in fields or (user_id is not None and fields[OWNER] != user_id):
            return None
        fields[ID] = session_id  # the session may be a fork of another one
        row = {**row_of(fields), "runs": await self._runs_of(session_id, runs_limit)}
        return _as_session(session_type, row, fields) if deserialize else row

    async def get_sessions(
        self,
        session_type: SessionType | None = None,
        user_id: str | None = None,
        component_id: str | None = None,
        session_name: str | None = None,
        start_timestamp: int | None = None,
        end_timestamp: int | None = None,
        limit: int | None = None,
        page: int | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        deserialize: bool | None = True,
        include_runs: bool = True,
    ) -> Any:
        """List sessions; without `deserialize` a page of them and the total number."""
        kind = session_type.value if isinstance(session_type, SessionType) else session_type
        named = {name for each, names in _COMPONENTS.items() if kind in (None, each) for name in names}
        found: dict[str, dict[str, Any]] = {}
        rows = []
        for fields in await self._all(user_id):
            row = row_of(fields)
            name = (row["session_data"] or {}).get("session_name") or ""
            if (
                (user_id is None or row["user_id"] == user_id)
                and (kind is None or row["session_type"] == kind)
                and (component_id is None or component_id in {row.get(each) for each in named})
                and (session_name is None or session_name.lower() in name.lower())
                and (start_timestamp is None or (row["created_at"] or 0) >= start_timestamp)
                and (end_timestamp is None or (row["created_at"] or 0) <= end_timestamp)
            ):
                found[row["session_id"]] = fields
                rows.append(row)
        shown = _page(rows, limit, page, sort_by, sort_order)
        for row in shown:
            row["runs"] = await self._runs_of(row["session_id"]) if include_runs else None
        if not deserialize:
            return shown, len(rows)
        return [_as_session(session_type, row, found[row["session_id"]]) for row in shown]

    async def upsert_session(self, session: Any, deserialize: bool | None = True) -> Any:
        """Save a session and return it; None if another user owns it. `upsert_run` saves its runs."""
        return await self._upsert(session, deserialize, int(time.time()))

    async def upsert_sessions(
        self, sessions: Sequence[Any], deserialize: bool | None = True, preserve_updated_at: bool = False
    ) -> list[Any]:
        """Save these sessions, each in its own commit; with `preserve_updated_at` their times stay."""
        results = []
        for session in filter(None, sessions):
            updated = session.updated_at if preserve_updated_at else None
            results.append(await self._upsert(session, deserialize, updated or int(time.time())))
        return [each for each in results if each is not None]

    async def _upsert(self, session: Any, deserialize: bool | None, now: int) -> Any:
        row = plain(session.to_dict(include_runs=False))
        row["session_type"] = next(kind.value for each, kind in _KINDS if isinstance(session, each))
        row["created_at"] = row.get("created_at") or now
        fields = fields_of({**row, "updated_at": now})
        record = self._session(session.session_id, row["user_id"])
        known = getattr(session, _READ_AS, None)
        stored, begins = await self._save(record, fields, known)
        if stored is None:
            return None
        if begins:
            for index, run in enumerate(session.runs or []):
                await self.upsert_run(run, session.session_id, row["user_id"], run_index=index)
        setattr(session, _READ_AS, own(stored))
        saved = row_of(stored)
        if not deserialize:
            return {**saved, "runs": [run if isinstance(run, dict) else run.to_dict() for run in session.runs or []]}
        given = _as_session(None, saved, stored)
        given.runs = session.runs
        return given

    async def _save(
        self, record: AsyncSession, fields: dict[str, Any], known: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, bool]:
        """Save a session: its fields afterwards, None if another user owns it; and whether this call created it."""
        was_read = known is not None
        for _ in range(_ROUNDS):
            # An object that was created without reading the session replaces the session: missing fields are deleted.
            base = await record.get_all(fresh=True) if known is None else known
            begins = ID not in base  # also if the record exists but is not a session, such as a late rename
            if not begins and base[OWNER] not in (None, fields[OWNER]):
                return None, False
            changed = {name: value for name, value in fields.items() if name not in base or base[name] != value}
            gone = [name for name in own(base) if name not in fields]
            if not changed and not gone:
                return fields, False
            try:
                await record.write(set=changed, delete=gone, expect={ID: ABSENT} if begins else {OWNER: base[OWNER]})
                return fields, begins
            except Deleted:
                if was_read:  # a run that began before the deletion must not restore the session
                    raise
                if begins:
                    with suppress(Conflict):
                        await record.create(fields)  # owned by the user who creates it now, not by the earlier owner
                        return fields, True
            except Conflict:
                pass
            # It was deleted, or has an owner now. A caller that had read it continues from the fields it read.
            now = await record.get_all(fresh=True)
            known = {**known, OWNER: now[OWNER]} if known is not None and ID in now else None
        raise Conflict(f"{record}: is deleted and created again faster than it can be saved")

    async def rename_session(
        self,
        session_id: str,
        session_type: SessionType | None,
        session_name: str,
        user_id: str | None = None,
        deserialize: bool | None = True,
    ) -> Any:
        """Name a session and return it; None if no session has that type and user."""
        record = self._session(session_id)
        fields = await record.get_all(fresh=True)
        kind = session_type.value if isinstance(session_type, SessionType) else session_type
        if ID not in fields or kind not in (None, fields[KIND]) or user_id not in (None, fields[OWNER]):
            return None
        name = {DATA + "session_name": session_name, HAS_DATA: True}
        try:
            await record.write(set=name, expect={ID: PRESENT})
        except (Conflict, Deleted):
            return None  # deleted just now
        return await self.get_session(session_id, session_type, user_id, deserialize)

    async def reassign_session_owner(self, session_id: str, *, previous_user_id: str, user_id: str | None) -> bool:
        """Refuse to: by its owner, `store.forget` finds a session with its history."""
        raise NotImplementedError("reassign_session_owner: the owner of a session never changes; copy it to another id")

    async def delete_session(self, session_id: str, user_id: str | None = None) -> bool:
        """Remove a session and its runs permanently; False if that user has no such session."""
        fields = await self._session(session_id).get_all(fresh=True)
        if ID not in fields or (user_id is not None and fields[OWNER] != user_id):
            return False
        # The session is removed last: if the worker is killed in between, a repeated call still finds the remaining
        # runs.
        for run in await self._runs_of(session_id):
            await self._store.erase(joined(self._runs, run["run_id"]), scope="task")
        await self._store.erase(joined(self._sessions, session_id))
        return True

    async def delete_sessions(self, session_ids: Sequence[str], user_id: str | None = None) -> None:
        """Remove these sessions, only those of `user_id` if it is given."""
        for id in session_ids:
            await self.delete_session(id, user_id)

    # Runs

    async def upsert_run(
        self, run: Any, session_id: str, user_id: str | None = None, run_index: int | None = None
    ) -> None:
        """Store or update a run in one commit of its session; a new run needs another commit before it.

        An existing run keeps its place. A run of a missing session is not stored. Raises ValueError for a run without
        an id.
        """
        row = plain(run if isinstance(run, dict) else run.to_dict())
        id = row.get("run_id")
        if id is None:
            raise ValueError("Run must have a run_id")
        # Read without a request to the server, because the commit checks the place that this process knows.
        known = await self._pointer(id).get_all()
        if known and await self._put(known, row, if_present=True):
            return
        place = await self._place(row, session_id, user_id, run_index)
        if place is not None:
            await self._put(place, row)

    async def _put(self, place: dict[str, Any], row: dict[str, Any], *, if_present: bool = False) -> bool:
        """Store a run at its place; False if its session does not exist, or with `if_present` the run does not."""
        item = PutItem(collection=RUNS, key=place["key"], value=row, if_present=if_present)
        try:
            await self._session(place["session_id"]).write(items=[item], expect={ID: PRESENT})
        except (Conflict, Deleted):
            return False
        return True

    async def _place(
        self, row: dict[str, Any], session_id: str, user_id: str | None, run_index: int | None
    ) -> dict[str, Any] | None:
        """The place for a run: its old place, or after the other runs; None if the session does not exist."""
        session = self._session(session_id)
        fields, known = await self._store.get_many([session, self._pointer(row["run_id"])], fresh=True)
        if known:
            its = self._session(known["session_id"])
            if ID in (fields if known["session_id"] == session_id else await its.get_all(fresh=True)):
                return dict(known)
        if ID not in fields:
            return None
        index = row.get("run_index") if run_index is None else run_index
        if index is None:
            newest = (await session.items(RUNS).list(limit=1, reverse=True)).items
            index = index_of(newest[0].key) + 1 if newest else 0
        place = {"session_id": session_id, "key": run_key(index, row)}
        # The session's owner also owns the records that point to it: `store.forget` of a user finds both.
        pointer = self._pointer(row["run_id"], user_id or fields[OWNER])
        try:
            await pointer.write(set=place, expect={"key": known.get("key", ABSENT)}, revive=True)
        except Conflict:
            return await pointer.get_all(fresh=True) or None  # another worker is storing it too
        return place

    async def get_run(self, run_id: str, deserialize: bool | None = True) -> Any:
        """Read a run, None if it does not exist."""
        place = await self._pointer(run_id).get_all(fresh=True)
        if not place:
            return None
        session = self._session(place["session_id"])
        run = await session.items(RUNS).get(place["key"])
        if run is None or deserialize:
            return None if run is None else deserialize_run(get_run_type(run), run)
        return _table_row(run, place["key"], {ID: place["session_id"], OWNER: await session.get(OWNER, fresh=True)})

    async def cancel_pending_run(
        self, run_id: str, *, session_id: str, reason: str, user_id: str | None = None, expected_status: str = "PENDING"
    ) -> bool:
        """Cancel a run that has this status, and return whether it had. Changes of others meanwhile are kept."""
        if expected_status not in ("PENDING", "RUNNING"):
            raise ValueError("Only Pending or Running runs can be cancelled by recovery")
        place = await self._pointer(run_id).get_all(fresh=True)
        if place.get("session_id") != session_id:
            return False
        session = self._session(session_id)
        for _ in range(_ROUNDS):
            owner = await session.get(OWNER, fresh=True)
            item = await session.items(RUNS).find(place["key"])
            if item is None or owner not in (None, user_id) or item.value.get("status") != expected_status:
                return False
            run = {**item.value, "status": RunStatus.cancelled.value, "content": item.value.get("content") or reason}
            with suppress(Conflict, Deleted):  # it went on meanwhile, or its session was removed
                put = PutItem(collection=RUNS, key=place["key"], value=run, equals=item)
                await session.write(items=[put], expect={ID: PRESENT, OWNER: owner})
                return True
        raise Conflict(f"run {run_id!r:.80}: changes faster than it can be cancelled")

    async def get_runs(
        self,
        session_id: str | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        team_id: str | None = None,
        workflow_id: str | None = None,
        status: RunStatus | str | None = None,
        limit: int | None = None,
        page: int | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        deserialize: bool | None = True,
    ) -> Any:
        """Read runs of a session, or of all, in their order; without `deserialize` a page of rows and their number."""
        wanted = {"agent_id": agent_id, "team_id": team_id, "workflow_id": workflow_id}
        wanted["status"] = status.value if isinstance(status, RunStatus) else status
        if session_id is None:
            sessions = await self._all(user_id)
        else:
            sessions = [{**await self._session(session_id).get_all(fresh=True), ID: session_id}]
        found: list[dict[str, Any]] = []
        for fields in sessions:
            if user_id in (None, fields.get(OWNER)):
                runs = await self._items_of(fields[ID])
                found += [_table_row(each.value, each.key, fields) for each in runs]
        found = [row for row in found if all(value in (None, row.get(name)) for name, value in wanted.items())]
        rows = _page(found, limit, page, sort_by, sort_order)
        return (
            [deserialize_run(row["run_type"], row["run_data"]) for row in rows] if deserialize else (rows, len(found))
        )

    async def delete_run(self, run_id: str) -> bool:
        """Remove a run; False if it does not exist."""
        pointer = self._pointer(run_id)
        place = await pointer.get_all(fresh=True)
        if not place:
            return False
        there = False
        with suppress(Conflict, Deleted):  # the run or its session was already removed
            item = DeleteItem(collection=RUNS, key=place["key"], if_present=True)
            await self._session(place["session_id"]).write(items=[item], expect={ID: PRESENT})
            there = True
        await self._store.erase(pointer.id, scope="task")
        return there

    async def delete_runs(self, run_ids: Sequence[str]) -> None:
        """Remove these runs."""
        for id in run_ids:
            await self.delete_run(id)

    async def _items_of(self, session_id: str) -> list[Item]:
        return await every(self._session(session_id).items(RUNS))

    async def _runs_of(self, session_id: str, last: int | None = None) -> list[dict[str, Any]]:
        """The runs of a session in their order; with `last` only the newest ones in its context."""
        if last is None:
            return [item.value for item in await self._items_of(session_id)]
        runs = self._session(session_id).items(RUNS)
        size = min(max(2 * last, 1), _RUNS_AT_ONCE)
        found: list[dict[str, Any]] = []
        before = None
        while True:
            page = await runs.list(before=before, limit=size, reverse=True)
            found += filter_context_runs([item.value for item in page.items])
            before = page.next
            if before is None or len(found) >= last:
                return found[:last][::-1]

    async def _all(self, user_id: str | None) -> list[dict[str, Any]]:
        """The fields of all sessions, or of those of a user."""
        prefix = joined(self._sessions, "")
        ids = await _every(self._store, "session", prefix, user=user_id)
        read = await _in_pieces(self._store, [self._store.session(id, user=user_id) for id in ids])
        # A forked session has the fields of another one, so its id is taken from its record.
        return [{**fields, ID: id.removeprefix(prefix)} for id, fields in zip(ids, read, strict=True) if ID in fields]

    # User memories

    async def _memories_of(self, user_id: str | None) -> dict[str, dict[str, Any]]:
        """All memories by their ids, of a user or of all."""
        records = [self._of_user(user_id)]
        if user_id is None:
            records += map(self._store.user, await _every(self._store, "user", "", tags={TAG: self._memories}))
        prefix = joined(self._memories, "")
        return {
            name.removeprefix(prefix): memory
            for fields in await _in_pieces(self._store, records)
            for name, memory in fields.items()
            if name.startswith(prefix)
        }

    async def upsert_user_memory(self, memory: UserMemory, deserialize: bool | None = True) -> Any:
        """Store a memory and return it, in one commit of its user's record. A memory without an id gets one."""
        return await self._remember(memory, deserialize, int(time.time()))

    async def upsert_memories(
        self, memories: Sequence[UserMemory], deserialize: bool | None = True, preserve_updated_at: bool = False
    ) -> list[Any]:
        """Store these memories."""
        found = []
        for memory in filter(None, memories):
            updated = memory.updated_at if preserve_updated_at else None
            found.append(await self._remember(memory, deserialize, updated or int(time.time())))
        return found

    async def _remember(self, memory: UserMemory, deserialize: bool | None, now: int) -> Any:
        if memory.memory_id is None:
            memory.memory_id = str(uuid4())
        stored = plain({**memory.to_dict(), "updated_at": now})
        named = {joined(self._memories, memory.memory_id): stored}
        await self._of_user(memory.user_id).write(set=named, tag={TAG: self._memories}, revive=True)
        return UserMemory.from_dict(stored) if deserialize else stored

    async def get_user_memory(
        self, memory_id: str, deserialize: bool | None = True, user_id: str | None = None
    ) -> UserMemory | dict[str, Any] | None:
        """Read a memory, None if that user has no such memory."""
        memory = (await self._memories_of(user_id)).get(memory_id)
        return memory if memory is None or not deserialize else UserMemory.from_dict(memory)

    async def get_user_memories(
        self,
        user_id: str | None = None,
        agent_id: str | None = None,
        team_id: str | None = None,
        topics: Sequence[str] | None = None,
        search_content: str | None = None,
        limit: int | None = None,
        page: int | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        deserialize: bool | None = True,
    ) -> Any:
        """Read memories of a user, or of all; without `deserialize` a page of them and the total number."""
        found = [
            memory
            for memory in (await self._memories_of(user_id)).values()
            if agent_id in (None, memory.get("agent_id"))
            and team_id in (None, memory.get("team_id"))
            and (topics is None or set(topics) & set(memory.get("topics") or []))
            and (search_content is None or search_content.lower() in str(memory.get("memory", "")).lower())
        ]
        found.sort(key=lambda memory: (memory.get("created_at") or "", memory["memory_id"]))
        rows = _page(found, limit, page, sort_by, sort_order)
        return [UserMemory.from_dict(row) for row in rows] if deserialize else (rows, len(found))

    async def get_all_memory_topics(self, user_id: str | None = None) -> list[str]:
        """List the topics of memories, each once."""
        memories = (await self._memories_of(user_id)).values()
        return sorted({topic for memory in memories for topic in memory.get("topics") or []})

    async def get_user_memory_stats(
        self, limit: int | None = None, page: int | None = None, user_id: str | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """The number of memories of each user and the time of the last change; the user with the newest first."""
        stats: dict[str, dict[str, Any]] = {}
        for memory in (await self._memories_of(user_id)).values():
            if user := memory.get("user_id"):
                mine = stats.setdefault(user, {"user_id": user, "total_memories": 0, "last_memory_updated_at": 0})
                mine["total_memories"] += 1
                mine["last_memory_updated_at"] = max(mine["last_memory_updated_at"], memory.get("updated_at") or 0)
        rows = sorted(stats.values(), key=lambda each: each["last_memory_updated_at"], reverse=True)
        return _page(rows, limit, page, None, None), len(rows)

    async def delete_user_memory(self, memory_id: str, user_id: str | None = None) -> None:
        """Delete a memory, if it is that user's."""
        await self.delete_user_memories([memory_id], user_id)

    async def delete_user_memories(self, memory_ids: Sequence[str], user_id: str | None = None) -> None:
        """Delete these memories, only those of `user_id` if it is given."""
        found = await self._memories_of(user_id)
        owners: dict[str | None, list[str]] = {}
        for id in memory_ids:
            if id in found:
                owners.setdefault(found[id].get("user_id"), []).append(joined(self._memories, id))
        for owner, names in owners.items():
            with suppress(Deleted):  # the user's record was deleted
                await self._of_user(owner).write(delete=names)

    async def clear_memories(self) -> None:
        """Delete all memories of all users."""
        await self.delete_user_memories(list(await self._memories_of(None)))

    # Metrics

    async def calculate_metrics(self) -> list[dict[str, Any]] | None:
        """Count the sessions of each day that is not yet counted whole; None if there is nothing to count."""
        since = metrics_starting_date_from_records(await self._counted())
        sessions, _ = await self.get_sessions(deserialize=False, include_runs=False)
        if since is None and sessions:
            since = min(map(_day_of, sessions))
        days = get_dates_to_calculate_metrics_for(since) if since is not None else []
        sessions = [row for row in sessions if days and days[0] <= _day_of(row) <= days[-1]]
        if not sessions:
            return None
        for row in sessions:
            row["runs"] = await self._runs_of(row["session_id"])
        of_days: Any = fetch_all_sessions_data(sessions, days, 0)
        counted = [row for day in days for row in calculate_date_metrics(day, of_days[day.isoformat()])]
        for row in counted:
            id = joined(self._metrics, f"{row['date']}/{row['user_id']}")
            await self._store.task(id, user=row["user_id"] or None).write(set=row, revive=True)
        return counted

    async def get_metrics(
        self, starting_date: date | None = None, ending_date: date | None = None, user_id: str | None = None
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Read the metrics of these days, of a user or of all, and the time when the last ones were counted."""
        rows = [
            {**row, "user_id": row["user_id"] or None}
            for row in await self._counted()
            if (starting_date is None or row["date"] >= starting_date.isoformat())
            and (ending_date is None or row["date"] <= ending_date.isoformat())
            and user_id in (None, row["user_id"])
        ]
        return rows, max((row["updated_at"] for row in rows), default=None)

    async def _counted(self) -> list[dict[str, Any]]:
        ids = await _every(self._store, "task", joined(self._metrics, ""))
        return [row for row in await _in_pieces(self._store, [self._store.task(id) for id in ids]) if row]


# Rows as the objects of Agno


def _as_session(session_type: SessionType | None, row: dict[str, Any], fields: dict[str, Any]) -> Any:
    """The row as a session object, which keeps the fields that were read."""
    # A copy: a change of the session must not change the fields that were read. Its runs are not shared.
    session = deserialize_session(session_type, {**plain({**row, "runs": None}), "runs": row.get("runs")})
    setattr(session, _READ_AS, own(fields))
    return session


def _table_row(run: dict[str, Any], key: str, session: Mapping[str, Any]) -> dict[str, Any]:
    """A run as a row of Agno's table of runs, which has it in `run_data`."""
    return {**build_single_run_row(run, session[ID], session.get(OWNER), index_of(key)), "updated_at": None}


def _day_of(row: Mapping[str, Any]) -> date:
    return datetime.fromtimestamp(row["created_at"] or 0, UTC).date()


# Listings, sorted and cut as in Agno's in-memory database


def _page(
    rows: list[dict[str, Any]], limit: int | None, page: int | None, sort_by: str | None, sort_order: str | None
) -> list[dict[str, Any]]:
    """A page of the sorted rows; pages count from 1. Raises ValueError for page 0, or a page without a limit."""
    validate_pagination(limit, page)
    ordered: list[dict[str, Any]] = apply_sorting(rows, sort_by, sort_order)
    if limit is None:
        return ordered
    start = ((page or 1) - 1) * limit
    return ordered[start : start + limit]


async def _every(
    store: AsyncStateStore, scope: str, prefix: str, *, user: str | None = None, tags: Mapping[str, str] | None = None
) -> list[str]:
    """The ids with this prefix of all records of a scope, the oldest first; of one owner, or with tags."""
    found: dict[str, Any] = {}
    if user is None:
        await _walk(store, found, scope=scope, prefix=prefix, tags=tags)
    else:
        await _walk(store, found, scope=scope, user=user)
        if len(found) >= _PAGE:
            # An owner's records are listed newest change first: a record that changed meanwhile is now at the front.
            await _walk(store, found, scope=scope, user=user, as_far_as_new=True)
    named = [info for info in found.values() if info.id.startswith(prefix)]
    return [info.id for info in sorted(named, key=lambda info: (info.created, info.id))]


async def _walk(store: AsyncStateStore, found: dict[str, Any], *, as_far_as_new: bool = False, **wanted: Any) -> None:
    after = None
    while True:
        page = await store.sessions(**wanted, fresh=True, limit=_PAGE, after=after)
        new = {info.id: info for info in page if info.id not in found}
        found.update(new)
        if len(page) < _PAGE or (as_far_as_new and not new):
            return
        after = page[-1].cursor


async def _in_pieces(store: AsyncStateStore, records: Sequence[AsyncRecord]) -> list[dict[str, Any]]:
    """The fields of many records, some in each round trip: a single large answer would delay others'."""
    found: list[dict[str, Any]] = []
    for at in range(0, len(records), _RECORDS_AT_ONCE):
        found += await store.get_many(records[at : at + _RECORDS_AT_ONCE], fresh=True)
    return found
