"""Which members of a team hold which partitions, and what it costs a server that many of them hold none."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis
from below import tiers

from distributed_state.warm import partition_assignment
from distributed_state.warm.partition_assignment import PartitionAssignment

pytestmark = pytest.mark.only(warm="redis", face="asyncio")
PARTITIONS = 16


def calls(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


class Team:
    """Members of one process, who look when they are told."""

    def __init__(self, store: Any, members: int) -> None:
        self._port = tiers(store).port
        self._keys = tiers(store).keys
        self.members = [self.member(number) for number in range(members)]

    def member(self, number: int) -> PartitionAssignment:
        def claim(partition: int) -> bytes:
            return self._keys.partition(partition).journal + b":claim"

        return PartitionAssignment(
            self._port, self._keys, team=self._keys.team("test"), member=f"m{number}", claim=claim, seconds=60.0
        )

    async def look(self) -> None:
        for each in self.members:
            each._renew_at = 0.0
            await each.hold()
            await each.give_back(each.excess)
        await asyncio.sleep(0.005)  # what is given back is another's after a millisecond

    def held(self) -> Counter[int]:
        return Counter(partition for each in self.members for partition in each.mine)


async def looked(opener: Any, members: int, rounds: int = 6) -> Team:
    store = await opener(partitions=PARTITIONS, archiver=False, beat=0)
    team = Team(store, members)
    for _ in range(rounds):
        await team.look()
    return team


@pytest.mark.parametrize("members", [1, 5, 16, 40])
async def test_each_partition_has_one_member_and_none_has_more_than_its_share(opener: Any, members: int) -> None:
    team = await looked(opener, members)
    assert team.held() == Counter(range(PARTITIONS))
    assert max(len(each.mine) for each in team.members) <= -(-PARTITIONS // members)


async def test_what_a_member_leaves_is_taken_by_those_who_wait(opener: Any) -> None:
    team = await looked(opener, 60)
    holders = [each for each in team.members if each.mine]
    for gone in holders[:5]:
        await gone.leave()
        team.members.remove(gone)
    assert len(team.held()) == PARTITIONS - 5
    for _ in range(6):
        await team.look()
    assert team.held() == Counter(range(PARTITIONS))


async def calls_of_a_look(opener: Any, members: int) -> int:
    team = await looked(opener, members)
    before = calls(opener.url)
    await team.look()
    return calls(opener.url) - before


async def test_who_waits_asks_for_little(opener: Any) -> None:
    """Each says that it is there; all who wait together try each partition twice, or one each if they are many."""
    assert await calls_of_a_look(opener, 60) <= 60 + PARTITIONS + 60


async def test_if_each_tried_all_it_would_be_much(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    async def share(self: PartitionAssignment, *_: float) -> tuple[int, int]:
        _, members = await self._port.script(partition_assignment.JOIN, [self._team], [self.member, self._ttl_ms])
        return -(-PARTITIONS // int(members)), PARTITIONS

    monkeypatch.setattr(PartitionAssignment, "_share", share)
    assert await calls_of_a_look(opener, 60) > 60 + PARTITIONS + 60


async def looks_of(opener: Any, members: int) -> float:
    """How many of a team there would look in a third of its seconds, if all began now."""
    team = await looked(opener, members)
    now = min(each.ends for each in team.members) - 60.0
    holders = [each for each in team.members if each.mine]
    assert all(each._renew_at <= each.ends - 40.0 + 0.001 for each in holders), "who has one keeps it"
    return sum(20.0 / max(each._renew_at - now, 20.0) for each in team.members)


async def test_of_many_who_wait_each_looks_more_rarely(opener: Any) -> None:
    """So what they ask together does not grow as they do, up to three times as many as would try one each."""
    assert await looks_of(opener, PARTITIONS * 7) < 4 * PARTITIONS


async def test_if_they_looked_as_often_it_would_grow_as_they_do(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(partition_assignment, "_RAREST", 1.0)
    assert await looks_of(opener, PARTITIONS * 7) > 6 * PARTITIONS
