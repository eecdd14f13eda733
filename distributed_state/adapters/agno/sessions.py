"""Sessions of Agno. Law: saving one changes what its holder changed since it was read, and leaves the rest.

Agno reads a session, changes a key of its state and saves the whole. So a session that was read here knows as what, and
of two that are saved at once neither takes back what the other did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agno.db.base import SessionType
from agno.db.utils import deserialize_session
from agno.session import AgentSession, TeamSession, WorkflowSession

from distributed_state import ABSENT, PRESENT, Conflict, Deleted
from distributed_state.adapters.agno.layout import (
    DATA,
    HAS_DATA,
    ID,
    KIND,
    OWNER,
    fields_of,
    own,
    plain,
    row_of,
)
from distributed_state.adapters.agno.listing import page_of
from distributed_state.adapters.agno.runs import Runs

_READ_AS = "_distributed_state_read_as"  # an attribute of a session object; Agno's to_dict leaves it out
_ROUNDS = 100
_KINDS = ((AgentSession, SessionType.AGENT), (TeamSession, SessionType.TEAM), (WorkflowSession, SessionType.WORKFLOW))
_COMPONENTS = {"agent": ("agent_id",), "team": ("team_id",), "workflow": ("workflow_id",)}


class Sessions(Runs):
    """The sessions of Agno, each a session record of the store."""

    async def get_session(
        self,
        session_id: str,
        session_type: SessionType | None = None,
        user_id: str | None = None,
        deserialize: bool | None = True,
        runs_limit: int | None = None,
    ) -> Any:
        """Read a session, None if there is none of that user; with `runs_limit` only its newest runs."""
        fields = await self._session(session_id).get_all(fresh=True)
        if ID not in fields or (user_id is not None and fields[OWNER] != user_id):
            return None
        fields[ID] = session_id  # it may be a fork of another
        row = {**row_of(fields), "runs": await self._runs_of(session_id, runs_limit)}
        return _given(session_type, row, fields) if deserialize else row

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
        """List sessions; without `deserialize` a page of them and how many there are."""
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
        shown = page_of(rows, limit, page, sort_by, sort_order)
        for row in shown:
            row["runs"] = await self._runs_of(row["session_id"]) if include_runs else None
        if not deserialize:
            return shown, len(rows)
        return [_given(session_type, row, found[row["session_id"]]) for row in shown]

    async def upsert_session(self, session: Any, deserialize: bool | None = True) -> Any:
        """Save a session and return it; None if it is somebody else's. Its runs are saved by `upsert_run`."""
        return await self._upsert(session, deserialize, int(time.time()))

    async def upsert_sessions(
        self, sessions: Sequence[Any], deserialize: bool | None = True, preserve_updated_at: bool = False
    ) -> list[Any]:
        """Save these sessions, each by a commit of its own; with `preserve_updated_at` their times stay."""
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
        given = _given(None, saved, stored)
        given.runs = session.runs
        return given

    async def _save(
        self, record: Any, fields: dict[str, Any], known: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, bool]:
        """What the session holds after this, None if it is somebody else's; and whether it began with it."""
        was_read = known is not None
        for _ in range(_ROUNDS):
            # Who made the object without reading the session means it as it stands: the rest goes.
            base = await record.get_all(fresh=True) if known is None else known
            begins = ID not in base  # also where something is that is no session, as a name that came too late
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
                if was_read:  # a run that began before the deletion brings nothing back
                    raise
                if begins:
                    with suppress(Conflict):
                        await record.create(fields)  # it belongs to who begins it now, not to who had it
                        return fields, True
            except Conflict:
                pass
            # It went, or has an owner now. Who knew it goes on from what was known.
            now = await record.get_all(fresh=True)
            known = {**known, OWNER: now[OWNER]} if known is not None and ID in now else None
        raise Conflict(f"{record}: comes and goes faster than it can be saved")

    async def rename_session(
        self,
        session_id: str,
        session_type: SessionType | None,
        session_name: str,
        user_id: str | None = None,
        deserialize: bool | None = True,
    ) -> Any:
        """Name a session and return it; None if there is none of that type and user."""
        record = self._session(session_id)
        fields = await record.get_all(fresh=True)
        kind = session_type.value if isinstance(session_type, SessionType) else session_type
        if ID not in fields or kind not in (None, fields[KIND]) or user_id not in (None, fields[OWNER]):
            return None
        name = {DATA + "session_name": session_name, HAS_DATA: True}
        try:
            await record.write(set=name, expect={ID: PRESENT})
        except (Conflict, Deleted):
            return None  # just now
        return await self.get_session(session_id, session_type, user_id, deserialize)

    async def delete_session(self, session_id: str, user_id: str | None = None) -> bool:
        """Remove a session and its runs for good; False if there is none of that user."""
        fields = await self._session(session_id).get_all(fresh=True)
        if ID not in fields or (user_id is not None and fields[OWNER] != user_id):
            return False
        # The session last: whoever was killed in between is asked again, and finds what is left by it.
        for run in await self._runs_of(session_id):
            await self._pointer(run["run_id"]).erase()
        await self._session(session_id).erase()
        return True

    async def delete_sessions(self, session_ids: Sequence[str], user_id: str | None = None) -> None:
        """Remove these sessions, of that user if one is given."""
        for id in session_ids:
            await self.delete_session(id, user_id)


def _given(session_type: SessionType | None, row: dict[str, Any], fields: dict[str, Any]) -> Any:
    """The row as a session object, which knows as what it was read."""
    # A copy: whoever changes the session must not change what it was read as. Its runs are nobody else's.
    session = deserialize_session(session_type, {**plain({**row, "runs": None}), "runs": row.get("runs")})
    setattr(session, _READ_AS, own(fields))
    return session
