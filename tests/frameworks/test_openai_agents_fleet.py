"""Four processes take turns on one session and are killed in the middle; beside them the SDK's own Redis session."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from agents.extensions.memory.redis_session import RedisSession
from below import Worker
from faces import core
from frameworks.openai_agents_crew import turn_of

from distributed_state.adapters.openai_agents import DistributedSession

pytestmark = [pytest.mark.brief("servers"), pytest.mark.replicas, pytest.mark.only(face="asyncio", warm="single")]
TURNS, KILLS = 80, 3  # turns of both kinds of sessions together


class Crew(Worker):
    crew = "frameworks/openai_agents_crew.py"

    def until_now(self) -> set[str]:
        return {self.line() for _ in range(self._said.qsize())}

    def killed(self) -> set[str]:
        self.kill()
        return set(iter(self.line, ""))


def take_turns(id: str, settings: dict[str, Any]) -> set[str]:
    """Let four processes take turns, kill one after the other and begin another; what was acknowledged."""
    names = (f"w{number}" for number in itertools.count())
    workers = [Crew("take_turns", id=id, me=next(names), settings=settings) for _ in range(4)]
    said, killed, deadline = set[str](), 0, time.monotonic() + 200
    while len(said) < TURNS and time.monotonic() < deadline:
        for worker in workers:
            said |= worker.until_now()
        if killed < KILLS and len(said) > TURNS // (KILLS + 1) * (killed + 1):
            at = random.randrange(4)
            said |= workers[at].killed()
            workers[at] = Crew("take_turns", id=id, me=next(names), settings=settings)
            killed += 1
        time.sleep(0.01)
    said |= set[str]().union(*(worker.killed() for worker in workers))
    assert (len(said) >= TURNS, killed) == (True, KILLS), said
    return said


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
    said = await asyncio.to_thread(take_turns, id, settings)
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
