"""How Agno's rows are stored. Law: what two workers may change apart stands in two fields.

| Agno | here |
|---|---|
| session | `store.session("agno_sessions/id", user=user_id)` |
| its columns, its `session_data[k]`, its `session_state[k]` | fields `row/...`, `data/k`, `state/k` of that |
| run | an item of its session's collection `runs`, whose key says where in the order it stands |
| where a run is | `store.task("agno_runs/id", user=user_id)`: the id of its session, and the key there |
| user memory | field `agno_memories/id` of `store.user(user_id)`; without a user of `store.app("agno_memories")` |

The first part of an id is the name of Agno's table. User records with memories have its name as a tag `agno`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from agno.db.utils import json_serializer

ROW, DATA, STATE = "row/", "data/", "state/"
ID, OWNER, KIND = "row/session_id", "row/user_id", "row/session_type"
HAS_DATA, _HAS_STATE = "has/data", "has/state"  # they may be there and empty
RUNS = "runs"  # the collection
TAG = "agno"


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
    """What of a record's fields is the session's row."""
    return {name: value for name, value in fields.items() if name.startswith((ROW, DATA, STATE, "has/"))}


def _behind(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
