"""A lock whose holder is no task of this process, such as a client over HTTP. Law: the server judges it at each use.

Nobody here renews it or watches its time: what is written under one that has ended is refused by the server.

Design: sections 8, 23.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from distributed_state.errors import StateError
from distributed_state.values import chance
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.lease import AsyncLease, Leases
from distributed_state.warm.lock import Lock, check_times, seizing
from distributed_state.warm.scripts import RENEW

_LOCK_VALUE = re.compile(r"x(\d{1,18})@[0-9A-Za-z_.\-]{1,100}:([0-9A-Za-z_.\-]{1,200})")


@dataclass(frozen=True, slots=True)
class CarriedLease:
    """What its holder carries. Raises ValueError if that cannot be a lock's."""

    lock_value: str
    TTL: ClassVar[float] = 30.0

    def __post_init__(self) -> None:
        if _LOCK_VALUE.fullmatch(self.lock_value) is None:
            raise ValueError("this is no lock value")

    @property
    def token(self) -> int:
        """The fencing token, greater for every later holder."""
        return int(self.lock_value[1:].split("@", 1)[0])

    @property
    def holder(self) -> str:
        """The name under which the server knows who holds it."""
        return self.lock_value.split(":", 1)[1]

    @classmethod
    async def take(
        cls, leases: Leases, names: RecordKeys, *, wait: float, ttl: float, take_over: int | None = None
    ) -> Self:
        """Hold the record, or raise LockTimeout after `wait` seconds; at once, from who holds it with this token."""
        lock = _lock(leases, names, wait, ttl, "" if take_over is None else seizing(take_over))
        # Whoever reads the name of a holder elsewhere cannot make a lease of it.
        lock.holder = f"{leases.name()}.{chance.token_hex(12)}"
        try:
            return cls((await lock.take(None)).lock_value)
        except BaseException:
            await leases.port.shield(lock.give_back(leases.port.monotonic() + ttl))
            raise

    async def renew(self, leases: Leases, names: RecordKeys, *, ttl: float) -> bool:
        """Keep it for `ttl` seconds from now; False if it has ended."""
        check_times(0, ttl, None)
        answer = (await leases.port.scripts([(RENEW, [names.lock, names.meta], [self.lock_value, int(ttl * 1000)])]))[0]
        if isinstance(answer, StateError):
            raise answer
        return bool(answer[0] == b"ok")

    async def give_back(self, leases: Leases, names: RecordKeys) -> bool:
        """Release the record; False if it was lost. Harmless when it has ended."""
        lock = _lock(leases, names, 0, self.TTL)
        lock.holder = self.holder
        return await leases.port.shield(lock.give_back(leases.port.monotonic()))

    def carry(self, leases: Leases, lease: AsyncLease) -> None:
        """Have the running task write under it; `lease` is one of the record that was not taken."""
        lease.holder = self.holder
        leases.carry(lease, self.lock_value, self.token)


def _lock(leases: Leases, names: RecordKeys, wait: float, ttl: float, seize: str = "") -> Lock:
    check_times(wait, ttl, None)
    return Lock(leases.warm, leases.waiters, leases.start, names, wait=wait, ttl=ttl, mode="x", seize=seize)
