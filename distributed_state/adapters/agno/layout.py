"""How Agno's rows are stored. Law: what two workers may change apart stands in two fields.

| Agno | here |
|---|---|
| session | `store.session("agno_sessions/id", user=user_id)` |
| its columns, its `session_data[k]`, its `session_state[k]` | fields `row/...`, `data/k`, `state/k` of that |
| run | `store.task("agno_runs/id", user=user_id)`; `run/id` of its session says where in the order it stands |
| user memory | field `agno_memories/id` of `store.user(user_id)`; without a user of `store.app("agno_memories")` |

The first part of an id is the name of Agno's table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agno.db.utils import json_serializer

ROW, DATA, STATE, RUN = "row/", "data/", "state/", "run/"
ID, OWNER, KIND = "row/session_id", "row/user_id", "row/session_type"
_HAS_DATA, _HAS_STATE = "has/data", "has/state"  # they may be there and empty


def joined(table: str, id: str) -> str:
    """The id of what a table holds."""
    return f"{table.replace('%', '%25').replace('/', '%2F')}/{id}"


def plain(value: Any) -> Any:
    """The value as JSON has it, by Agno's own rules."""
    return json.loads(json_serializer(value))


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that hold a session, without its runs."""
    fields: dict[str, Any] = {ROW + name: value for name, value in row.items() if name not in ("runs", "session_data")}
    data = row.get("session_data")
    if isinstance(data, dict):
        fields[_HAS_DATA] = True
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
    if _HAS_DATA in fields:
        row["session_data"] = _behind(fields, DATA)
        if _HAS_STATE in fields:
            row["session_data"]["session_state"] = _behind(fields, STATE)
    return row


def runs_of(fields: Mapping[str, Any]) -> list[str]:
    """The ids of a session's runs in their order."""
    placed = _behind(fields, RUN)
    return sorted(placed, key=lambda id: (*placed[id], id))


def own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record's fields is the session's row."""
    return {name: value for name, value in fields.items() if name.startswith((ROW, DATA, STATE, "has/"))}


def _behind(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
