"""Locks that are held. Law: a lease protects nothing by itself; the server compares its value inside every write.

A lease that is released with its last commit, in one round trip, is released only if that commit was applied: one that
has to be sent again still needs it, and after a refused one it is released by itself.

The lease is bound to the task or thread that took it (a context variable), not to an object. It is renewed for as long
as somebody holds it: the `with` that entered it, or by hand whoever keeps the object; and no longer than that task or
thread lives.

Design: section 8.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from weakref import ref

from distributed_state.errors import Fenced, Interrupted, Locked, LockTimeout
from distributed_state.port import Call, Guard, Port
from distributed_state.port.bodies import Body, leaving
from distributed_state.port.waited import bounded
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.client import Warm
from distributed_state.warm.lock import Lock, Taken, check_times, seizing
from distributed_state.warm.op_ids import OpId
from distributed_state.warm.renewal import Renewal
from distributed_state.warm.subscription import Link
from distributed_state.warm.waiters import Waiters

log = logging.getLogger(__name__)
# Weakly: a lease that its holder let go of is not kept by the context that took it.
_held: ContextVar[dict[tuple[int, str], Callable[[], AsyncLease | None]]] = ContextVar("distributed_state_leases")


def _others(mine: AsyncLease) -> dict[tuple[int, str], Callable[[], AsyncLease | None]]:
    """The other leases held in this context, without interrupted ones, which would otherwise stay in it for good."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and _is_held(lease)}


def _is_held(lease: AsyncLease | None) -> bool:
    """Whether its holder is there. One that was released is history: a task that was started under it has outlived it.

    So is one whose body is over, which was interrupted before it could be released.
    """
    return lease is not None and not lease.released and lease.body.there


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
        self._renewal = Renewal[AsyncLease](port, self._lose)
        self._count = itertools.count(1)
        self.lost = self.timeouts = 0
        port.when_a_loop_ends(self._loop_ended)
        self.abandoned = False  # set in a forked child: what its parent holds is not the child's to release

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._renewal.leases)

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

    def expect(self, lease: AsyncLease, lock: Lock) -> None:
        """Know of it before it is asked for: whatever becomes of who asks, it is given back if nobody holds it."""
        self._renewal.keep(lease, lock)

    def keep(self, lease: AsyncLease) -> None:
        """It is held: renew it from now on."""
        self.hold_here(lease)
        lease.span = self.warm.telemetry.begin("lease.hold", lease.names)
        self._renewal.watch(lease)

    def hold_here(self, lease: AsyncLease) -> None:
        """Write under it in this context, too: who leaves a `with` may have another than who entered it."""
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
        """It is being given back: nothing is written under it any more."""
        lease.owner = None  # a task whose error leads back to here would wait for the garbage collector
        self.end_span(lease, "lost" if lease.lost else "ok")
        _held.set(_others(lease))

    def forget(self, lease: AsyncLease) -> bool:
        """It was given back; whether it was its holder who did so."""
        return self._renewal.drop(lease.holder)

    def end_span(self, lease: AsyncLease, outcome: str) -> None:
        """Record that it is held no more."""
        self.warm.telemetry.finish(lease.span, outcome)
        lease.span = None

    def seized(self, lock_value: str) -> None:
        """Another request took a turn over, or an operator whatever it was."""
        for lease in self._renewal.leases:
            if lease.lock_value == lock_value:
                lease.seized = True
                self._lose(lease, "was taken over")

    def _loop_ended(self, loop: object) -> None:
        """Nobody can give back what its tasks have left held."""
        for lease in self._renewal.leases:
            if self.port.loop_of(lease.owner) is loop:
                self._lose(lease, "was held by a task of an event loop that has ended")

    def _lose(self, lease: AsyncLease, why: str) -> None:
        if self._renewal.drop(lease.holder) and not lease.lost:
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
        await self._renewal.close()


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
        """Whether anybody holds it, asks for it or gives it back."""
        return self.body.held_by(self.owner)

    def orphaned(self) -> None:
        """Nobody does any more: whoever did was interrupted or has ended."""
        self._guard = None  # its body is over, and the task may go on
        self._lost = self.released = True
        self._leases.end_span(self, "lost")
        self.owner = None

    def renewed(self, sent: float) -> None:
        """The server confirmed the lease when asked at `sent`; a tenth is kept as a margin for slow clocks."""
        self.deadline = sent + self.ttl * 0.9
        self.renew_at = sent + self.ttl / 3

    def gone(self, consequence: str) -> Fenced:
        """The error that says so."""
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
            self._leases.expect(self, self._lock)
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
            self._leases.forget(self)
            raise
        return taken.trailing

    def _begin(self) -> None:
        """Nothing is left of an earlier time."""
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
        """Read the answer to that call: if the server kept the record for us, `release` gives it back."""
        if isinstance(answer, list) and answer[0] != b"kept":
            self.released = True
            self._leases.forget(self)

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
        if self._leases.forget(self) and not ours and not self._released_with_commit:
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
