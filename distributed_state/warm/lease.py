"""Leases: locks that are held. Law: a lease protects nothing by itself; the server checks its value in every write.

A lease that is released with its last commit, in one round trip, is released only if that commit was applied: a commit
that has to be sent again still needs the lease, and after a refused one it is released separately.

The lease is bound to the task or thread that took it (a context variable), not to an object. It is renewed while it is
held: by the `with` that entered it, or, if taken by hand, while the object is referenced; and not longer than that task
or thread lives.

The leases of a replica are renewed together. A holder must notice a loss before another one can hold its lock, so the
deadlines are watched separately from the renewal, which may hang with the server. Each of several servers has its own
renewing job, because otherwise one silent server would cost the leases on the others. A lease is registered before it
is requested: if its holder was interrupted, ended or was garbage-collected, the next round releases it instead of
renewing it.

Design: sections 8, 20, 23.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self
from weakref import ref

from distributed_state.errors import Fenced, Interrupted, Locked, LockTimeout, StateError, WarmUnavailable
from distributed_state.port import Call, Guard, Job, Port
from distributed_state.port.bodies import Body, leaving
from distributed_state.port.waited import bounded
from distributed_state.values import chance
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.client import OpId, Warm
from distributed_state.warm.link import Link
from distributed_state.warm.lock import Lock, Taken, Waiters, check_times, seizing
from distributed_state.warm.scripts import RENEW

log = logging.getLogger(__name__)
# References are weak: the context that took a lease does not keep it alive.
_held: ContextVar[dict[tuple[int, str], Callable[[], AsyncLease | None]]] = ContextVar("distributed_state_leases")
_IDLE_SECONDS = 60.0
_SHORTEST = 0.005
_GIVEN_BACK = 2  # times
_LOCK_VALUE = re.compile(r"x(\d{1,18})@[0-9A-Za-z_.\-]{1,100}:([0-9A-Za-z_.\-]{1,200})")


class Leases:
    """The leases of one replica: renewed together, lost individually."""

    def __init__(
        self,
        port: Port,
        warm: Warm,
        link: Link,
        start: Callable[[int], Any],
        *,
        on_granted: Callable[[str, Taken], None],
        on_lost: Callable[[AsyncLease], None],
    ) -> None:
        self.port = port
        self.warm = warm
        self.start = start
        self.on_granted = on_granted
        self._on_lost = on_lost
        self.waiters = Waiters(port, link)
        self.renewal = Renewal(port, self._lose)
        self._count = itertools.count(1)
        self.lost = self.timeouts = 0
        port.when_a_loop_ends(self._loop_ended)
        self.abandoned = False  # set in a forked child: it must not release its parent's leases

    @property
    def held(self) -> int:
        """The number of leases that are held."""
        return len(self.renewal.leases)

    def of(self, text: str) -> AsyncLease | None:
        """Return the lease under which the running task writes: its own, or one of the task that started it."""
        leases = _held.get(None)
        found = leases.get((id(self), text)) if leases else None
        lease = found() if found is not None else None
        return lease if _is_held(lease) else None

    def lock_value(self, text: str) -> str:
        """Return the lock value for a write of the running task. Raises Fenced if the lease is known to be lost."""
        lease = self.of(text)
        if lease is None:
            return ""
        # Checks the clock as well, because a body that never yields blocks the job that watches deadlines.
        if lease.lost or self.port.monotonic() >= lease.ends:
            self.warm.refused["fenced"] += 1
            raise lease.fenced("nothing was sent")
        return lease.lock_value

    def name(self) -> str:
        """Make a new name for a holder, which was never used before."""
        return f"{self.warm.replica}.{next(self._count)}"

    def lock(self, keys: RecordKeys, holder: str, wait: float, ttl: float, mode: str = "x", seize: str = "") -> Lock:
        """Make a lock that is requested under this holder's name."""
        return Lock(self.warm, self.waiters, self.start, keys, holder, wait=wait, ttl=ttl, mode=mode, seize=seize)

    def keep(self, lease: AsyncLease) -> None:
        """Note that the lease was granted: the running task writes under it, and its deadline is watched."""
        self.hold_here(lease)
        if self.warm.telemetry.on:
            lease.span = self.warm.telemetry.begin("lease.hold", lease.keys)
        self.renewal.watch(lease)

    def hold_here(self, lease: AsyncLease) -> None:
        """Make writes of the running context use the lease: a `with` may be left in another context than entered."""
        if self.of(lease.text) is not lease:
            _held.set({**_others(lease), (id(self), lease.text): ref(lease)})

    def drop(self, lease: AsyncLease) -> None:
        """Stop writing under a lease that is being released."""
        lease.owner = None  # breaks the cycle of a task whose error references this lease
        self.end_span(lease, "lost" if lease.lost else "ok")
        _held.set(_others(lease))

    def end_span(self, lease: AsyncLease, outcome: str) -> None:
        """End the lease's telemetry span."""
        if lease.span is not None:
            self.warm.telemetry.finish(lease.span, outcome)
            lease.span = None

    def seized(self, lock_value: str) -> None:
        """Note that another request's turn, or an operator, took over the lock with this value."""
        for lease in self.renewal.leases:
            if lease.lock_value == lock_value:
                lease.seized = True
                self._lose(lease, "was taken over")

    def _loop_ended(self, loop: object) -> None:
        """Count the leases of the loop's tasks as lost: their holders can no longer release them."""
        for lease in self.renewal.leases:
            if self.port.loop_of(lease.owner) is loop:
                self._lose(lease, "was held by a task of an event loop that has ended")

    def _lose(self, lease: AsyncLease, why: str) -> None:
        if self.renewal.drop(lease.holder) and not lease.lost:
            about = lease.text[:200]
            log.warning("lease of %s with token %d lost: it %s", about, lease.token, why, extra={"record": about})
            lease.lose()
            self.end_span(lease, "lost")
            self.report_loss(lease)

    def report_loss(self, lease: AsyncLease) -> None:
        """Publish the loss of a held lease once; its holder knows of it already."""
        if not lease.loss_reported:
            lease.loss_reported = True
            self.lost += 1
            self._on_lost(lease)

    def judge(self, lease: AsyncLease, refused: Fenced) -> Fenced:
        """Return the error of a refused commit. A lease that cannot have expired was taken over by another turn.

        That turn may have ended, and the lock may be free; the message that it took over may have arrived meanwhile.
        """
        self.report_loss(lease.outer or lease)
        taken = refused.holder and self.port.monotonic() < min(lease.deadline, lease.ends)
        if not taken and not lease.seized:
            return refused
        lease.seized = True
        return lease.fenced("nothing was written")

    async def close(self) -> None:
        """Stop renewing; leases that are still held expire."""
        await self.renewal.close()


def _others(mine: AsyncLease) -> dict[tuple[int, str], Callable[[], AsyncLease | None]]:
    """Return the other leases held in this context, without interrupted ones, which would stay in it forever."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and _is_held(lease)}


def _is_held(lease: AsyncLease | None) -> bool:
    """Whether the lease still has a holder.

    False if the lease was released, and the caller is a task that was started under it; also if its body has ended,
    because it was interrupted before the release.
    """
    return lease is not None and not lease.released and lease.body.there


@bounded("acquire_and", "leave")
class AsyncLease:
    """A record that one task or thread has locked.

    `token` is the fencing token, `lost` says whether the lease was lost.

    Example::

        async with record.lock(wait=5.0, ttl=30.0) as lease:
            await record.set("seat", "12A")  # refused if lease.token is no longer the holder's

    Writes made inside carry the token; once it is lost they raise Fenced. Under asyncio the body is also cancelled.
    """

    token: int
    """The fencing token, 0 before the record is held; a later holder's is greater."""

    def __init__(
        self,
        leases: Leases,
        keys: RecordKeys,
        *,
        wait: float,
        ttl: float,
        advisory: bool = False,
        limit: float | None = None,
        turn: str | None = None,
        seize: bool = False,
        take_over: int | None = None,
    ) -> None:
        check_times(wait, ttl, limit)
        self.keys = keys
        self.text = keys.ref.text
        self.ttl = ttl
        self.ttl_ms = int(ttl * 1000)
        self.lock_value = ""
        self.token = 0
        self.holder = ""  # the name under which the server knows the holder
        self.released = True  # also before the record is held
        self.deadline = self.renew_at = 0.0
        self.ends = math.inf  # when the lease ends even if its holder is alive
        self.owner: object = None
        self.waited = 0.0  # seconds of waiting for other holders
        self._leases = leases
        self.wait = wait
        self.mode = "a" if advisory else "x"
        self._limit = limit
        # A turn's lock names the request, so that the request's next attempt may take it over.
        self._turn = "" if turn is None else f".{turn}!"
        self._seize = seizing(take_over) if take_over is not None else self._turn if seize else ""
        self.body = Body()
        self._lost = False
        self.seized = False
        self.loss_reported = False
        self._released_with_commit = False
        self.outer: AsyncLease | None = None
        self._guard: Guard | None = None
        self.span: Any = None

    @property
    def lost(self) -> bool:
        """Whether the lease was lost: not renewed in time, taken over, or left to the parent process by an os.fork."""
        return self._lost or self._leases.abandoned or (self.outer is not None and self.outer.lost)

    @property
    def granted(self) -> bool:
        """Whether the lease was granted, so that it has to be renewed."""
        return not (self.released or self._released_with_commit or self._lost)

    @property
    def wanted(self) -> bool:
        """Whether a holder still holds, acquires or releases the lease: see `port.bodies`."""
        return self.body.held_by(self.owner)

    def orphaned(self) -> None:
        """Count the lease as lost, because it is no longer `wanted`: its holder was interrupted or has ended.

        It does not count as released: a write that another task still sends under it must be refused, not sent without
        a lock.
        """
        self._guard = None  # the body has ended, but its task may run on
        self._lost = True
        self._leases.end_span(self, "lost")
        self.owner = None

    def renewed(self, sent: float) -> None:
        """Note that the server confirmed the lease, asked at `sent`.

        A tenth of the time is a margin for slow clocks.
        """
        self.deadline = sent + self.ttl * 0.9
        self.renew_at = sent + self.ttl / 3

    def fenced(self, consequence: str) -> Fenced:
        """Return the error for a lease that was lost or taken over."""
        kind, why = (Interrupted, "taken over") if self.seized else (Fenced, "lost")
        return kind(f"{self.text[:200]}: the lease with token {self.token} was {why}; {consequence}")

    def lose(self) -> None:
        """Note that the lease is lost, and interrupt the body that runs under it."""
        self._lost = True
        if self._guard is not None:
            self._guard.interrupt()

    async def acquire(self) -> Self:
        """Take the lease, or raise LockTimeout after `wait` seconds. If this task holds it already, it nests."""
        await self.acquire_and()
        return self

    async def acquire_and(self, trailing_call: Call | None = None) -> Any:
        """Take the lease; return the answer of a script that is sent with the request, in one round trip.

        None if it nests.
        """
        outer = self._leases.of(self.text)
        # A task started inside the body writes under the lease, but its own locks do not nest in it.
        if outer is not None and outer.owner is self._leases.port.owner():
            if outer is self or outer.mode != self.mode:
                raise Locked(f"{self.text[:200]}: this task already holds this lease, or one of the other mode")
            if outer.lost:
                raise outer.fenced("it cannot be nested")
            self.outer = outer
            self.token = outer.token
            self.lock_value = outer.lock_value
            return None
        self._begin()
        try:
            self._leases.renewal.keep(self, self._lock)
            began = self._leases.port.monotonic()
            taken = await self._lock.take(trailing_call)
            self.waited = taken.sent - began
            self._granted(taken)
        except BaseException as error:
            self.body.leave()  # first: if the rest is interrupted, the next round of renewal releases it
            if isinstance(error, LockTimeout):
                self._leases.timeouts += 1
            await self._leases.port.shield(self._lock.give_back(self.deadline))
            self.released = True
            self._leases.renewal.drop(self.holder)
            raise
        return taken.trailing

    def _begin(self) -> None:
        """Reset the state of an earlier acquisition, and take a new holder name."""
        self._lost = self.seized = self.loss_reported = self._released_with_commit = False
        self.lock_value = ""
        self.deadline = 0.0
        self.renew_at = self._leases.port.monotonic() + self.ttl / 3
        self.owner = self._leases.port.owner()
        self.holder = self._leases.name() + self._turn
        self._lock = self._leases.lock(self.keys, self.holder, self.wait, self.ttl, self.mode, self._seize)
        self.body.begin()

    def _granted(self, taken: Taken) -> None:
        self.lock_value = taken.lock_value
        self.token = int(taken.lock_value[1:].split("@", 1)[0])
        self._leases.on_granted(self.text, taken)
        self.ends = math.inf if self._limit is None else taken.sent + self._limit
        self.renewed(taken.sent)
        self.released = False
        self._leases.keep(self)

    def release_call(self, op: OpId) -> Call | None:
        """Return the call that releases the lease, to be sent after a last commit. Renewal stops now.

        The call releases only if this commit was applied. After a refused commit, `release` releases the lease.
        """
        if self.outer is not None:
            return None
        self._leases.drop(self)
        self._released_with_commit = True
        return self._lock.release_call(op)

    def release_answered(self, answer: Any) -> None:
        """Parse the answer to `release_call`. If the server kept the lock ('kept'), `release` releases it later."""
        if isinstance(answer, list) and answer[0] != b"kept":
            self.released = True
            self._leases.renewal.drop(self.holder)

    async def release(self) -> None:
        """Release the lease. Has no effect on a lost lease, which another holder may have now."""
        if self.outer is not None:
            self.outer = None
            return
        if self.released:
            return
        self.body.leave_by_hand()
        self.released = True
        self._leases.drop(self)
        if self._leases.abandoned:
            return
        ours = await self._leases.port.shield(self._lock.give_back(self.deadline))
        if self._leases.renewal.drop(self.holder) and not ours and not self._released_with_commit:
            self._leases.report_loss(self)  # the lease had expired unnoticed

    async def __aenter__(self) -> Self:
        await self.acquire()
        self.protect()
        return self

    def protect(self) -> None:
        """From now on interrupt the running task's body when the lease is lost."""
        if self.outer is None:
            self._guard = self._leases.port.guard()

    @leaving("body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave(error)

    async def leave(self, error: BaseException | None) -> None:
        """Release the record at the end of a body that ended with `error`. Raises Fenced if a loss has ended it."""
        nested = self.outer is not None
        cause = error
        try:
            await self.release()
        except BaseException as late:  # noqa: BLE001 - the interruption may arrive only now, at this await
            cause = late
        if not nested and self._guard is not None and self._guard.leave(cause):
            raise self.fenced("its body was ended") from cause
        if cause is not error and cause is not None:
            raise cause


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
        cls, leases: Leases, keys: RecordKeys, *, wait: float, ttl: float, take_over: int | None = None
    ) -> Self:
        """Take the lease, or raise LockTimeout after `wait` seconds; `take_over` takes it from that token's holder."""
        check_times(wait, ttl, None)
        # The secret suffix: a holder's name, which is shown elsewhere, does not suffice to write under its lease.
        holder = f"{leases.name()}.{chance.token_hex(12)}"
        lock = leases.lock(keys, holder, wait, ttl, seize="" if take_over is None else seizing(take_over))
        try:
            return cls((await lock.take(None)).lock_value)
        except BaseException:
            await leases.port.shield(lock.give_back(leases.port.monotonic() + ttl))
            raise

    async def renew(self, leases: Leases, keys: RecordKeys, *, ttl: float) -> bool:
        """Extend the lease to `ttl` seconds from now; False if it has ended."""
        check_times(0, ttl, None)
        answer = (await leases.port.scripts([(RENEW, [keys.lock, keys.meta], [self.lock_value, int(ttl * 1000)])]))[0]
        if isinstance(answer, StateError):
            raise answer
        return bool(answer[0] == b"ok")

    async def give_back(self, leases: Leases, keys: RecordKeys) -> bool:
        """Release the lease; False if it was lost. Has no effect if it has ended."""
        lock = leases.lock(keys, self.holder, 0, self.TTL)
        return await leases.port.shield(lock.give_back(leases.port.monotonic()))

    def carry(self, leases: Leases, keys: RecordKeys) -> None:
        """Make the running task write under it; it is not registered for renewal here."""
        lease = AsyncLease(leases, keys, wait=0, ttl=self.TTL)
        lease.holder = self.holder
        lease.lock_value = self.lock_value
        lease.token = self.token
        lease.owner = leases.port.owner()
        lease.released = False
        _held.set({**_others(lease), (id(leases), lease.text): lambda: lease})


# Renewal


class Renewal:
    """The registered leases, by their holders' names; `lose(lease, why)` is called for one that cannot be kept."""

    def __init__(self, port: Port, lose: Callable[[AsyncLease, str], None]) -> None:
        self._port = port
        self._lose = lose
        self._mutex = port.mutex()
        self._kept = port.signal()
        self._watched = port.signal()
        # When each job wakes. A job that is awake is notified of every lease, because it may have looked already.
        self._renews_at = self._watches_at = math.inf
        self._jobs: list[Job] = []
        self._servers: dict[str, _Server] = {}
        self._held: dict[str, _Kept] = {}

    @property
    def leases(self) -> list[AsyncLease]:
        """The leases that are held."""
        found = [kept.lease() for kept in list(self._held.values())]
        return [lease for lease in found if lease is not None and lease.granted]

    def keep(self, lease: AsyncLease, lock: Lock) -> None:
        """Register a lease that is about to be requested under the lock's name."""
        self._held[lock.holder] = _Kept(lease, lock)
        with self._mutex:
            if not self._jobs:
                self._jobs = [
                    self._port.spawn(self._renew, "distributed-state-leases"),
                    self._port.spawn(self._watch, "distributed-state-deadlines"),
                ]
        if lease.renew_at < self._renews_at:
            self._kept.set()

    def watch(self, lease: AsyncLease) -> None:
        """Watch the deadline of a lease that was granted."""
        if min(lease.deadline, lease.ends) < self._watches_at:
            self._watched.set()

    def drop(self, holder: str) -> bool:
        """Stop renewing a lease. True if it was renewed until now, and was not released for lack of a holder."""
        kept = self._held.pop(holder, None)
        return kept is not None and not kept.given_back

    async def _renew(self) -> None:
        while True:
            self._kept.clear()  # first: a lease registered from here on ends the wait below
            self._renews_at = math.inf
            await self._round()  # a separate method, so that no local variable of this loop keeps a lease alive
            now = self._port.monotonic()
            first = min((kept.due_at for kept in list(self._held.values())), default=now + _IDLE_SECONDS)
            self._renews_at = max(first, now + _SHORTEST)
            await self._kept.wait(self._renews_at - now)

    async def _round(self) -> None:
        now = self._port.monotonic()
        for holder in [holder for holder, kept in list(self._held.items()) if kept.over(now)]:
            self._held.pop(holder, None)
        due = {holder: kept for holder, kept in list(self._held.items()) if now >= kept.due_at}
        if self._port.several:
            self._hand_out(due, now)
        elif due:
            await self._renew_all(list(due.values()))

    async def _watch(self) -> None:
        while True:
            self._watched.clear()
            self._watches_at = math.inf
            now = self._port.monotonic()
            self._watches_at = max(min(self._ends(now), default=now + _IDLE_SECONDS), now + _SHORTEST)
            await self._watched.wait(self._watches_at - now)

    def _ends(self, now: float) -> list[float]:
        """Return when leases end unless they are renewed; those that have ended are lost."""
        ends = []
        for lease in self.leases:
            if now >= lease.deadline:
                self._lose(lease, "could not be renewed in time")
            elif now >= lease.ends:
                self._lose(lease, "was held for as long as it may be")
            else:
                ends.append(min(lease.deadline, lease.ends))
        return ends

    def _hand_out(self, due: dict[str, _Kept], now: float) -> None:
        """Give each lease to the job of the server that has its lock now, without waiting."""
        for holder, kept in due.items():
            kept.wait(now)
            node = self._server_of(kept)
            with self._mutex:
                server = self._servers.get(node)
                if server is None:
                    server = self._servers[node] = _Server(self._port)
                    server.job = self._port.spawn(partial(self._serve, node, server), "distributed-state-leases-of-one")
                server.due[holder] = kept
            server.handed.set()

    def _server_of(self, kept: _Kept) -> str:
        try:
            return self._port.node_of(kept.lock.keys.lock)
        except WarmUnavailable:
            return ""  # no server has it now; the job finds out where it is

    async def _serve(self, node: str, server: _Server) -> None:
        """Renew the leases of one server; end when it has been idle for a while."""
        while True:
            server.handed.clear()  # first: leases handed out from here on end the wait below
            with self._mutex:
                due, server.due = server.due, {}
            if due:
                await self._renew_all(list(due.values()))
            elif not await server.handed.wait(_IDLE_SECONDS):
                with self._mutex:
                    if not server.due:
                        del self._servers[node]
                        return

    async def _renew_all(self, due: list[_Kept]) -> None:
        sent = self._port.monotonic()
        asked = {kept: call for kept in due if (call := kept.due_call(sent)) is not None}
        try:
            answers = await self._port.scripts(list(asked.values())) if asked else []
        except StateError as error:
            log.warning("leases: renewal failed: %s", error)
            return
        for kept, answer in zip(asked, answers, strict=True):
            if isinstance(answer, StateError):
                about = kept.lock.keys.ref.text[:200]
                log.warning("leases: renewal of %s failed: %s", about, answer, extra={"record": about})
            elif kept.given_back:
                kept.given_back += 1
            else:
                self._renewed(kept.lease(), answer[0], sent)

    def _renewed(self, lease: AsyncLease | None, answer: bytes, sent: float) -> None:
        if lease is None:
            return  # garbage-collected meanwhile; the next round releases it
        if answer == b"ok":
            lease.renewed(sent)
        elif answer != b"uninitialised" and lease.granted:
            # If the partition is not initialised, recovery decides about the lease. A lease that is being released is
            # not lost: the server may have processed the release before this renewal.
            self._lose(lease, "is held by somebody else or expired")

    async def close(self) -> None:
        """Stop renewing; leases that are still held expire."""
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()
        # Closed after the job that hands out leases, so that no new server appears.
        servers = list(self._servers.values())
        self._servers = {}
        for server in servers:
            if server.job is not None:
                await server.job.stop()


class _Kept:
    """A lease that is held or requested under one name. It is kept alive at the server, but not in memory."""

    __slots__ = ("_again_at", "_until", "given_back", "lease", "lock")

    def __init__(self, lease: AsyncLease, lock: Lock) -> None:
        self.lease = ref(lease)
        self.lock = lock
        self.given_back = 0  # 0 while it has a holder, then 1 plus the number of answered releases
        self._again_at = 0.0
        self._until = math.inf

    @property
    def due_at(self) -> float:
        """When to look at it next."""
        lease = self.lease()
        return self._again_at if lease is None or self.given_back else max(lease.renew_at, self._again_at)

    def wait(self, now: float) -> None:
        """Set the next look, which comes soon if this attempt has no result."""
        self._again_at = now + self.lock.ttl / 10

    def due_call(self, now: float) -> Call | None:
        """Return the command to send to its server, if any."""
        lease = self.lease()
        if lease is None or self.given_back or not lease.wanted:
            return self._orphaned(lease, now)
        lease.renew_at = now + lease.ttl / (10 if lease.granted else 3)  # tried again soon if this attempt fails
        if not lease.granted:
            return None
        return RENEW, [lease.keys.lock, lease.keys.meta], [lease.lock_value, lease.ttl_ms]

    def _orphaned(self, lease: AsyncLease | None, now: float) -> Call:
        if not self.given_back:
            about = self.lock.keys.ref.text[:200]
            log.warning(
                "releasing the lease of %s, which no task or thread holds any longer", about, extra={"record": about}
            )
            if lease is not None:
                lease.orphaned()
            self.given_back = 1
            self._until = now + self.lock.ttl
        self.wait(now)
        return self.lock.leave_call()

    def over(self, now: float) -> bool:
        """Whether the lease was released or has expired.

        It is released twice, because earlier requests may arrive late.
        """
        return (self.given_back > _GIVEN_BACK or now > self._until) and not self.lock.asked


class _Server:
    """The commands to send next to one server, by holder."""

    def __init__(self, port: Port) -> None:
        self.due: dict[str, _Kept] = {}
        self.handed = port.signal()
        self.job: Job | None = None
