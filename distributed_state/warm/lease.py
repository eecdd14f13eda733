"""Locks that are held. Law: a lease protects nothing by itself; the server compares its value inside every write.

A lease that is released with its last commit, in one round trip, is released only if that commit was applied: one that
has to be sent again still needs it, and after a refused one it is released by itself.

The lease is bound to the task or thread that took it (a context variable), not to an object. It is renewed for as long
as somebody holds it: the `with` that entered it, or by hand whoever keeps the object; and no longer than that task or
thread lives.

The leases of a replica are renewed together. A holder knows of a loss before anybody else can hold its lock, so the
deadlines are watched apart from the renewing, which may hang with the server. Where there are several servers, each has
a renewing job of its own, or one that is silent would cost the leases that the others keep. A lease is kept from before
it is asked for: one that nobody holds any more, because its holder was interrupted, has ended or was collected, is
given back in the next round instead of being renewed.

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
# Weakly: a lease that its holder let go of is not kept by the context that took it.
_held: ContextVar[dict[tuple[int, str], Callable[[], AsyncLease | None]]] = ContextVar("distributed_state_leases")
_IDLE_SECONDS = 60.0
_SHORTEST = 0.005
_GIVEN_BACK = 2  # times
_LOCK_VALUE = re.compile(r"x(\d{1,18})@[0-9A-Za-z_.\-]{1,100}:([0-9A-Za-z_.\-]{1,200})")


class Leases:
    """The leases of one replica: renewed together, lost one by one."""

    def __init__(
        self, port: Port, warm: Warm, link: Link, start: Callable[[int], Any], on_lost: Callable[[AsyncLease], None]
    ) -> None:
        self.port = port
        self.warm = warm
        self.start = start
        self._on_lost = on_lost
        self.waiters = Waiters(port, link)
        self.renewal = Renewal(port, self._lose)
        self._count = itertools.count(1)
        self.lost = self.timeouts = 0
        port.when_a_loop_ends(self._loop_ended)
        self.abandoned = False  # set in a forked child: what its parent holds is not the child's to release

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self.renewal.leases)

    def of(self, text: str) -> AsyncLease | None:
        """The lease under which the running task or thread writes: its own, or that of the task that started it."""
        leases = _held.get(None)
        found = leases.get((id(self), text)) if leases else None
        lease = found() if found is not None else None
        return lease if _is_held(lease) else None

    def lock_value(self, text: str) -> str:
        """What a write of the running task must carry. Raises Fenced if the lease is known to be lost."""
        lease = self.of(text)
        if lease is None:
            return ""
        # The clock as well: a body that never yields keeps the deadlines from being watched.
        if lease.lost or self.port.monotonic() >= lease.ends:
            self.warm.refused["fenced"] += 1
            raise lease.gone("nothing was sent")
        return lease.lock_value

    def name(self) -> str:
        """Make a name for a holder, never used before."""
        return f"{self.warm.replica}.{next(self._count)}"

    def keep(self, lease: AsyncLease) -> None:
        """Note that the lease was granted: the running task writes under it, and its deadline is watched."""
        self.hold_here(lease)
        lease.span = self.warm.telemetry.begin("lease.hold", lease.names)
        self.renewal.watch(lease)

    def hold_here(self, lease: AsyncLease) -> None:
        """Have writes of the running context use the lease: a `with` may be left in another context than entered."""
        if self.of(lease.text) is not lease:
            _held.set({**_others(lease), (id(self), lease.text): ref(lease)})

    def carry(self, lease: AsyncLease, lock_value: str, token: int) -> None:
        """Have the running task write under a lock that somebody else took, and renews; nothing of it is kept here."""
        lease.lock_value = lock_value
        lease.token = token
        lease.owner = self.port.owner()
        lease.released = False
        _held.set({**_others(lease), (id(self), lease.text): lambda: lease})

    def drop(self, lease: AsyncLease) -> None:
        """Stop writing under a lease that is being released."""
        lease.owner = None  # a task whose error leads back to here would wait for the garbage collector
        self.end_span(lease, "lost" if lease.lost else "ok")
        _held.set(_others(lease))

    def end_span(self, lease: AsyncLease, outcome: str) -> None:
        """End the lease's span of telemetry."""
        self.warm.telemetry.finish(lease.span, outcome)
        lease.span = None

    def seized(self, lock_value: str) -> None:
        """Note that another request's turn, or an operator, took over the lock with this value."""
        for lease in self.renewal.leases:
            if lease.lock_value == lock_value:
                lease.seized = True
                self._lose(lease, "was taken over")

    def _loop_ended(self, loop: object) -> None:
        """Nobody can give back what its tasks have left held."""
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
        """Publish the loss, once for each time that the lease was held; its holder knows already."""
        if not lease.loss_reported:
            lease.loss_reported = True
            self.lost += 1
            self._on_lost(lease)

    def judge(self, lease: AsyncLease, refused: Fenced) -> Fenced:
        """The error of a refused commit: a lease that cannot have expired was taken over by another request's turn.

        That turn may be over already, and nobody the holder; but what it published may have arrived meanwhile.
        """
        self.report_loss(lease.outer or lease)
        taken = refused.holder and self.port.monotonic() < min(lease.deadline, lease.ends)
        if not taken and not lease.seized:
            return refused
        lease.seized = True
        return lease.gone("nothing was written")

    async def close(self) -> None:
        """Stop renewing; what is still held expires by itself."""
        await self.renewal.close()


def _others(mine: AsyncLease) -> dict[tuple[int, str], Callable[[], AsyncLease | None]]:
    """The other leases held in this context, without interrupted ones, which would otherwise stay in it for good."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and _is_held(lease)}


def _is_held(lease: AsyncLease | None) -> bool:
    """Whether its holder is there. One that was released is history: a task that was started under it has outlived it.

    So is one whose body is over, which was interrupted before it could be released.
    """
    return lease is not None and not lease.released and lease.body.there


@bounded()
class AsyncLease:
    """A record held by one task or thread. `token` is the fencing token, `lost` says that the lease is gone.

    Example::

        async with record.lock(wait=5.0, ttl=30.0) as lease:
            await record.set("seat", "12A")  # refused if lease.token is not the holder's any more

    Writes made inside carry the token; once it is lost they raise Fenced. Under asyncio the body is also cancelled.
    """

    token: int
    """The fencing token, greater for every later holder; 0 before the record is held."""

    def __init__(
        self,
        leases: Leases,
        names: RecordKeys,
        *,
        wait: float,
        ttl: float,
        advisory: bool,
        expect: Callable[[str, str, int], None],
        forget: Callable[[str], None],
        limit: float | None = None,
        turn: str | None = None,
        seize: bool = False,
        take_over: int | None = None,
    ) -> None:
        check_times(wait, ttl, limit)
        self.names = names
        self.text = names.ref.text
        self.ttl = ttl
        self.ttl_ms = int(ttl * 1000)
        self.lock_value = ""
        self.token = 0
        self.holder = ""  # the name under which the server knows us
        self.released = True  # also before it is held: what was never held is neither given back nor lost
        self.deadline = self.renew_at = 0.0
        self.ends = math.inf  # when it is given up, however alive its holder
        self.owner: object = None
        self.waited = 0.0  # seconds for others, before the request that was granted it
        self._leases = leases
        self.wait = wait
        self.mode = "a" if advisory else "x"
        self._expect, self._forget = expect, forget  # the record's copy in hot
        self._limit = limit
        # A turn names its request, so that its next attempt may take the lock over from this one.
        self._turn = "" if turn is None else f".{turn}!"
        self._seize = seizing(take_over) if take_over is not None else self._turn if seize else ""
        self._lock = self._new_lock()
        self.body = Body()
        self._lost = False
        self.seized = False
        self.loss_reported = False
        self._released_with_commit = False
        self.outer: AsyncLease | None = None
        self._guard: Guard | None = None
        self.span: Any = None

    def _new_lock(self) -> Lock:
        leases = self._leases
        return Lock(
            leases.warm, leases.waiters, leases.start, self.names,
            wait=self.wait, ttl=self.ttl, mode=self.mode, seize=self._seize, holder=self.holder,
        )  # fmt: skip

    @property
    def lost(self) -> bool:
        """Whether the lease is gone: it could not be renewed, somebody else holds the record, or it is the parent's."""
        return self._lost or self._leases.abandoned or (self.outer is not None and self.outer.lost)

    @property
    def granted(self) -> bool:
        """Whether it is to be renewed."""
        return not (self.released or self._released_with_commit or self._lost)

    @property
    def wanted(self) -> bool:
        """Whether its holder still holds, acquires or releases it: see `port.bodies`."""
        return self.body.held_by(self.owner)

    def orphaned(self) -> None:
        """Count the lease as lost: it is no longer `wanted`, because its holder was interrupted or has ended."""
        self._guard = None  # its body is over, and the task may go on
        self._lost = self.released = True
        self._leases.end_span(self, "lost")
        self.owner = None

    def renewed(self, sent: float) -> None:
        """The server confirmed the lease when asked at `sent`; a tenth is kept as a margin for slow clocks."""
        self.deadline = sent + self.ttl * 0.9
        self.renew_at = sent + self.ttl / 3

    def gone(self, consequence: str) -> Fenced:
        """The error of a lease that was lost or taken over."""
        kind, why = (Interrupted, "taken over") if self.seized else (Fenced, "lost")
        return kind(f"{self.text[:200]}: the lease with token {self.token} was {why}; {consequence}")

    def lose(self) -> None:
        """Note that the lease is gone, and end the body that runs under it."""
        self._lost = True
        if self._guard is not None:
            self._guard.interrupt()

    async def acquire(self) -> Self:
        """Hold the record, or raise LockTimeout after `wait` seconds. Held already by this task: nests."""
        await self.acquire_and()
        return self

    async def acquire_and(self, trailing_call: Call | None = None) -> Any:
        """Hold the record; the answer of the script sent after the lock's, in one round trip. None if it nests."""
        outer = self._leases.of(self.text)
        # A task started inside the body writes under the lease, but locks like anybody else.
        if outer is not None and outer.owner is self._leases.port.owner():
            if outer is self or outer.mode != self.mode:
                raise Locked(f"{self.text[:200]}: held by this task already, by this very lease or in the other mode")
            if outer.lost:
                raise outer.gone("it cannot be nested")
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
            self.body.leave()  # first: if the rest is interrupted, the next round of renewing does it
            if isinstance(error, LockTimeout):
                self._leases.timeouts += 1
            await self._leases.port.shield(self._lock.give_back(self.deadline))
            self.released = True
            self._leases.renewal.drop(self.holder)
            raise
        return taken.trailing

    def _begin(self) -> None:
        """Reset what an earlier acquisition left, and take a new holder's name."""
        self._lost = self.seized = self.loss_reported = self._released_with_commit = False
        self.lock_value = ""
        self.deadline = 0.0
        self.renew_at = self._leases.port.monotonic() + self.ttl / 3
        self.owner = self._leases.port.owner()
        self.holder = self._leases.name() + self._turn
        self._lock = self._new_lock()
        self.body.begin()

    def _granted(self, taken: Taken) -> None:
        self.lock_value = taken.lock_value
        self.token = int(taken.lock_value[1:].split("@", 1)[0])
        if taken.version or taken.trailing is not None:
            self._expect(self.text, taken.epoch, taken.version)
        else:
            # Redis does not have the record, which may have been evicted: nothing says whether the hot copy is behind.
            self._forget(self.text)
        self.ends = math.inf if self._limit is None else taken.sent + self._limit
        self.renewed(taken.sent)
        self.released = False
        self._leases.keep(self)

    def release_call(self, op: OpId) -> Call | None:
        """The call that releases the record, to be sent after a last commit; from here on nothing is renewed.

        It takes effect once this commit is applied. One that is refused leaves the record to `release`.
        """
        if self.outer is not None:
            return None
        self._leases.drop(self)
        self._released_with_commit = True
        return self._lock.release_call(op)

    def release_answered(self, answer: Any) -> None:
        """Read the answer to `release_call`. If the server kept the lock ('kept'), `release` gives it back later."""
        if isinstance(answer, list) and answer[0] != b"kept":
            self.released = True
            self._leases.renewal.drop(self.holder)

    async def release(self) -> None:
        """Give the record back. Harmless when the lease was lost: only its own holder can release it."""
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
            self._leases.report_loss(self)  # it expired, and nothing noticed until now

    async def __aenter__(self) -> Self:
        await self.acquire()
        self.protect()
        return self

    def protect(self) -> None:
        """From here on, end the running task's body when the lease is lost."""
        if self.outer is None:
            self._guard = self._leases.port.guard()

    @leaving("body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nested = self.outer is not None
        cause = error
        try:
            await self.release()
        except BaseException as late:  # noqa: BLE001 - the interruption may arrive only now, at this await
            cause = late
        if not nested and self._guard is not None and self._guard.leave(cause):
            raise self.gone("its body was ended") from cause
        if cause is not error and cause is not None:
            raise cause


# Leases whose holder is not a task of this process


@dataclass(frozen=True, slots=True)
class CarriedLease:
    """A lock whose holder is not a task of this process, such as a client over HTTP: the value that it carries.

    The server judges it at each use. Nobody here renews it or watches its time: what is written under one that has
    ended is refused by the server. Raises ValueError if the value cannot be a lock's.
    """

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


# Renewal


class Renewal:
    """The leases that are kept, by their holders' names; `lose(lease, why)` is called for one that cannot be."""

    def __init__(self, port: Port, lose: Callable[[AsyncLease, str], None]) -> None:
        self._port = port
        self._lose = lose
        self._mutex = port.mutex()
        self._kept = port.signal()
        self._watched = port.signal()
        # Until when each job sleeps. While it is awake, it is told of every lease: it may have looked already.
        self._renews_at = self._watches_at = math.inf
        self._jobs: list[Job] = []
        self._servers: dict[str, _Server] = {}
        self._held: dict[str, _Kept] = {}

    @property
    def leases(self) -> list[AsyncLease]:
        """Those that are held."""
        found = [kept.lease() for kept in list(self._held.values())]
        return [lease for lease in found if lease is not None and lease.granted]

    def keep(self, lease: AsyncLease, lock: Lock) -> None:
        """Look after it from now on: it is about to be asked for under the lock's name."""
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
        """It was granted: watch its deadline."""
        if min(lease.deadline, lease.ends) < self._watches_at:
            self._watched.set()

    def drop(self, holder: str) -> bool:
        """Stop renewing a lease. True if it was renewed until now, and not given back because nobody held it."""
        kept = self._held.pop(holder, None)
        return kept is not None and not kept.given_back

    async def _renew(self) -> None:
        while True:
            self._kept.clear()  # first: a lease kept from here on ends the wait below
            self._renews_at = math.inf
            await self._round()  # no variable of this one may keep a lease while it sleeps
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
        """When leases end unless they are renewed; those of which it is over are lost."""
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
        """Give each lease to the job of the server that has its lock now. Waits for none of them."""
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
            return self._port.node_of(kept.lock.names.lock)
        except WarmUnavailable:
            return ""  # nobody has it just now: who asks for it looks again

    async def _serve(self, node: str, server: _Server) -> None:
        """Renew what one server has, until it has had nothing for a while."""
        while True:
            server.handed.clear()  # first: what is handed out from here on ends the wait below
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
                about = kept.lock.names.ref.text[:200]
                log.warning("leases: renewal of %s failed: %s", about, answer, extra={"record": about})
            elif kept.given_back:
                kept.given_back += 1
            else:
                self._renewed(kept.lease(), answer[0], sent)

    def _renewed(self, lease: AsyncLease | None, answer: bytes, sent: float) -> None:
        if lease is None:
            return  # it was collected meanwhile, and is given back in the next round
        if answer == b"ok":
            lease.renewed(sent)
        elif answer != b"uninitialised" and lease.granted:
            # In a partition that is not initialised, recovery decides what becomes of the lease. A lease that is being
            # given back is not lost: the server may have taken it back before it got this renewal.
            self._lose(lease, "is held by somebody else or expired")

    async def close(self) -> None:
        """Stop renewing; what is still held expires by itself."""
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()
        # After the one that hands out, so that there is none more.
        servers = list(self._servers.values())
        self._servers = {}
        for server in servers:
            if server.job is not None:
                await server.job.stop()


class _Kept:
    """A lease that is held or asked for under one name. This keeps it alive at the server, not in memory."""

    __slots__ = ("_again_at", "_until", "given_back", "lease", "lock")

    def __init__(self, lease: AsyncLease, lock: Lock) -> None:
        self.lease = ref(lease)
        self.lock = lock
        self.given_back = 0  # once nobody held it any more: one more than how often
        self._again_at = 0.0
        self._until = math.inf

    @property
    def due_at(self) -> float:
        """When it is to be looked at next."""
        lease = self.lease()
        return self._again_at if lease is None or self.given_back else max(lease.renew_at, self._again_at)

    def wait(self, now: float) -> None:
        """Look at it again soon, unless something comes of what is done with it now."""
        self._again_at = now + self.lock.ttl / 10

    def due_call(self, now: float) -> Call | None:
        """The command to send to its server, if any."""
        lease = self.lease()
        if lease is None or self.given_back or not lease.wanted:
            return self._orphaned(lease, now)
        lease.renew_at = now + lease.ttl / (10 if lease.granted else 3)  # tried again soon if this one fails
        if not lease.granted:
            return None
        return RENEW, [lease.names.lock, lease.names.meta], [lease.lock_value, lease.ttl_ms]

    def _orphaned(self, lease: AsyncLease | None, now: float) -> Call:
        if not self.given_back:
            about = self.lock.names.ref.text[:200]
            log.warning("lease of %s is given back: nobody holds it any more", about, extra={"record": about})
            if lease is not None:
                lease.orphaned()
            self.given_back = 1
            self._until = now + self.lock.ttl
        self.wait(now)
        return self.lock.leave_call()

    def over(self, now: float) -> bool:
        """Whether it was given back, or has ended by its time. What was sent before may have arrived late: twice."""
        return (self.given_back > _GIVEN_BACK or now > self._until) and not self.lock.asked


class _Server:
    """The commands that one server is sent next, by holder."""

    def __init__(self, port: Port) -> None:
        self.due: dict[str, _Kept] = {}
        self.handed = port.signal()
        self.job: Job | None = None
