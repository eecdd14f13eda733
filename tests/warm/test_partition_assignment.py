"""Which members of a team hold which partitions, and what it costs a server that many of them hold none."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis
from below import tiers

from distributed_state.errors import WarmUnavailable
from distributed_state.warm import partition_assignment
from distributed_state.warm.partition_assignment import PartitionAssignment

pytestmark = pytest.mark.only(warm="redis", api="asyncio")
PARTITIONS = 16


def calls(url: str) -> Counter[str]:
    """Scripts, and those commands that look at a claim, in scripts too."""
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
        asked = {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "get")}
        return Counter(scripts=asked["evalsha"] + asked["eval"], looks=asked["get"])


class Team:
    """Members of one process, who look when they are told."""

    def __init__(self, store: Any, members: int) -> None:
        self._port = tiers(store).port
        self._keys = tiers(store).keys
        self.name = self._keys.team("test")
        self._rounds = tiers(store).rounds
        self.members = [self.member(number) for number in range(members)]

    def member(self, number: int) -> PartitionAssignment:
        def claim(partition: int) -> bytes:
            return self._keys.partition(partition).journal + b":claim"

        return PartitionAssignment(
            self._port, self._keys, team=self.name, member=f"m{number}", claim=claim, rounds=self._rounds, seconds=60.0
        )

    async def look(self, *, said: bool = False) -> None:
        """All look, and say that they are members, unless those who wait have just said so."""
        for each in self.members:
            each._renew_at = 0.0
            if not said:
                each._joined_until = 0.0
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


async def test_what_was_claimed_again_without_an_answer_is_kept_while_the_claim_before_lasts(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await looked(opener, 1)
    (member,) = team.members
    port = member._port
    plain = port.scripts

    async def lost(calls: Any) -> Any:
        _, *others = await plain(calls)
        return [WarmUnavailable("the answer was lost"), *others]

    monkeypatch.setattr(port, "scripts", lost)
    ends = member.ends
    await team.look()
    assert len(member.mine) == PARTITIONS
    assert member.ends == ends
    member.ends = port.monotonic() + 1
    await team.look()
    assert len(member.mine) == PARTITIONS - 1


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


async def calls_of_a_look(opener: Any, members: int) -> Counter[str]:
    team = await looked(opener, members)
    before = calls(opener.url)
    await team.look(said=True)
    return calls(opener.url) - before


async def test_who_waits_asks_for_little(opener: Any) -> None:
    """All who wait together look at each partition twice, or at one each if they are many; and claim none that is held.

    That they are members holds for several looks. Who has a partition says that it is one, and keeps it.
    """
    asked = await calls_of_a_look(opener, 60)
    assert asked["scripts"] == 2 * PARTITIONS
    assert asked["looks"] <= PARTITIONS + 60


async def test_if_each_claimed_what_it_tries_it_would_be_much(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    async def free(_: PartitionAssignment) -> list[int]:
        return [0]

    monkeypatch.setattr(PartitionAssignment, "_free", free)
    assert (await calls_of_a_look(opener, 60))["scripts"] > 2 * PARTITIONS + 60


async def test_if_each_tried_all_it_would_be_much(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    of_all = PartitionAssignment._share

    def share(self: PartitionAssignment, members: int, pauses: float) -> tuple[int, int]:
        shared, _ = of_all(self, members, pauses)
        self._tries = PARTITIONS
        return shared, PARTITIONS

    monkeypatch.setattr(PartitionAssignment, "_share", share)
    assert (await calls_of_a_look(opener, 60))["looks"] > 2 * (PARTITIONS + 60)


async def test_who_waits_says_again_that_it_is_a_member_before_that_is_over(opener: Any) -> None:
    team = await looked(opener, PARTITIONS + 1)
    (waits,) = (each for each in team.members if not each.mine)
    with redis.Redis.from_url(opener.url) as client:
        client.delete(team.name)
        waits._renew_at = 0.0
        await waits.hold()
        assert client.zcard(team.name) == 0, "it said so a moment ago"
        waits._renew_at = waits._joined_until = 0.0
        await waits.hold()
        seconds, micros = client.time()
        left = client.zscore(team.name, waits.member) - seconds - micros / 1e6
    assert waits._joined_until - waits._port.monotonic() <= left, "it knows when that is over"


async def looks_of(opener: Any, members: int) -> float:
    """How many of a team there would look in a third of its seconds, if all began now."""
    team = await looked(opener, members)
    now = min(each.ends for each in team.members) - 60.0
    holders = [each for each in team.members if each.mine]
    assert all(each._renew_at <= each.ends - 40.0 + 0.1 for each in holders), "who has one keeps it"
    return sum(20.0 / max(each._renew_at - now, 20.0) for each in team.members)


async def test_of_many_who_wait_each_looks_more_rarely(opener: Any) -> None:
    """So what they ask together does not grow as they do, up to three times as many as would try one each."""
    assert await looks_of(opener, PARTITIONS * 7) < 4 * PARTITIONS


async def test_if_they_looked_as_often_it_would_grow_as_they_do(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(partition_assignment, "_RAREST", 1.0)
    assert await looks_of(opener, PARTITIONS * 7) > 6 * PARTITIONS
