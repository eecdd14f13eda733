"""Four processes take turns on one session and are killed in the middle; beside them the SDK's own Redis session."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from agents.extensions.memory.redis_session import RedisSession
from frameworks.fleet import fleet
from frameworks.openai_agents_crew import turn_of
from sync_api import core

from distributed_state.adapters.openai_agents import DistributedSession

pytestmark = [pytest.mark.replicas, pytest.mark.only(api="asyncio", warm="single")]


def judged(items: list[Any]) -> tuple[set[str], set[str]]:
    """The turns that are there whole and in one piece, and those into which others mixed."""
    runs = [(turn, len(list(group))) for turn, group in itertools.groupby(items, turn_of)]
    pieces = [turn for turn, _ in runs]
    mixed = {turn for turn in pieces if pieces.count(turn) > 1}
    return {turn for turn, length in runs if length == 4} - mixed, mixed


@pytest.mark.timeout(300)
async def test_a_fleet_loses_no_turn_and_mixes_none(opener: Any, record_property: Callable[[str, str], None]) -> None:
    """Each turn holds the session: of one that was killed a part may be left, and nothing in it is somebody else's."""
    store = await opener()
    given = core(store).settings
    id, settings = opener.namespace, {"url": given.url, "archive": given.archive, "namespace": given.namespace}
    said = await asyncio.to_thread(
        fleet, "openai_agents_crew.py", "take_turns", enough=80, kills=3, id=id, settings=settings, seconds=200
    )
    acknowledged = {line.removeprefix("ours ") for line in said if line.startswith("ours")}
    whole, mixed = judged(await DistributedSession(id, core(store)).get_items())
    assert acknowledged - whole == set(), "every acknowledged turn is there, once and whole"
    assert mixed == set()
    session = store.session(id)
    archived = await session.at(version=await session.version(fresh=True))
    assert len(archived.messages) == len(await session.messages()) >= 4 * len(whole)

    theirs = RedisSession.from_url(id, url=given.url)
    try:
        whole, mixed = judged(await theirs.get_items())
    finally:
        await theirs.close()
    found = f"{len(mixed)} turns of the SDK's own session mixed, {len(whole)} did not"
    record_property("theirs", found)
    assert mixed, f"the control: it cannot be held; {found}"
