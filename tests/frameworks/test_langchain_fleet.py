"""LangChain: four processes add turns to the same histories and are killed. What it brings itself is of one process."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from frameworks.fleet import fleet
from frameworks.langchain_crew import SESSIONS

from distributed_state.adapters.langchain import DistributedChatMessageHistory

pytestmark = [
    pytest.mark.replicas,
    pytest.mark.only(api="asyncio", warm=("valkey", "redis"), cold="postgres"),
    pytest.mark.timeout(180),
]


async def outcome(store: Any, acknowledged: list[str]) -> dict[str, int]:
    """How many turns are missing of those that were acknowledged, are there in part or twice, or mix with others."""
    found = Counter[str]()
    for id in SESSIONS:
        texts = [message.content for message in await DistributedChatMessageHistory(id, store).aget_messages()]
        runs = [(turn, len([*group])) for turn, group in itertools.groupby(texts)]
        pieces = Counter(turn for turn, _ in runs)
        found["mixed"] += sum(count > 1 for count in pieces.values())
        found["not whole"] += sum(texts.count(turn) != 2 for turn in pieces)
        found["lost"] += sum(turn not in pieces for place, turn in map(str.split, acknowledged) if place == id)
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("function", ["at_once", "one_by_one"])
async def test_a_fleet_loses_no_turn_and_mixes_none(function: str, opener: Any) -> None:
    """Also of those that were killed each turn is there whole or not at all. One by one: the control."""
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    said = await asyncio.to_thread(fleet, "langchain_crew.py", function, enough=400, kills=5, settings=settings)
    found = await outcome(await opener(), said)
    if function == "at_once":
        assert found == {}
    else:
        assert found["mixed"] > 0, "four workers do meet"
        assert "lost" not in found
