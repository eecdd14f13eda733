"""Agent Framework: four workers on the same sessions, killed at any moment; and what its own files make of that."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent_framework import FileHistoryProvider, FileSessionStore
from frameworks.agent_framework_crew import SESSIONS
from frameworks.fleet import fleet

from distributed_state.adapters.agent_framework import DistributedHistoryProvider, DistributedSessionStore

pytestmark = [
    pytest.mark.replicas,
    pytest.mark.only(api="asyncio", warm=("valkey", "redis"), cold="postgres"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.* is experimental and may change"),
]


async def outcome(history: Any, sessions: Any, acknowledged: list[str]) -> dict[str, int]:
    """What is missing of what was acknowledged, and the turns that are there in part or mix with others."""
    found = Counter[str]()
    for id in SESSIONS:
        texts = [message.text for message in await history.get_messages(id)]
        found["mixed"] += sum(one != other for one, other in zip(texts[::2], texts[1::2], strict=False))
        state = (await sessions.get(id)).state
        for place, what in map(str.split, acknowledged):
            kind, _, name = what.rpartition(":")
            if place == id and name not in (state if kind else texts):
                found["state lost" if kind else "turns lost"] += 1
    return {name: count for name, count in found.items() if count}


async def test_a_fleet_loses_no_turn_and_no_state(opener: Any, tmp_path: Path) -> None:
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    given: Any = {"settings": settings, "folder": str(tmp_path)}
    said = await asyncio.to_thread(fleet, "agent_framework_crew.py", "ours", enough=300, kills=5, seconds=200, **given)
    store = await opener()
    assert await outcome(DistributedHistoryProvider(store), DistributedSessionStore(store), said) == {}
    said = await asyncio.to_thread(
        fleet, "agent_framework_crew.py", "theirs", enough=300, kills=1, seconds=200, **given
    )
    found = await outcome(FileHistoryProvider(tmp_path / "history"), FileSessionStore(tmp_path / "sessions"), said)
    assert found["state lost"] > 0, "four workers do meet"
