"""Beside Agno's own databases: what an agent's turn calls as a session grows, and keys that threads set at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from agno.agent import Agent
from agno.db.redis import RedisDb
from agno.db.sqlite import SqliteDb
from agno.models.message import Message
from agno.run.agent import RunOutput
from agno.session import AgentSession

from deploy.load.rows import Row, at_least, at_most
from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb

NAME, LENGTHS = "Agno", (10, 100)
KEPT = "keys kept of 160, set by 8 threads at once"


def rows(redis: str, archive: str) -> list[Row]:
    """Ours on this Redis and this archive, theirs on the same Redis, and theirs of SQL on a file."""
    with StateStore.open(redis, archive=archive, namespace="adapters") as store:
        ours = _measured(DistributedDb(store))
    peer = RedisDb(db_url=redis, db_prefix=f"peer{uuid4().hex[:8]}")
    theirs = {"RedisDb": _measured(peer)}
    peer.redis_client.close()
    with tempfile.TemporaryDirectory() as folder:
        sqlite = SqliteDb(db_file=str(Path(folder) / "agno.db"))
        theirs["SqliteDb"] = _measured(sqlite)
        sqlite.close()
    found = []
    for name, peers in theirs.items():
        for what, mine in ours.items():
            if what == KEPT:
                found.append(at_least(f"{NAME}: {what}", mine, peers[what], 1.0, "keys", name))
            elif name == "RedisDb" or "get" not in what:  # SqliteDb keeps the runs of a session as objects
                found.append(at_most(f"{NAME}: {what}", mine, peers[what], 1.2, "us", name))
    return found


def _measured(db: Any) -> dict[str, float]:
    """Microseconds of each call with so many runs in the session, and the keys kept of a race."""
    found: dict[str, float] = {}
    db.upsert_session(AgentSession(session_id="s", agent_id="a1", user_id="ada", session_data={"session_state": {}}))
    stored = 0
    for length in LENGTHS:
        for number in range(stored, length):
            db.upsert_run(_run(number), "s", "ada", run_index=number)
        stored = length
        session = db.get_session("s")
        found[f"get_session at {length} runs"] = _taken(lambda: db.get_session("s"))
        found[f"upsert_session at {length} runs"] = _taken(lambda kept=session: _touch(db, kept))  # type: ignore[misc] # bound now
        found[f"upsert_run at {length} runs"] = _taken(lambda at=length - 1: db.upsert_run(_run(at), "s", "ada"))  # type: ignore[misc] # bound now
    found[KEPT] = _race(db)
    return found


def _run(number: int) -> RunOutput:
    """A run of two messages, a kilobyte in all."""
    said = [Message(role="user", content="u" * 500), Message(role="assistant", content="a" * 500)]
    return RunOutput(run_id=f"r{number}", session_id="s", agent_id="a1", content="a" * 500, messages=said)


def _touch(db: Any, session: AgentSession) -> None:
    assert session.session_data is not None
    state = session.session_data["session_state"]
    state["n"] = state.get("n", 0) + 1
    db.upsert_session(session)


def _taken(call: Callable[[], Any], times: int = 10) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


def _race(db: Any) -> int:
    """Eight threads set twenty keys each, by the method of Agno's agents; each is acknowledged."""
    db.upsert_session(AgentSession(session_id="raced", agent_id="a1", session_data={"session_state": {}}))
    agent = Agent(id="a1", db=db)
    with ThreadPoolExecutor(8) as threads:
        keys = [f"{each}.{number}" for number in range(20) for each in range(8)]
        list(threads.map(lambda key: agent.update_session_state({key: 1}, session_id="raced"), keys))
    session = db.get_session("raced")
    return len(session.session_data["session_state"])
