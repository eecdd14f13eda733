"""Who works on which partitions. Law: shares are for efficiency; whoever works must not rely on being alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from distributed_state.port import Port
from distributed_state.values.keys import Keys
from distributed_state.warm.client import Warm

SECONDS = 10.0


class PartitionAssignment:
    """A fair share of the partitions for one member of a team, held by claims that run out.

    Two in one process are two members, each by a name of its own.
    """

    def __init__(
        self,
        port: Port,
        warm: Warm,
        keys: Keys,
        *,
        team: bytes,
        member: str,
        claim: Callable[[int], bytes],
        seconds: float = SECONDS,
    ) -> None:
        self._port = port
        self._warm = warm
        self._keys = keys
        self._team = team
        self.member = member
        self._claim = claim
        self._seconds = seconds
        self._renew_at = self.ends = 0.0  # `ends`: when what is ours may be somebody else's, if nothing is heard
        self.mine: list[int] = []
        self.excess: list[int] = []

    async def hold(self) -> None:
        """Keep and take partitions, if it is time to: `mine` are those held then, `excess` those to give back."""
        now = self._port.monotonic()
        if now < self._renew_at:
            return
        members = await self._warm.join(self._team, self.member, int(self._seconds * 1000))
        share = -(-self._keys.partitions // members)
        kept = await self._claimed(self.mine)
        if len(kept) < share:
            others = [each for each in range(self._keys.partitions) if each not in kept]
            start = random.randrange(len(others)) if others else 0
            rotated = others[start:] + others[:start]
            while rotated and len(kept) < share:
                some = rotated[: share - len(kept)]
                rotated = rotated[share - len(kept) :]
                kept += await self._claimed(some)
        self.mine = kept
        self.excess = kept[share:]
        self._renew_at = now + self._seconds / 3
        self.ends = now + self._seconds

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
            await self._warm.claim([self._claim(each) for each in gone], self.member, 1)

    async def _claimed(self, partitions: Iterable[int]) -> list[int]:
        wanted = list(partitions)
        if not wanted:
            return []
        claims = [self._claim(each) for each in wanted]
        got = await self._warm.claim(claims, self.member, int(self._seconds * 1000))
        return [each for each, ours in zip(wanted, got, strict=True) if ours]
