"""Google ADK: four workers on the same sessions, killed in the middle of their turns; and what a peer makes of that."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from frameworks.adk_crew import SESSIONS, peer
from frameworks.fleet import fleet

from distributed_state.adapters.adk import DistributedSessionService

WHERE = {"app_name": "shop", "user_id": "ada"}


async def outcome(service: Any, acknowledged: list[str]) -> dict[str, int]:
    """What is missing of what was acknowledged, and how many turns have another's events among theirs."""
    found = Counter[str]()
    for id in SESSIONS:
        session = await service.get_session(**WHERE, session_id=id)
        texts = [event.content.parts[0].text for event in session.events]
        mine = [text for place, text in map(str.split, acknowledged) if place == id]
        found["events lost"] += len(set(mine) - set(texts))
        found["events twice"] += len(texts) - len(set(texts))
        found["keys lost"] += sum(f"k.{text}" not in session.state for text in mine)
        for place in ("user", "app"):
            found[f"{place} keys lost"] += sum(f"{place}:{text}" not in session.state for text in mine)
        turns = [text.partition(".")[0] for text in texts]
        found["turns mixed"] += len([*itertools.groupby(turns)]) - len(set(turns))
    return {name: count for name, count in found.items() if count}


@pytest.mark.only(api="asyncio", warm=("valkey", "redis"), cold="postgres")
@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_workers_that_are_killed_lose_nothing_and_mix_no_turns(opener: Any) -> None:
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    ours, theirs = DistributedSessionService(await opener()), peer(settings)
    for service in (ours, theirs):
        for id in SESSIONS:
            await service.create_session(**WHERE, session_id=id)
    said = await asyncio.to_thread(fleet, "adk_crew.py", "ours", enough=200, kills=5, settings=settings)
    assert await outcome(ours, said) == {}
    said = await asyncio.to_thread(fleet, "adk_crew.py", "theirs", enough=200, kills=1, settings=settings)
    lost = await outcome(theirs, said)
    await theirs._get_redis().aclose()
    assert lost["user keys lost"] > 0
    assert lost["app keys lost"] > 0
    assert lost["turns mixed"] > 0, "four workers do meet: who does not look for stale sessions mixes turns"
