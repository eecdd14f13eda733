"""Agno: four workers on the same sessions, killed at any moment; and what Agno's own Redis database makes of that."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from agno.session import AgentSession
from frameworks.agno_crew import SESSIONS, peer
from frameworks.fleet import fleet

from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb


def outcome(db: Any, acknowledged: list[str]) -> dict[str, int]:
    """What is missing of what was acknowledged."""
    found = Counter[str]()
    for id in SESSIONS:
        session = db.get_session(id)
        has = {*session.session_data["session_state"], *(f"run:{run.run_id}" for run in session.runs or [])}
        for place, what in map(str.split, acknowledged):
            if place == id and what not in has:
                found["runs lost" if what.startswith("run:") else "keys lost"] += 1
    return dict(found)


@pytest.mark.only(api="asyncio", warm=("valkey", "redis"), cold="postgres")
@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_workers_that_are_killed_lose_no_key_and_no_run(opener: Any) -> None:
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    theirs = peer(settings)
    with StateStore.open(**settings) as store:
        ours = DistributedDb(store)
        for db in (ours, theirs):
            for id in SESSIONS:
                db.upsert_session(AgentSession(session_id=id, agent_id="a1", session_data={"session_state": {}}))
        said = await asyncio.to_thread(fleet, "agno_crew.py", "ours", enough=200, kills=5, settings=settings)
        assert outcome(ours, said) == {}
        said = await asyncio.to_thread(fleet, "agno_crew.py", "theirs", enough=200, kills=1, settings=settings)
        assert outcome(theirs, said)["keys lost"] > 0, "four workers do meet"
    theirs.redis_client.close()
