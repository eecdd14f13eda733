"""Runs: a record for each, so that one is written and read alone. Law: a session shows those that its order names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agno.db.utils import deserialize_run, filter_context_runs, get_run_type
from agno.run.base import RunStatus

from distributed_state import ABSENT, PRESENT, Conflict, Deleted
from distributed_state.adapters.agno.layout import ID, OWNER, RUN, joined, plain, runs_of
from distributed_state.adapters.agno.listing import every, page_of

_AT_ONCE = 100


class Runs:
    """The runs of Agno, each a task record of the store."""

    def __init__(self, store: Any, sessions: str, runs: str) -> None:
        self._store = store
        self._sessions = sessions
        self._runs = runs

    async def upsert_run(
        self, run: Any, session_id: str, user_id: str | None = None, run_index: int | None = None
    ) -> None:
        """Store a run, new or as it is now: one commit, and one more that says where in its session it stands.

        A run of a session that is not there is not stored. Raises ValueError for one without an id.
        """
        row = plain(run if isinstance(run, dict) else run.to_dict())
        id = row.get("run_id")
        if id is None:
            raise ValueError("Run must have a run_id")
        session = self._store.session(joined(self._sessions, session_id))
        fields = await session.get_all()
        if RUN + id not in fields and not await self._place(session, row, id, run_index):
            return
        record = self._store.task(joined(self._runs, id), user=user_id)
        change = {"run": row, "session_id": session_id, "updated_at": int(time.time())}
        try:
            await record.write(set=change)
        except Deleted:
            await record.create(change)  # it was deleted, and is stored anew

    async def _place(self, session: Any, row: dict[str, Any], id: str, run_index: int | None) -> bool:
        """Give a run its place in its session's order, unless it has one; False if there is no such session."""
        fields = await session.get_all(fresh=True)
        if ID not in fields:
            return False
        if RUN + id in fields:
            return True
        index = row.get("run_index") if run_index is None else run_index
        if index is None:
            index = max((place[0] for name, place in fields.items() if name.startswith(RUN)), default=-1) + 1
        place = [index, row.get("created_at") or int(time.time())]
        try:
            await session.write(set={RUN + id: place}, expect={ID: PRESENT, RUN + id: ABSENT})
        except (Conflict, Deleted):
            return RUN + id in await session.get_all(fresh=True)
        return True

    async def get_run(self, run_id: str, deserialize: bool | None = True) -> Any:
        """Read a run, None if there is none."""
        fields = await self._store.task(joined(self._runs, run_id)).get_all(fresh=True)
        return _given(fields["run"], deserialize) if "run" in fields else None

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
        """Read runs of a session, or of all, in their order; without `deserialize` a page and how many there are."""
        ids = [session_id] if session_id is not None else await self._session_ids()
        wanted = {"agent_id": agent_id, "team_id": team_id, "workflow_id": workflow_id}
        wanted["status"] = status.value if isinstance(status, RunStatus) else status
        found: list[dict[str, Any]] = []
        for id in ids:
            fields = await self._store.session(joined(self._sessions, id)).get_all(fresh=True)
            if user_id is None or fields.get(OWNER) == user_id:
                found += await self._runs_of(fields)
        found = [run for run in found if all(value in (None, run.get(name)) for name, value in wanted.items())]
        rows = page_of(found, limit, page, sort_by, sort_order)
        return [_given(row, deserialize) for row in rows] if deserialize else (rows, len(found))

    async def delete_run(self, run_id: str) -> bool:
        """Remove a run for good; False if there is none."""
        fields = await self._store.task(joined(self._runs, run_id)).get_all(fresh=True)
        if "session_id" in fields:
            session = self._store.session(joined(self._sessions, fields["session_id"]))
            with suppress(Conflict, Deleted):  # its session, or its place there, went before it
                await session.write(delete=[RUN + run_id], expect={RUN + run_id: PRESENT})
        return bool(await self._store.erase(joined(self._runs, run_id), scope="task"))

    async def delete_runs(self, run_ids: Sequence[str]) -> None:
        """Remove these runs for good."""
        for id in run_ids:
            await self.delete_run(id)

    async def _runs_of(self, fields: dict[str, Any], last: int | None = None) -> list[dict[str, Any]]:
        """The runs of a session with these fields in their order; with `last` the newest that its context shows."""
        ids = runs_of(fields)
        found: list[dict[str, Any]] = []
        for end in range(len(ids), 0, -_AT_ONCE):
            some = ids[max(0, end - _AT_ONCE) : end]
            read = await self._store.get_many([self._store.task(joined(self._runs, id)) for id in some])
            rows = [each["run"] for each in read if "run" in each]
            found = (rows if last is None else filter_context_runs(rows)) + found
            if last is not None and len(found) >= last:
                break
        return found if last is None else found[max(0, len(found) - last) :]

    async def _session_ids(self) -> list[str]:
        prefix = joined(self._sessions, "")
        return [id.removeprefix(prefix) for id in await every(self._store, "session", prefix)]


def _given(row: dict[str, Any], deserialize: bool | None) -> Any:
    return deserialize_run(get_run_type(row), row) if deserialize else row
