"""CrewAI: four processes run the same flows and are killed at any moment; and what its own SQLite makes of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crewai.flow.persistence import FlowPersistence, SQLiteFlowPersistence
from frameworks.fleet import fleet
from frameworks_crewai.crewai_crew import FLOWS, Notes

from distributed_state.adapters.crewai import DistributedFlowPersistence

pytestmark = [
    pytest.mark.replicas,
    pytest.mark.only(api="asyncio", warm="valkey", cold="postgres"),
    pytest.mark.timeout(300),
]
CREW = "frameworks_crewai/crewai_crew.py"


def lost(persistence: FlowPersistence, acknowledged: list[str]) -> list[str]:
    """What was acknowledged and is not in the state of its flow."""
    states = {id: persistence.load_state(id) or {} for id in FLOWS}
    places = map(str.split, acknowledged)
    return [name for id, name in places if (states[id].get(name), states[id].get(f"{name}/again")) != (1, 2)]


async def test_a_fleet_loses_nothing_and_a_flow_goes_on_elsewhere(opener: Any, tmp_path: Path) -> None:
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    said = await asyncio.to_thread(fleet, CREW, "ours", enough=100, kills=3, settings=settings, path="", seconds=240)
    persistence = DistributedFlowPersistence(await opener())
    assert lost(persistence, said) == []
    flow = Notes(persistence=persistence, suppress_flow_events=True)
    await flow.kickoff_async(inputs={"id": "f0", "now": "here"})
    assert lost(persistence, [*said, "f0 here"]) == []


async def test_their_sqlite_loses_what_others_wrote(
    opener: Any, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    """The control: four workers do meet."""
    said = await asyncio.to_thread(
        fleet, CREW, "theirs", enough=100, kills=1, settings={}, path=f"{tmp_path}/flows.db", seconds=240
    )
    found = lost(SQLiteFlowPersistence(f"{tmp_path}/flows.db"), said)
    record_property("theirs", f"{len(found)} of {len(said)} lost")
    assert found
