"""Agno: four workers on the same sessions, killed at any moment; and what Agno's own Redis database makes of that."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agno.db.redis import RedisDb
from agno.session import AgentSession
from frameworks.agno_worker import SESSIONS
from frameworks.nursery import fleet

from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb


def outcome(db: Any, acknowledged: list[tuple[str, str]]) -> dict[str, int]:
    """What is missing of what was acknowledged."""
    found = Counter[str]()
    for id in SESSIONS:
        session = db.get_session(id)
        has = {*session.session_data["session_state"], *(f"run:{run.run_id}" for run in session.runs or [])}
        for place, what in acknowledged:
            if place == id and what not in has:
                found["runs lost" if what.startswith("run:") else "keys lost"] += 1
    return dict(found)


@pytest.mark.only(face="asyncio", warm=("valkey", "redis"), cold="postgres")
@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_workers_that_are_killed_lose_no_key_and_no_run(opener: Any, tmp_path: Path) -> None:
    peer = RedisDb(db_url=opener.url, db_prefix=f"peer{opener.namespace}")
    with StateStore.open(opener.url, archive=opener.archive, namespace=opener.namespace) as store:
        ours = DistributedDb(store)
        for db in (ours, peer):
            for id in SESSIONS:
                db.upsert_session(AgentSession(session_id=id, agent_id="a1", session_data={"session_state": {}}))
        acknowledged = await asyncio.to_thread(fleet, "agno_worker.py", "ours", opener, tmp_path, kills=8)
        assert len(acknowledged) > 50
        assert outcome(ours, acknowledged) == {}
        lost = outcome(peer, await asyncio.to_thread(fleet, "agno_worker.py", "peer", opener, tmp_path, kills=2))
        assert lost["keys lost"] > 0, "four workers do meet"
    peer.redis_client.close()
