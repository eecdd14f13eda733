"""Strands: four processes take turns on one conversation and are killed; and what Strands' own files make of that."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks.fleet import fleet
from frameworks.strands_crew import SESSION, TURN, agent, files, told

from distributed_state.adapters.strands import DistributedSessionManager

pytestmark = [
    pytest.mark.replicas,
    pytest.mark.only(api="asyncio", warm="valkey", cold="postgres"),
    pytest.mark.timeout(300),
]


def outcome(messages: list[Any], acknowledged: list[str]) -> dict[str, int]:
    """How many of the acknowledged turns are missing, or not whole and by themselves."""
    runs = [(turn, len([*group])) for turn, group in itertools.groupby(map(told, messages))]
    whole = {turn for turn, length in runs if length == TURN}
    there = {turn for turn, _ in runs}
    found = Counter("lost" if turn not in there else "not whole" for turn in acknowledged if turn not in whole)
    return dict(found)


@pytest.mark.parametrize("function", ["ours", "races"])
async def test_a_fleet_loses_no_turn_and_mixes_none(function: str, opener: Any, tmp_path: Path) -> None:
    """Also where turns do not wait for one another: then those that would mix are refused."""
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    said = await asyncio.to_thread(
        fleet, "strands_crew.py", function, enough=60, kills=3, settings=settings, folder="", seconds=240
    )
    store = await opener()
    manager = DistributedSessionManager(SESSION, store)
    messages = [each.to_message() for each in manager.list_messages(SESSION, "default")]
    assert outcome(messages, said) == {}
    # The conversation goes on here, after the last message of the others.
    async with store.session(SESSION).lock(wait=60):  # a killed one may hold it for a while
        resumed = agent(manager, "and on")
        assert told(resumed.messages[-1]) == told(messages[-1])
        await resumed.invoke_async("on")
    assert [told(each) for each in resumed.messages[-2:]] == ["on", "and on"]


async def test_their_files_lose_turns(opener: Any, tmp_path: Path, record_property: Callable[[str, str], None]) -> None:
    """The control: four workers do meet."""
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    said = await asyncio.to_thread(
        fleet, "strands_crew.py", "theirs", enough=60, kills=1, settings=settings, folder=f"{tmp_path}", seconds=240
    )
    found = outcome(files(tmp_path), said)
    record_property("theirs", f"{found} of {len(said)}")
    assert found.get("lost", 0) > 0, found
