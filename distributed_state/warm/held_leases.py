"""Leases of holders elsewhere: clients carry theirs, and all are listed. Law: a look reads only leases that are held.

Each partition has a sorted set of the records whose locks are held, by the locks' tokens: `acquire` adds a member,
`release` removes it. A lock that expired because its holder died leaves its member there. So leases are read from the
locks themselves, and a member without a lock is removed by its token: a later holder of the record has a greater token.

Design: section 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from distributed_state.errors import InvalidValue, LockTimeout, StateError, WarmUnavailable
from distributed_state.port import Port, Words
from distributed_state.results import HeldLease, Waiter
from distributed_state.values import chance
from distributed_state.values.keys import Keys, RecordKeys
from distributed_state.warm.clock import ServerClock
from distributed_state.warm.lease import Leases
from distributed_state.warm.lock import check_times, seizing
from distributed_state.warm.output import Numbers, TurnOutput, stopped, tag_of
from distributed_state.warm.scripts import RENEW, RetryingClient

_WAITERS = 20
_PAGE = 1000  # members of one partition in a page, because some are filtered out
_TTL = 5.0  # maximum seconds for which ending a lease holds the record
_CARRIED = re.compile(r"\.[0-9a-f]{24}(\.[^.]*!)?$")  # a lease that a client carries; only this module reads the suffix
_LOCK_VALUE = re.compile(r"x(\d{1,18})@[0-9A-Za-z_.\-]{1,100}:([0-9A-Za-z_.\-]{1,200}!?)")
_CURSOR = re.compile(r"(\d{1,18})\.(.+)", re.DOTALL)


class HeldLeases:
    """The leases of a namespace, of all holders."""

    def __init__(self, port: Port, keys: Keys, clock: ServerClock) -> None:
        self._port = port
        self._keys = keys
        self._clock = clock

    async def page(self, limit: int, after: str | None, wanted: Callable[[str], bool] | None = None) -> list[HeldLease]:
        """Return the next `limit` leases, those held longest first, of records whose texts are wanted.

        One of several servers may be down: its leases are left out. Raises WarmUnavailable if all are.
        """
        await self._clock.know()
        place = _place(after)
        found: list[HeldLease] = []
        more = True
        while more and len(found) < limit:
            rows, more = await self._next(place, limit if wanted is None else _PAGE)
            while rows and len(found) < limit:
                some, rows = rows[:limit], rows[limit:]
                place = some[-1].place
                found += await self._held([row for row in some if wanted is None or wanted(row.text)])
        return found[:limit]

    async def tidy(self, partitions: Sequence[int], most: int) -> None:
        """Remove members whose locks have expired, among the first `most` of each of these partitions."""
        rows = [row for some in await self._rows(partitions, most, 0) for row in some]
        answers = await self._port.exchange([(b"EXISTS", row.keys.lock) for row in rows]) if rows else []
        await self._take_out([row for row, there in zip(rows, answers, strict=True) if there == 0])

    async def _next(self, after: tuple[int, str], most: int) -> tuple[list[_Row], bool]:
        """Return members after a place, in order, and whether more follow."""
        found = await self._rows(range(self._keys.partitions), most + 1, after[0])
        # Rows after the last one of a truncated partition are left out: its next member may come before them.
        horizon = min((rows[-1].place for rows in found if len(rows) > most), default=None)
        near = [row for rows in found for row in rows if horizon is None or row.place <= horizon]
        return sorted((row for row in near if row.place > after), key=lambda row: row.place), horizon is not None

    async def _rows(self, partitions: Sequence[int], most: int, token: int) -> list[list[_Row]]:
        """Return the first `most` members of each partition from a token on; not of partitions whose server is down."""
        keys = [self._keys.partition(each) for each in partitions]
        limits = (b"%d" % token, b"+inf", b"WITHSCORES", b"LIMIT", 0, most)
        commands: list[Words] = [(b"HGET", each.meta, b"epoch") for each in keys]
        commands += [(b"ZRANGEBYSCORE", each.leases, *limits) for each in keys]
        answers = await self._port.exchange(commands)
        found = []
        for epoch, members in zip(answers[: len(keys)], answers[len(keys) :], strict=True):
            if not isinstance(epoch, Exception) and not isinstance(members, Exception):
                found.append([self._row(*pair, epoch or b"") for pair in _pairs(members)])
        return found

    def _row(self, name: bytes, score: bytes, epoch: bytes) -> _Row:
        keys = self._keys.named(name)
        return _Row(int(float(score)), keys.ref.text, keys, epoch.decode())

    async def _held(self, rows: Sequence[_Row]) -> list[HeldLease]:
        """Return the leases that are still held."""
        commands: list[Words] = []
        for lock, wait in ((row.keys.lock, row.keys.wait) for row in rows):
            # Those that were asked to stop have negative scores.
            queue = (b"ZRANGEBYSCORE", wait, 0, b"+inf", b"WITHSCORES", b"LIMIT", 0, _WAITERS)
            commands += [(b"GET", lock), (b"PTTL", lock), (b"ZCOUNT", wait, 0, b"+inf"), queue]
        answers = await self._port.exchange(commands) if rows else []
        now = self._clock.now()
        found: list[HeldLease] = []
        ended: list[_Row] = []
        for at, row in enumerate(rows):
            value, left_ms, waiting, queue = answers[4 * at : 4 * at + 4]
            if value is None:
                ended.append(row)
            elif not any(isinstance(each, Exception) for each in (value, left_ms, waiting, queue)) and left_ms > 0:
                lease = _lease(row, value.decode(), now + left_ms / 1000, waiting, queue)
                found += [] if lease is None else [lease]
        await self._take_out(ended)
        return found

    async def _take_out(self, rows: Sequence[_Row]) -> None:
        commands: list[Words] = [(b"ZREMRANGEBYSCORE", row.keys.leases, row.token, row.token) for row in rows]
        with suppress(WarmUnavailable):  # the next look removes it
            await self._port.exchange(commands) if commands else None


class _Row(NamedTuple):
    """A member: the record of the lock, the lock's token, and the epoch of its partition."""

    token: int
    text: str
    keys: RecordKeys
    epoch: str

    @property
    def place(self) -> tuple[int, str]:
        """The row's place in the order of all: tokens of several partitions may be equal."""
        return self.token, self.text


def _place(after: str | None) -> tuple[int, str]:
    if after is None:
        return 0, ""
    found = _CURSOR.fullmatch(after)
    if found is None:
        raise InvalidValue(f"after is the cursor of a lease, not {after!r:.80}")
    return int(found[1]), found[2]


def _pairs(members: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return members with their scores."""
    return list(zip(members[::2], members[1::2], strict=True))


def _lease(row: _Row, value: str, ends: float, waiting: int, queue: Any) -> HeldLease | None:
    """Return a lock as a lease; None if the record has another lock now, or the lock's epoch has ended."""
    head, _, holder = value.partition(":")
    token, _, epoch = head[1:].partition("@")
    if int(token) != row.token or epoch != row.epoch:
        return None
    kind = "advisory" if head[0] == "a" else "turn" if holder[-1:] == "!" else "lock"
    kind = "client" if _CARRIED.search(holder) else kind
    waiters = [Waiter(_replica(name.decode().partition(":")[2]), float(since) / 1e6) for name, since in _pairs(queue)]
    ref = row.keys.ref
    # A token is the time at which the lock was granted, or slightly later: see acquire.lua.
    return HeldLease(
        ref.scope, ref.id, kind, row.token, _replica(holder), row.token / 1e6, ends, waiting, tuple(waiters),
        f"{row.token}.{row.text}",
    )  # fmt: skip


def _replica(holder: str) -> str:
    """Return the replica that asked under this name, which `Leases.name` made."""
    return holder.partition(".")[0]


async def end(leases: Leases, keys: RecordKeys, token: int) -> bool:
    """End the lease with this token, even another holder's; False if it is no longer held.

    The lease is taken over and released: its holder is fenced from then on, and the first waiter is next.
    """
    seize = seizing(token)
    held = await leases.warm.command(b"GET", keys.lock)
    if held is None or not held[1:].startswith(seize.encode()):
        return False
    lock = leases.lock(keys, leases.name(), 0, _TTL, chr(held[0]), seize)
    deadline = leases.port.monotonic() + _TTL
    try:
        await lock.take(None)
    except LockTimeout:
        return False
    finally:
        await leases.port.shield(lock.give_back(deadline))
    return True


async def seconds_left(client: RetryingClient, records: Sequence[RecordKeys]) -> list[float | None]:
    """Return how long the lease of each record lasts unless it is renewed, None for those not held. One round trip.

    It may have ended by the time the result is used.
    """
    metas = list(dict.fromkeys(keys.meta for keys in records))
    commands: list[Words] = [(b"HGET", meta, b"journal") for meta in metas]
    commands += [(word, keys.lock) for keys in records for word in (b"GET", b"PTTL")]
    answers = await client.commands(commands) if commands else []
    epochs = {meta: (noted or b"").partition(b" ")[0] for meta, noted in zip(metas, answers, strict=False)}
    locks = zip(answers[len(metas) :: 2], answers[len(metas) + 1 :: 2], strict=True)
    # A lease of another epoch was granted before Redis lost data: it is no longer valid (acquire.lua).
    return [
        left_ms / 1000 if held and left_ms > 0 and b"@%b:" % epochs[keys.meta] in held else None
        for keys, (held, left_ms) in zip(records, locks, strict=True)
    ]


# Leases whose holder is not a task of this process


@dataclass(frozen=True, slots=True)
class CarriedLease:
    """A lock of a holder outside this process, such as an HTTP client, identified by the value that the holder carries.

    This process does not renew it or watch its deadline: the server checks it at each write, and refuses writes under a
    lease that has ended. Raises ValueError if the value cannot be a lock's.
    """

    lock_value: str
    TTL: ClassVar[float] = 30.0

    def __post_init__(self) -> None:
        if _LOCK_VALUE.fullmatch(self.lock_value) is None:
            raise ValueError("this is not a lock value")

    @property
    def token(self) -> int:
        """The fencing token, greater for every later holder."""
        return int(self.lock_value[1:].split("@", 1)[0])

    @property
    def holder(self) -> str:
        """The name under which the server knows the holder."""
        return self.lock_value.split(":", 1)[1]

    @classmethod
    async def take(
        cls,
        leases: Leases,
        keys: RecordKeys,
        *,
        wait: float,
        ttl: float,
        take_over: int | None = None,
        turn: str | None = None,
    ) -> Self:
        """Take the lease, or raise LockTimeout after `wait` seconds; `take_over` takes it from that token's holder.

        `turn`: the tag of the request whose turn the holder runs.
        """
        check_times(wait, ttl, None)
        # The secret suffix: a holder's name, which is shown elsewhere, does not suffice to write under its lease.
        holder = f"{leases.name()}.{chance.token_hex(12)}" + ("" if turn is None else f".{turn}!")
        lock = leases.lock(keys, holder, wait, ttl, seize="" if take_over is None else seizing(take_over))
        try:
            return cls((await lock.take(None)).lock_value)
        except BaseException:
            await leases.port.shield(lock.give_back(leases.port.monotonic() + ttl))
            raise

    async def renew(self, leases: Leases, keys: RecordKeys, *, ttl: float) -> bool:
        """Extend the lease to `ttl` seconds from now; False if it has ended."""
        check_times(0, ttl, None)
        answer = (
            await leases.port.scripts([(RENEW, [keys.lock, keys.meta, keys.stop], [self.lock_value, int(ttl * 1000)])])
        )[0]
        if isinstance(answer, StateError):
            raise answer
        if len(answer) > 1:
            await self.check(leases, keys)
        return bool(answer[0] == b"ok")

    async def check(self, leases: Leases, keys: RecordKeys, *, notify: bool = True) -> bool:
        """Return whether the holder knows that it was asked to stop; one round trip.

        If it does not know it yet, this raises Stopped, unless `notify` is false.
        """
        asked: bytes | None = await leases.warm.command(b"GET", keys.stop)
        mine = self.lock_value.encode() + b"\n"
        if asked is None or not asked.startswith(mine):
            return False
        reason = asked.removeprefix(mine).decode()
        if notify and not reason.endswith("\n"):
            await leases.warm.command(b"SET", keys.stop, asked + b"\n", b"XX", b"KEEPTTL")
            raise stopped(keys, leases.warm.codec_of(keys.ref.text), reason)
        return reason.endswith("\n")

    def output(self, leases: Leases, keys: RecordKeys, last: int) -> TurnOutput:
        """The output of the holder's turn, which has streamed this many chunks."""
        return TurnOutput(leases.outputs, keys, self.lock_value, tag_of(self.lock_value) or "-", Numbers(last))

    async def give_back(self, leases: Leases, keys: RecordKeys, *, ends: TurnOutput | None = None) -> bool:
        """Release the lease, and end the output; False if it was lost. Has no effect if the lease has ended."""
        lock = leases.lock(keys, self.holder, 0, self.TTL)
        lock.output = ends
        return await leases.port.shield(lock.give_back(leases.port.monotonic()))

    def carry(self, leases: Leases, keys: RecordKeys, streamed: int = 0, *, stopped: bool = False) -> None:
        """Make the running task write under it; it is not registered for renewal here. `stopped`: see `check`."""
        leases.carry(keys, self.lock_value, self.holder, self.token, streamed, stopped)
