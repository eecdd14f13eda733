"""Locks that are held. Law: a lease protects nothing by itself; the server compares its grip inside every write.

A lease that is given back behind its last commit, in one round trip, is given back only if that commit was applied: one
that has to be sent again still needs it, and after a refused one it is given back by itself.

A waiter queues on the server, is woken through the link and never polls; a slow re-ask keeps its place and covers a
holder that died. The lease is bound to the task or thread that took it (a context variable), not to an object.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from distributed_state.errors import (
    ConfigurationError,
    Fenced,
    Interrupted,
    InvalidValue,
    Locked,
    LockTimeout,
    StateError,
)
from distributed_state.port import Call, Guard, Job, Port
from distributed_state.values.keys import RecordKeys
from distributed_state.warm import waiters
from distributed_state.warm.client import Warm
from distributed_state.warm.op_ids import OpId
from distributed_state.warm.scripts import ACQUIRE, RELEASE, RENEW
from distributed_state.warm.subscription import Link
from distributed_state.warm.telemetry import Facts, observed
from distributed_state.warm.waiters import Waiter, Waiters

log = logging.getLogger(__name__)
_held: ContextVar[dict[tuple[int, str], AsyncLease]] = ContextVar("distributed_state_leases")


class Leases:
    """The leases of one replica: renewed together, lost one by one."""

    def __init__(
        self, port: Port, warm: Warm, link: Link, start: Callable[[int], Any], on_lost: Callable[[AsyncLease], None]
    ) -> None:
        self.port = port
        self.warm = warm
        self.start = start
        self._on_lost = on_lost
        self._held: dict[str, AsyncLease] = {}
        self.waiters = Waiters(port, link)
        self._count = itertools.count(1)
        self._mutex = port.mutex()
        self._kept = port.signal()
        self._watched = port.signal()
        self._jobs: list[Job] = []
        self.lost = self.timeouts = 0
        self.abandoned = False  # set in a forked child: what its parent holds is not the child's to release

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    def of(self, text: str) -> AsyncLease | None:
        """The lease under which the running task or thread writes: its own, or that of the task that started it."""
        leases = _held.get(None)
        lease = leases.get((id(self), text)) if leases else None
        # One that was released is history: this task was started under it and has outlived it.
        return None if lease is None or lease.released else lease

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
        return f"{self.warm.replica}.{next(self._count)}"

    def keep(self, lease: AsyncLease) -> None:
        """Renew from now on."""
        _held.set({**_held.get({}), (id(self), lease.text): lease})
        self._held[lease.holder] = lease
        lease.span = self.warm.telemetry.begin("lease.hold", lease.names)
        with self._mutex:
            if not self._jobs:
                self._jobs = [
                    self.port.spawn(self._renew, "distributed-state-leases"),
                    self.port.spawn(self._watch, "distributed-state-deadlines"),
                ]
        self._kept.set()
        self._watched.set()

    def drop(self, lease: AsyncLease) -> None:
        """Renew no more."""
        self._held.pop(lease.holder, None)
        self._end_span(lease, "lost" if lease.lost else "ok")
        mine = dict(_held.get({}))
        if mine.get((id(self), lease.text)) is lease:
            del mine[id(self), lease.text]
            _held.set(mine)

    def _end_span(self, lease: AsyncLease, outcome: str) -> None:
        """Tell that it is held no more."""
        span = lease.span
        lease.span = None
        self.warm.telemetry.finish(span, outcome)

    async def _renew(self) -> None:
        while True:
            self._kept.clear()  # first: a lease kept from here on ends the wait below
            now = self.port.monotonic()
            due = [lease for lease in list(self._held.values()) if not lease.lost and now >= lease.renew_at]
            if due:
                await self._renew_all(due)
            now = self.port.monotonic()
            pause = min((lease.renew_at - now for lease in list(self._held.values())), default=60.0)
            await self._kept.wait(max(pause, 0.005))

    async def _watch(self) -> None:
        """Apart from renewing, which may hang with the server: a holder must know before somebody else can hold."""
        while True:
            self._watched.clear()
            now = self.port.monotonic()
            for lease in list(self._held.values()):
                if now >= lease.deadline:
                    self._lose(lease, "could not be renewed in time")
                elif now >= lease.ends:
                    self._lose(lease, "was held for as long as it may be")
            pause = min((min(lease.deadline, lease.ends) - now for lease in list(self._held.values())), default=60.0)
            await self._watched.wait(max(pause, 0.005))

    async def _renew_all(self, due: list[AsyncLease]) -> None:
        sent = self.port.monotonic()
        for lease in due:
            lease.renew_at = sent + lease.ttl / 10  # tried again soon if this one fails
        try:
            answers = await self.port.scripts(
                [(RENEW, [each.names.lock], [each.lock_value, each.ttl_ms]) for each in due]
            )
        except StateError as error:
            log.warning("leases: renewal failed: %s", error)
            return
        for lease, answer in zip(due, answers, strict=True):
            if isinstance(answer, StateError):
                log.warning("leases: renewal of %s failed: %s", lease.text[:200], answer)
            elif answer[0] == b"ok":
                lease.renewed(sent)
            else:
                self._lose(lease, "is held by somebody else or expired")

    def seized(self, lock_value: str) -> None:
        """Another request took a turn over."""
        for lease in list(self._held.values()):
            if lease.lock_value == lock_value:
                lease.seized = True
                self._lose(lease, "was taken over by another request")

    def _lose(self, lease: AsyncLease, why: str) -> None:
        if self._held.pop(lease.holder, None) is not None and not lease.lost:
            log.warning("lease of %s with token %d lost: it %s", lease.text[:200], lease.token, why)
            lease.lose()
            self._end_span(lease, "lost")
            self.report_loss(lease)

    def report_loss(self, lease: AsyncLease) -> None:
        """Tell the fleet, once for each time that the lease was held; its holder knows already. No lease, no loss."""
        if not lease.loss_reported:
            lease.loss_reported = True
            self.lost += 1
            self._on_lost(lease)

    def judge(self, lease: AsyncLease, refused: Fenced) -> Fenced:
        """What a refused commit comes to: before it can have run out, only another request's turn takes a lease.

        That turn may be over already, and nobody the holder; but its word may have arrived meanwhile.
        """
        self.report_loss(lease._outer or lease)
        taken = refused.holder and self.port.monotonic() < min(lease.deadline, lease.ends)
        if not taken and not lease.seized:
            return refused
        lease.seized = True
        return lease.gone("nothing was written")

    async def close(self) -> None:
        """Stop renewing; what is still held runs out by itself."""
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()


def _facts(lease: AsyncLease, *_: Any) -> Facts:
    return lease.telemetry.of(lease.names)


class AsyncLease:
    """A record held by one task or thread. `token` is the fencing token, `lost` says that the lease is gone.

    Writes made inside carry the token; once it is lost they raise Fenced. Under asyncio the body is also cancelled.
    """

    def __init__(
        self,
        leases: Leases,
        names: RecordKeys,
        *,
        wait: float,
        ttl: float,
        advisory: bool,
        expect: Callable[..., None],
        limit: float | None = None,
        turn: str | None = None,
        seize: bool = False,
    ) -> None:
        for name, seconds in ("wait", wait), ("ttl", ttl), ("limit", limit):
            if seconds is not None or name != "limit":
                _check(name, seconds)
        if ttl < 0.05:
            raise ConfigurationError(f"a lease of {ttl} s is too short; use at least 0.05")
        self.names = names
        self.text = names.ref.text
        self.ttl = ttl
        self.ttl_ms = int(ttl * 1000)
        self.lock_value = ""
        self.token = 0
        self.holder = ""
        self.released = True  # also before it is held: what was never held is neither given back nor lost
        self.deadline = self.renew_at = 0.0
        self.ends = math.inf  # when it is given up, however alive its holder
        self.owner: object = None
        self._leases = leases
        self.wait = wait
        self._mode = "a" if advisory else "x"
        self._expect = expect
        self._limit = limit
        self._turn = turn
        self._seize = "" if turn is None or not seize else f".{turn}!"
        self._lost = False
        self.seized = False
        self.loss_reported = False
        self._released_with_commit = False
        self._outer: AsyncLease | None = None
        self._guard: Guard | None = None
        self.telemetry = leases.warm.telemetry
        self.span = None
        self._order = b""  # our place in the queue

    @property
    def lost(self) -> bool:
        """Whether the lease is gone: it could not be renewed, somebody else holds the record, or it is the parent's."""
        return self._lost or self._leases.abandoned or (self._outer is not None and self._outer.lost)

    def renewed(self, sent: float) -> None:
        """The server confirmed the lease when asked at `sent`; a tenth is kept as a margin for slow clocks."""
        self.deadline = sent + self.ttl * 0.9
        self.renew_at = sent + self.ttl / 3

    def gone(self, consequence: str) -> Fenced:
        """The error that says so."""
        kind, why = (Interrupted, "taken over by another request") if self.seized else (Fenced, "lost")
        return kind(f"{self.text[:200]}: the lease with token {self.token} was {why}; {consequence}")

    def lose(self) -> None:
        self._lost = True
        if self._guard is not None:
            self._guard.interrupt()

    async def acquire(self) -> Self:
        """Hold the record, or raise LockTimeout after `wait` seconds. Held already by this task: nests."""
        await self.acquire_and()
        return self

    async def acquire_and(self, trailing_call: Call | None = None) -> Any:
        """Hold the record; the answer of a script that is sent behind, in the same round trip. None if it nests."""
        outer = self._leases.of(self.text)
        # A task started inside the body writes under the lease, but locks like anybody else.
        if outer is not None and outer.owner is self._leases.port.owner():
            if outer is self or outer._mode != self._mode:
                raise Locked(f"{self.text[:200]}: held by this task already, by this very lease or in the other mode")
            if outer.lost:
                raise outer.gone("it cannot be nested")
            self._outer = outer
            self.token = outer.token
            self.lock_value = outer.lock_value
            return None
        self.holder = self._leases.name() + ("" if self._turn is None else f".{self._turn}!")
        self._lost = False
        self.seized = False
        self.loss_reported = False
        self._released_with_commit = False
        try:
            found = await self._take(trailing_call)
        except BaseException:
            await self._leases.port.shield(self._give_back())
            raise
        self.released = False
        self.owner = self._leases.port.owner()
        self._leases.keep(self)
        return found

    @observed("lease.acquire", "warm", _facts)
    async def _take(self, trailing_call: Call | None) -> Any:
        leases = self._leases
        names = self.names
        channel = names.lock_channel
        port = leases.port
        keys = [names.lock, names.wait, names.meta, names.record, names.channel, channel]
        deadline = port.monotonic() + self.wait
        place = self.holder if self.wait > 0 else ""
        waiter: Waiter | None = None
        self._order = b""
        try:
            while True:
                sent = port.monotonic()
                answer, found = await port.shield(self._ask(keys, place, trailing_call))
                if answer[0] == b"ok":
                    self.lock_value = answer[1].decode()
                    self.token = int(self.lock_value[1:].split(":", 1)[0])
                    self._expect(self.text, answer[2].decode(), int(answer[3]))
                    self.ends = math.inf if self._limit is None else sent + self._limit
                    self.renewed(sent)
                    self._order = b""
                    return found
                if answer[0] == b"uninitialised":
                    await leases.start(names.partition)
                    continue
                left = deadline - port.monotonic()
                if left <= 0:
                    leases.timeouts += 1
                    held = answer[1].decode() or "a waiter before us"
                    raise LockTimeout(f"{self.text[:200]}: still held by {held} after {self.wait:g} s")
                if waiter is None:
                    waiter = leases.waiters.join(channel, self.holder)
                pause = leases.waiters.pause(channel)
                # The holder's expiry publishes nothing, so its time to live is a limit as well.
                await waiter.sleep(min(left, answer[2] / 1000 + 0.002 if answer[2] > 0 else pause, pause))
        finally:
            if waiter is not None:
                leases.waiters.leave(channel, self.holder)

    async def _ask(self, keys: list[bytes], place: str, trailing_call: Call | None) -> tuple[Any, Any]:
        """Shielded: a waiter that is cancelled meanwhile must know under which name to leave the queue."""
        times = [waiters.PATIENCE_MS, waiters.GRACE_MS]
        asked = [self._mode, self.holder, self.ttl_ms, place, self._order, *times, self._seize]
        answer, found = await self._leases.warm.ask((ACQUIRE, keys, asked), trailing_call)
        if answer[0] == b"wait":
            self._order = answer[3]
        return answer, found

    def release_call(self, op: OpId) -> Call | None:
        """The call that gives the record back, to be sent behind a last commit; from here on nothing is renewed.

        It does so once this commit is applied. One that is refused leaves the record to `release`.
        """
        if self._outer is not None:
            return None
        self._leases.drop(self)
        self._released_with_commit = True
        return RELEASE, self._release_keys, [self.holder, "", waiters.GRACE_MS, self._leases.warm.replica, op.sequence]

    def release_answered(self, answer: Any) -> None:
        """What the server said to that call: if it kept the record for us, `release` gives it back."""
        if isinstance(answer, list) and answer[0] != b"kept":
            self.released = True

    async def release(self) -> None:
        """Give the record back. Harmless when the lease was lost: only its own holder can release it."""
        if self._outer is not None:
            self._outer = None
            return
        if self.released:
            return
        self.released = True
        self._leases.drop(self)
        if self._leases.abandoned:
            return
        ours = await self._leases.port.shield(self._give_back())
        if not ours and not self._released_with_commit:
            self._leases.report_loss(self)  # it ran out, and nothing noticed until now

    @property
    def _release_keys(self) -> list[bytes]:
        return [self.names.lock, self.names.wait, self.names.lock_channel, self.names.record]

    @observed("lease.release", "warm", _facts)
    async def _give_back(self) -> bool:
        """False if somebody else holds the record."""
        leases = self._leases
        asked = [self.holder, self._order, waiters.GRACE_MS, "", ""]

        async def once(tries: Iterator[int]) -> bool:
            if next(tries) and leases.port.monotonic() >= self.deadline:
                return True
            answer = await leases.port.script(RELEASE, self._release_keys, asked)
            return bool(answer[0] != b"lost")

        try:
            # Others wait for it: repeated, but for no longer than it has to live.
            tries = itertools.count()
            return bool(await leases.warm.patiently(once, tries))
        except StateError as error:
            # It runs out by itself; raising here would hide what the body raised.
            log.warning("lease of %s could not be released, it ends in %.1f s: %s", self.text[:200], self.ttl, error)
            return True

    async def __aenter__(self) -> Self:
        await self.acquire()
        self.protect()
        return self

    def protect(self) -> None:
        """From here on, end the running task's body when the lease is lost."""
        if self._outer is None:
            self._guard = self._leases.port.guard()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nested = self._outer is not None
        cause = error
        try:
            await self.release()
        except BaseException as late:  # noqa: BLE001 - the interruption may arrive only now, at this await
            cause = late
        if not nested and self._guard is not None and self._guard.leave(cause):
            raise self.gone("its body was ended") from cause
        if cause is not error and cause is not None:
            raise cause


def _check(name: str, seconds: Any) -> None:
    """Raise InvalidValue unless this is a time to wait, to live or to end after."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= (math.inf if name == "wait" else 1e9) or (name == "limit" and not seconds):
        raise InvalidValue(f"{name} is a number of seconds, not {seconds!r:.80}")
