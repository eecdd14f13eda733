"""Four processes take turns on one session of Claude's and are killed; beside them the SDK's example on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks.claude_agent_sdk_crew import said, theirs
from frameworks.fleet import fleet
from sync_api import core

from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore

pytestmark = [pytest.mark.replicas, pytest.mark.only(api="asyncio", warm="single")]


@pytest.mark.timeout(300)
async def test_a_fleet_loses_no_turn(
    opener: Any, archive: Callable[[str], Path], record_property: Callable[[str, str], None]
) -> None:
    """A turn that a run did not see is not in the conversation that the next run is sent."""
    store = core(await opener())
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    folder = str(archive("claude-agent-sdk"))
    lines = await asyncio.to_thread(
        fleet,
        "claude_agent_sdk_crew.py",
        "take_turns",
        enough=40,
        kills=3,
        settings=settings,
        folder=folder,
        seconds=200,
    )
    async with theirs(folder, opener.url, opener.namespace) as other:
        of = {"ours": await said(DistributedSessionStore(store)), "theirs": await said(other)}
    lost = {}
    for name, texts in of.items():
        acknowledged = [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
        lost[name] = [turn for turn in acknowledged if texts.count(turn) != 1 or f"You said: {turn}" not in texts]
    assert lost["ours"] == []
    found = f"{len(lost['theirs'])} of {sum(line.startswith('theirs') for line in lines)} turns lost"
    record_property("theirs", found)
    assert lost["theirs"], f"the control: it cannot be held; {found}"
