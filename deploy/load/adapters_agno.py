"""What Agno's sessions cost here and in its own databases, on the same servers.

Law: each figure is of the same calls; `rows` returns them under the name of the database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any
from uuid import uuid4

from agno.agent import Agent
from agno.db.redis import RedisDb
from agno.db.sqlite import SqliteDb
from agno.models.message import Message
from agno.run.agent import RunOutput
from agno.session import AgentSession

from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb

Make = Callable[[], AbstractContextManager[Any]]


def databases(url: str, archive: str, sqlite: str) -> dict[str, Make]:
    """Ours on this Redis and this archive, Agno's Redis on the same Redis, and its SQLite on this file."""
    mark = uuid4().hex[:8]

    @contextmanager
    def ours() -> Iterator[Any]:
        with StateStore.open(url, archive=archive, namespace=f"agno{mark}") as store:
            yield DistributedDb(store)

    @contextmanager
    def redis() -> Iterator[Any]:
        db = RedisDb(db_url=url, db_prefix=f"peer{mark}")
        yield db
        db.redis_client.close()

    @contextmanager
    def sql() -> Iterator[Any]:
        db = SqliteDb(db_file=sqlite)
        yield db
        db.close()

    return {"distributed_state": ours, "Agno Redis": redis, "Agno SQLite": sql}


def rows(make: Make, lengths: tuple[int, ...] = (10, 100)) -> dict[str, Any]:
    """Microseconds of a turn's calls with so many runs in the session, and keys kept of 160 that were set at once."""
    found: dict[str, Any] = {}
    with make() as db:
        db.upsert_session(
            AgentSession(session_id="s", agent_id="a1", user_id="ada", session_data={"session_state": {}})
        )
        stored = 0
        for length in lengths:
            for number in range(stored, length):
                db.upsert_run(_run(number), "s", "ada", run_index=number)
            stored = length
            session = db.get_session("s")
            found[f"get_session at {length}, us"] = _taken(lambda: db.get_session("s"))
            found[f"upsert_session at {length}, us"] = _taken(lambda kept=session: _touch(db, kept))
            found[f"upsert_run at {length}, us"] = _taken(lambda at=length - 1: db.upsert_run(_run(at), "s", "ada"))
        found["keys kept of 160"] = _race(db)
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


def _taken(call: Callable[[], Any], times: int = 10) -> int:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(median(taken) * 1e6)


def _race(db: Any) -> int:
    """Eight threads set twenty keys each, by the method of Agno's agents; each is acknowledged."""
    db.upsert_session(AgentSession(session_id="raced", agent_id="a1", session_data={"session_state": {}}))
    agent = Agent(id="a1", db=db)
    with ThreadPoolExecutor(8) as threads:
        keys = [f"{each}.{number}" for number in range(20) for each in range(8)]
        list(threads.map(lambda key: agent.update_session_state({key: 1}, session_id="raced"), keys))
    session = db.get_session("raced")
    return len(session.session_data["session_state"])
