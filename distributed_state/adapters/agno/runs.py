"""Runs: items of their session, each written and read alone. Law: a run is one commit, and goes with its session.

Agno asks for a run by its id alone, so a record of that name points to it: written before the run, gone after it. One
that points to nothing, as its worker was killed in between, is no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agno.db.utils import deserialize_run, filter_context_runs, get_run_type
from agno.run.base import RunStatus

from distributed_state import ABSENT, PRESENT, Conflict, Deleted, DeleteItem, PutItem
from distributed_state.adapters.agno.layout import ID, OWNER, RUNS, index_of, joined, plain, run_key
from distributed_state.adapters.agno.listing import every, in_pieces, page_of

_AT_ONCE = 100


class Runs:
    """The runs of Agno, each an item of its session."""

    def __init__(self, store: Any, sessions: str, runs: str) -> None:
        self._store = store
        self._sessions = sessions
        self._runs = runs

    def _session(self, id: str, user_id: str | None = None) -> Any:
        return self._store.session(joined(self._sessions, id), user=user_id)

    def _pointer(self, run_id: str, user_id: str | None = None) -> Any:
        return self._store.task(joined(self._runs, run_id), user=user_id)

    async def upsert_run(
        self, run: Any, session_id: str, user_id: str | None = None, run_index: int | None = None
    ) -> None:
        """Store a run, new or as it is now: one commit of its session, and for a new one another before it.

        One that is there stays where it is. A run of a session that is not there is not stored. Raises ValueError for
        one without an id.
        """
        row = plain(run if isinstance(run, dict) else run.to_dict())
        id = row.get("run_id")
        if id is None:
            raise ValueError("Run must have a run_id")
        # Without a question to the server: what this process knows of the place is checked by the commit.
        known = await self._pointer(id).get_all()
        if known and await self._put(known, row, if_present=True):
            return
        place = await self._place(row, session_id, user_id, run_index)
        if place is not None:
            await self._put(place, row)

    async def _put(self, place: dict[str, Any], row: dict[str, Any], *, if_present: bool = False) -> bool:
        """Store a run at its place; False if its session is not there, or the run is not although it must be."""
        item = PutItem(collection=RUNS, key=place["key"], value=row, if_present=if_present)
        try:
            await self._session(place["session_id"]).write(items=[item], expect={ID: PRESENT})
        except (Conflict, Deleted):
            return False
        return True

    async def _place(
        self, row: dict[str, Any], session_id: str, user_id: str | None, run_index: int | None
    ) -> dict[str, Any] | None:
        """Where a run is to be stored: where it was, or behind the others; None if there is no such session."""
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
        # Whoever owns the session owns what points to it: `store.forget` of a user finds both.
        pointer = self._pointer(row["run_id"], user_id or fields[OWNER])
        try:
            await pointer.write(set=place, expect={"key": known.get("key", ABSENT)}, revive=True)
        except Conflict:
            return await pointer.get_all(fresh=True) or None  # somebody else stores it as well
        return place

    async def get_run(self, run_id: str, deserialize: bool | None = True) -> Any:
        """Read a run, None if there is none."""
        place = await self._pointer(run_id).get_all(fresh=True)
        row = await self._session(place["session_id"]).items(RUNS).get(place["key"]) if place else None
        return None if row is None else _given(row, deserialize)

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
        wanted = {"agent_id": agent_id, "team_id": team_id, "workflow_id": workflow_id}
        wanted["status"] = status.value if isinstance(status, RunStatus) else status
        if session_id is None:
            sessions = await self._all(user_id)
        else:
            sessions = [{**await self._session(session_id).get_all(fresh=True), ID: session_id}]
        found: list[dict[str, Any]] = []
        for fields in sessions:
            if user_id in (None, fields.get(OWNER)):
                found += await self._runs_of(fields[ID])
        found = [run for run in found if all(value in (None, run.get(name)) for name, value in wanted.items())]
        rows = page_of(found, limit, page, sort_by, sort_order)
        return [_given(row, deserialize) for row in rows] if deserialize else (rows, len(found))

    async def delete_run(self, run_id: str) -> bool:
        """Remove a run; False if there is none."""
        pointer = self._pointer(run_id)
        place = await pointer.get_all(fresh=True)
        if not place:
            return False
        there = False
        with suppress(Conflict, Deleted):  # it, or its session, went before
            item = DeleteItem(collection=RUNS, key=place["key"], if_present=True)
            await self._session(place["session_id"]).write(items=[item], expect={ID: PRESENT})
            there = True
        await pointer.erase()
        return there

    async def delete_runs(self, run_ids: Sequence[str]) -> None:
        """Remove these runs."""
        for id in run_ids:
            await self.delete_run(id)

    async def _runs_of(self, session_id: str, last: int | None = None) -> list[dict[str, Any]]:
        """The runs of a session in their order; with `last` the newest that its context shows."""
        runs = self._session(session_id).items(RUNS)
        size = _AT_ONCE if last is None else min(max(2 * last, 1), _AT_ONCE)
        found: list[dict[str, Any]] = []
        before = None
        while True:
            page = await runs.list(before=before, limit=size, reverse=True)
            rows = [item.value for item in page.items]
            found += rows if last is None else filter_context_runs(rows)
            before = page.next
            if before is None or (last is not None and len(found) >= last):
                return found[:last][::-1]

    async def _all(self, user_id: str | None) -> list[dict[str, Any]]:
        """The fields of all sessions, or of those of a user."""
        prefix = joined(self._sessions, "")
        ids = await every(self._store, "session", prefix, user=user_id)
        read = await in_pieces(self._store, [self._store.session(id, user=user_id) for id in ids])
        # One that was forked has the fields of another: what it is called says its record.
        return [{**fields, ID: id.removeprefix(prefix)} for id, fields in zip(ids, read, strict=True) if ID in fields]


def _given(row: dict[str, Any], deserialize: bool | None) -> Any:
    return deserialize_run(get_run_type(row), row) if deserialize else row
