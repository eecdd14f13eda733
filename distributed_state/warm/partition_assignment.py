"""Which partitions a worker handles. Law: this is for efficiency; two workers may handle one partition.

Design: section 9.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Call, Port
from distributed_state.values import chance
from distributed_state.values.keys import Keys
from distributed_state.warm.clock import Rounds
from distributed_state.warm.scripts import CLAIM, JOIN

log = logging.getLogger(__name__)
SECONDS = 10.0
_RAREST = 3.0  # a member without a partition looks less often, with a pause at most this many times longer


class PartitionAssignment:
    """A fair share of the partitions for one member of a team, held by claims that expire.

    Two in one process are two members with different names. `rounds`: the moments for requests that can wait.
    """

    def __init__(
        self,
        port: Port,
        keys: Keys,
        *,
        team: bytes,
        member: str,
        claim: Callable[[int], bytes],
        rounds: Rounds,
        seconds: float = SECONDS,
    ) -> None:
        self._port = port
        self._keys = keys
        self._team = team
        self.member = member
        self._claim = claim
        self._seconds = seconds
        self._ttl_ms = int(seconds * 1000)
        self._rounds = rounds
        self._pauses = 1.0  # pause of a member without a partition until its next look, in thirds of `seconds`
        self._waits = False  # whether there are more members than can have partitions
        self._tries = 0  # how many partitions a waiting member tries in a look
        self._renew_at = 0.0
        self._joined_until = 0.0  # until then this counts as a member, even without a reply
        self.ends = 0.0  # until then this member's partitions are its own, even without a reply
        self.mine: list[int] = []
        self.excess: list[int] = []

    def hurry(self) -> None:
        """Look for partitions at the next `hold`: another member has left."""
        self._renew_at = 0.0

    async def hold(self) -> None:
        """Renew and claim partitions, if that is due; then `mine` has the held ones, `excess` those to give back."""
        if not self._rounds.due(self._renew_at):
            return
        now = self._port.monotonic()
        pauses = 1.0 if self.mine else self._pauses
        waits = self._waits and not self.mine
        ends = now + self._seconds
        free = await self._free() if waits else []
        # A waiting member renews its membership when hardly two looks are left before it ends: one may fail.
        if not waits or free or self._rounds.due(self._joined_until - 2 * self._seconds / 3 * pauses):
            asked = self.mine or free[:1]
            kept, members, unanswered = await self._ask(asked, int(self._ttl_ms * pauses))
            # A claim without a reply may have been renewed, so others cannot take it: it counts as held until it ends.
            if unanswered and self.mine and now + self._seconds / 2 < self.ends:
                kept, ends = kept + unanswered, self.ends
            self._joined_until = now + self._seconds * pauses
            share, most = self._share(members, pauses) if members else (len(kept), 0)
            if not (waits and self._waits):
                others = [each for each in range(self._keys.partitions) if each not in asked]
                kept += await self._take(chance.source.sample(others, min(most, len(others))), share - len(kept))
            self.mine = kept
            self.excess = kept[share:]
        self._renew_at = now + self._rounds.pause(self._seconds / 3 * (1.0 if self.mine else pauses))
        self.ends = ends

    async def _free(self) -> list[int]:
        """Return unclaimed ones among the partitions that a waiting member tries.

        A plain read; a claim would be a write.
        """
        tried = chance.source.sample(range(self._keys.partitions), min(self._tries, self._keys.partitions))
        try:
            holders = await self._port.exchange([(b"GET", self._claim(each)) for each in tried])
        except WarmUnavailable as error:
            log.debug("%d partitions cannot be checked: %s", len(tried), error)
            return []
        return [each for each, holder in zip(tried, holders, strict=True) if holder is None]

    async def _ask(self, partitions: list[int], ttl_ms: int) -> tuple[list[int], int, list[int]]:
        """Report this member, and claim these partitions.

        Returns the claimed partitions, the number of members, and the partitions without a reply.

        One server of a cluster has the list of the team. While it is down, assignments do not change: the number of
        members is 0, and the result are the renewed partitions.
        """
        joining: Call = JOIN, [self._team], [self.member, ttl_ms]
        *claims, joined = await self._port.scripts([*self._claims(partitions, self._ttl_ms), joining])
        kept = self._ours(partitions, claims)
        unanswered = [
            each for each, answer in zip(partitions, claims, strict=True) if isinstance(answer, WarmUnavailable)
        ]
        if not isinstance(joined, StateError):
            return kept, int(joined[1]), unanswered
        if not kept or not isinstance(joined, WarmUnavailable):
            raise joined
        return kept, 0, unanswered

    async def _take(self, partitions: list[int], wanted: int) -> list[int]:
        """Take `wanted` of these partitions if they are unclaimed; return those taken."""
        taken: list[int] = []
        at = 0
        many = wanted
        while at < len(partitions) and len(taken) < wanted:
            taken += await self._claimed(partitions[at : at + many])
            at += many
            many *= 2  # few partitions are free; growing batches find them in few exchanges
        if taken[wanted:]:
            await self._claimed(taken[wanted:], ttl_ms=1)
        return taken[:wanted]

    def _share(self, members: int, pauses: float) -> tuple[int, int]:
        """Return how many partitions this member should have, and how many to try for that.

        A member that waits while all partitions have holders gets one only when another member ends. Together, all
        waiting members try each partition twice in a third of `seconds`; one that would try less than one looks less
        often instead. *Before, each of 320 tried all 64, which took 23 % of a Redis.* It renews its membership about
        every second look.
        """
        partitions = self._keys.partitions
        share = -(-partitions // members)
        waiting = members - partitions // share
        self._waits = waiting > 0
        # Applies from the next look on: this one has already reported how long its membership lasts.
        self._pauses = min(max(waiting / (2 * partitions), 1.0), _RAREST)
        if waiting <= 0:
            return share, partitions
        self._tries = math.ceil(2 * partitions * pauses / waiting)
        return share, self._tries

    async def anybody(self, now: float) -> bool:
        """Whether the team has a member at this time of the server's clock."""
        return bool(await self._port.command(b"ZRANGEBYSCORE", self._team, now, b"+inf", b"LIMIT", 0, 1))

    async def leave(self) -> None:
        """Release all partitions at once, for the others."""
        await self.give_back(self.mine)
        self._renew_at = 0.0
        await self._port.command(b"ZREM", self._team, self.member)

    async def give_back(self, partitions: Iterable[int]) -> None:
        """Release these partitions at once, for the others."""
        gone = set(partitions)
        if gone:
            self.mine = [each for each in self.mine if each not in gone]
            self.excess = [each for each in self.excess if each not in gone]
            await self._claimed(gone, ttl_ms=1)

    async def _claimed(self, partitions: Iterable[int], ttl_ms: int | None = None) -> list[int]:
        """Claim or renew these for `ttl_ms`, by default for `seconds`; return the claimed ones."""
        wanted = list(partitions)
        if not wanted:
            return []
        try:
            answers = await self._port.scripts(self._claims(wanted, self._ttl_ms if ttl_ms is None else ttl_ms))
        except WarmUnavailable as error:
            log.debug("%d partitions cannot be claimed: %s", len(wanted), error)
            return []
        return self._ours(wanted, answers)

    def _claims(self, partitions: list[int], ttl_ms: int) -> list[Call]:
        return [(CLAIM, [self._claim(each)], [self.member, ttl_ms]) for each in partitions]

    @staticmethod
    def _ours(partitions: list[int], answers: list[Any]) -> list[int]:
        return [
            each
            for each, answer in zip(partitions, answers, strict=True)
            if not isinstance(answer, StateError) and answer[0] == b"ok"
        ]
