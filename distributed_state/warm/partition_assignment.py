"""Which partitions a worker handles. Law: it is for efficiency; a worker must not rely on being alone.

Design: section 9.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Port
from distributed_state.values.keys import Keys
from distributed_state.warm.scripts import CLAIM, JOIN

log = logging.getLogger(__name__)
SECONDS = 10.0
_RAREST = 3.0  # who has no partition looks more rarely than who has one, by so many times at most


class PartitionAssignment:
    """A fair share of the partitions for one member of a team, held by claims that run out.

    Two in one process are two members, each by a name of its own.
    """

    def __init__(
        self,
        port: Port,
        keys: Keys,
        *,
        team: bytes,
        member: str,
        claim: Callable[[int], bytes],
        seconds: float = SECONDS,
    ) -> None:
        self._port = port
        self._keys = keys
        self._team = team
        self.member = member
        self._claim = claim
        self._seconds = seconds
        self._ttl_ms = int(seconds * 1000)
        self._pauses = 1.0  # of a look that finds no partition, until the next one, in thirds of `seconds`
        self._renew_at = self.ends = 0.0  # `ends`: when what is ours may be somebody else's, if nothing is heard
        self.mine: list[int] = []
        self.excess: list[int] = []

    async def hold(self) -> None:
        """Keep and take partitions, if it is time to: `mine` are those held then, `excess` those to give back."""
        now = self._port.monotonic()
        if now < self._renew_at:
            return
        # Before the team is asked for: its server may be the one that is away, or takes long.
        kept = await self._claimed(self.mine)
        pauses = 1.0 if kept else self._pauses
        share, most = await self._share(len(kept), pauses)
        others = [each for each in range(self._keys.partitions) if each not in kept]
        kept += await self._take(random.sample(others, min(most, len(others))), share - len(kept))
        self.mine = kept
        self.excess = kept[share:]
        self._renew_at = now + self._seconds / 3 * (1.0 if kept else pauses)
        self.ends = now + self._seconds

    async def _take(self, partitions: list[int], wanted: int) -> list[int]:
        """Take so many of these that are nobody's; what was taken."""
        taken: list[int] = []
        at = 0
        many = wanted
        while at < len(partitions) and len(taken) < wanted:
            taken += await self._claimed(partitions[at : at + many])
            at += many
            many *= 2  # few are free, so that it takes few exchanges to find them
        if taken[wanted:]:
            await self._claimed(taken[wanted:], ttl_ms=1)
        return taken[:wanted]

    async def _share(self, kept: int, pauses: float) -> tuple[int, int]:
        """How many partitions are to be ours, and how many to try for that.

        Who has none where all have their holders finds one only when somebody ends. Together all who wait try each
        partition twice in a third of `seconds`, and one who would try less than one looks more rarely instead. *Each of
        320 tried all 64, and 23 % of a Redis went into that.*

        One server of a cluster has the list of the team. While it is away nothing changes hands: ours are what we kept.
        """
        try:
            _, members = await self._port.script(JOIN, [self._team], [self.member, int(self._ttl_ms * pauses)])
        except WarmUnavailable:
            if not kept:
                raise
            return kept, 0
        partitions = self._keys.partitions
        share = -(-partitions // int(members))
        waiting = int(members) - partitions // share
        # Of the next look: this one has said for how long it counts.
        self._pauses = min(max(waiting / (2 * partitions), 1.0), _RAREST)
        if waiting <= 0:
            return share, partitions
        return share, math.ceil(2 * partitions * pauses / waiting)

    async def leave(self) -> None:
        """Leave everything to the others at once."""
        await self.give_back(self.mine)
        self._renew_at = 0.0
        await self._port.command(b"ZREM", self._team, self.member)

    async def give_back(self, partitions: Iterable[int]) -> None:
        """Leave these to the others at once."""
        gone = set(partitions)
        if gone:
            self.mine = [each for each in self.mine if each not in gone]
            self.excess = [each for each in self.excess if each not in gone]
            await self._claimed(gone, ttl_ms=1)

    async def _claimed(self, partitions: Iterable[int], ttl_ms: int | None = None) -> list[int]:
        """Take or keep these for the time given, else for `seconds`; those that are ours then."""
        wanted = list(partitions)
        if not wanted:
            return []
        asked = [self.member, self._ttl_ms if ttl_ms is None else ttl_ms]
        try:
            answers = await self._port.scripts([(CLAIM, [self._claim(each)], asked) for each in wanted])
        except WarmUnavailable as error:
            log.debug("none of %d partitions can be claimed: %s", len(wanted), error)
            return []
        return [
            each
            for each, answer in zip(wanted, answers, strict=True)
            if not isinstance(answer, StateError) and answer[0] == b"ok"
        ]
