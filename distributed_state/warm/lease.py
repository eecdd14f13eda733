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
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from weakref import ref

from distributed_state.errors import Fenced, Interrupted, Locked, LockTimeout, StateError, Stopped
from distributed_state.port import Call, Guard, Job, Port
from distributed_state.port.bodies import Body, interruptions, leaving
from distributed_state.port.waited import bounded
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.client import OpId, Warm
from distributed_state.warm.link import Link
from distributed_state.warm.lock import Lock, Taken, Waiters, check_times, seizing
from distributed_state.warm.output import ENDED, FAILED, STOPPED, Numbers, Outputs, TurnOutput, stopped, tag_of
from distributed_state.warm.per_server import PerServer
from distributed_state.warm.scripts import RENEW

log = logging.getLogger(__name__)
# References are weak: the context that took a lease does not keep it alive.
_held: ContextVar[dict[tuple[int, str], Callable[[], AsyncLease | None]]] = ContextVar("distributed_state_leases")
_IDLE_SECONDS = 60.0
_SHORTEST = 0.005
_GIVEN_BACK = 2  # times


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
        self.outputs = Outputs(port, warm, start, warm.settings)
        self.renewal = Renewal(port, self._lose, self.stop)
        self._count = itertools.count(1)
        self.lost = self.timeouts = self.stopped = 0
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

    def carry(self, keys: RecordKeys, lock_value: str, holder: str, token: int, streamed: int, stopped: bool) -> None:
        """Make the running task write under the lease of a holder elsewhere.

        `streamed` counts the holder's chunks; `stopped`: it knows that it was asked to stop.
        """
        lease = AsyncLease(self, keys, wait=0, ttl=1.0)
        lease.lock_value, lease.holder, lease.token = lock_value, holder, token
        lease.carried, lease.numbers, lease.stop_seen = True, Numbers(streamed), stopped
        lease.owner = self.port.owner()
        lease.released = False
        _held.set({**_others(lease), (id(self), lease.text): lambda: lease})

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

    def stop(self, lock_value: str, reason: str) -> None:
        """Note that the holder with this lock value is asked to stop; `reason` as it was sent."""
        for lease in self.renewal.leases:
            if lease.lock_value == lock_value:
                lease.ask_to_stop(stopped(lease.keys, self.warm.codec_of(lease.text), reason))

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
        await self.outputs.close()


def _others(mine: AsyncLease) -> dict[tuple[int, str], Callable[[], AsyncLease | None]]:
    """Return the other leases held in this context, without interrupted ones, which would stay in it forever."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and _is_held(lease)}


def _check_held() -> None:
    """Raise Stopped in blocking code whose context holds a lease that was asked to stop."""
    for each in list(_held.get({}).values()):
        lease = each()
        _check(lease.stops if lease is not None else ())


def _check(guards: Sequence[Guard]) -> None:
    for guard in reversed(guards):
        guard.check()


interruptions.check = _check_held


def _is_held(lease: AsyncLease | None) -> bool:
    """Whether the lease still has a holder.

    False if the lease was released, and the caller is a task that was started under it; also if its body has ended,
    because it was interrupted before the release.
    """
    return lease is not None and not lease.released and lease.body.there


@bounded("acquire_and", "leave", "absorb", "stoppable", "resume")
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
    # Defaults of the class, because few turns stream or are stopped.
    stop_seen = False
    stopped: Stopped | None = None  # somebody asked the holder to stop
    streamed: TurnOutput | None = None  # made by the first chunk, or for its end
    numbers: Numbers | None = None  # of the chunks of this and nested leases
    carried = False  # its holder is outside this process
    _stop_keys: Sequence[bytes] = ()

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
        # A turn's lock names the request: followers and stops find it by that, and "interrupt" spares its own request.
        self._turn = "" if turn is None else f".{turn}!"
        self._tag = turn or "-"
        self._seize = seizing(take_over) if take_over is not None else self._turn if seize else ""
        self.body = Body()
        self._lost = self.seized = self.loss_reported = self._released_with_commit = False
        self.outer: AsyncLease | None = None
        self.guard: Guard | None = None
        self.stops: list[Guard] = []  # of the body, and of parts of it that a stop ends by themselves; empty at its end
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
        self.guard = None  # the body has ended, but its task may run on
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
        if self.guard is not None:
            self.guard.interrupt()

    def ask_to_stop(self, error: Stopped) -> None:
        """Note that somebody asked the holder to stop, and interrupt the body, unless it has ended."""
        stops = self.stops  # read once: the body may end meanwhile
        if self.stopped is None and stops:
            self.stopped = error
            self._leases.stopped += 1
            stops[-1].interrupt(error)

    async def stoppable(self) -> Guard:
        """Begin a part that a stop ends by itself; `resume` must follow. Raises Stopped if a stop is on its way."""
        root = self.outer or self
        if root.stopped is not None and not root.stop_seen and root.stops:
            before = root.stops[-1]
            late = await before.absorb(None)
            if before.leave(late):
                if len(root.stops) == 1:
                    root.protect()
                root.stop_seen = True
                raise root.stopped
            if late is not None:
                raise late
        guard = self._leases.port.guard()
        root.stops.append(guard)
        return guard

    def check(self) -> None:
        """Raise Stopped in blocking code that was asked to stop, and has not noticed it yet."""
        _check((self.outer or self).stops)

    async def resume(self, guard: Guard, error: BaseException | None) -> None:
        """End a part of the body that ended with `error`. Raises Stopped if it was asked to stop meanwhile."""
        root = self.outer or self
        if guard in root.stops:
            root.stops.remove(guard)
        late = await guard.absorb(error)
        if guard.leave(late) and root.stopped is not None:
            root.stop_seen = True
            if error is not root.stopped:
                raise root.stopped from error
        elif late is not None and late is not error:
            raise late

    def output(self) -> TurnOutput:
        """The chunks that the body streams."""
        if self.streamed is None:
            root = self.outer or self
            root.numbers = root.numbers or Numbers()
            tag = (root.carried and tag_of(self.lock_value)) or self._tag
            self.streamed = TurnOutput(self._leases.outputs, self.keys, self.lock_value, tag, root.numbers)
            if self.outer is None:
                self._lock.output = self.streamed
        return self.streamed

    def ending_output(self, error: BaseException | None) -> TurnOutput | None:
        """The body's output, if its end has to be written: `error` ended the body. Else None."""
        outer = self.outer
        if error is None and outer is not None and outer.carried and outer.numbers is not None and outer.numbers.last:
            self.output()  # the body is the end of the holder's turn
        if self.streamed is None and (self.stopped is None or self.outer is not None):
            return None
        root = self.outer or self
        output = self.output()
        fired = root.guard is not None and root.guard.fired
        seen = root.stop_seen or (root.stopped is not None and fired and not root.lost)
        output.how = STOPPED if seen else ENDED if error is None else FAILED
        return output

    def serve(self, tag: str) -> None:
        """Let a stop of this request's workflow ("": one without an id) reach the lease, before it is requested."""
        self._turn = f".{tag}!" if tag else self._turn
        self._stop_keys = (self.keys.stop_of(tag), self.keys.stop_of(""))

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
            taken = await self._lock.take(trailing_call)
            self.waited = taken.waited
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
        self._lost = self.seized = self.loss_reported = self._released_with_commit = self.stop_seen = False
        self.stopped = None
        self.lock_value = ""
        self.deadline = 0.0
        self.renew_at = self._leases.port.monotonic() + self.ttl / 3
        self.owner = self._leases.port.owner()
        self.holder = self._leases.name() + self._turn
        self._lock = self._leases.lock(self.keys, self.holder, self.wait, self.ttl, self.mode, self._seize)
        if self._stop_keys:
            self._lock.stop_keys = self._stop_keys
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
            self.guard = self._leases.port.guard()
            self.stops = [self.guard]

    @leaving("body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave(error)

    def end_body(self) -> bool:
        """Note that the body has ended, so that a stop no longer interrupts it; return whether one is on its way."""
        self.stops = []
        return self.stopped is not None

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        """Return the error that ended the body: `error`, or a stop that was on its way."""
        return error if self.guard is None else await self.guard.absorb(error)

    async def leave(self, error: BaseException | None) -> None:
        """Release the record at the end of a body that ended with `error`.

        Raises Fenced if a loss has ended it, and Stopped if a stop has.
        """
        nested = self.outer is not None
        cause = await self.absorb(error) if self.stops and self.end_body() else error
        try:
            output = None if self.released and not nested else self.ending_output(cause)
            if output is not None and not output.ended:
                await self._leases.port.shield(output.flush() if not nested else output.end())
            await self.release()
        except BaseException as late:  # noqa: BLE001 - the interruption may arrive only now, at this await
            cause = late
        if not nested and self.guard is not None and self.guard.leave(cause):
            if self.stopped is None or self._lost:
                raise self.fenced("its body was ended") from cause
            if error is not self.stopped:
                raise self.stopped from error
            return
        if cause is not error and cause is not None:
            raise cause


# Renewal


class Renewal:
    """The registered leases, by holder: `lose(lease, why)` for a lost one, `stop(lock_value, reason)` for a stop."""

    def __init__(self, port: Port, lose: Callable[[AsyncLease, str], None], stop: Callable[[str, str], None]) -> None:
        self._port = port
        self._lose = lose
        self._stop = stop
        self._mutex = port.mutex()
        self._kept = port.signal()
        self._watched = port.signal()
        # When each job wakes. A job that is awake is notified of every lease, because it may have looked already.
        self._renews_at = self._watches_at = math.inf
        self._jobs: list[Job] = []
        self._servers = PerServer(port, "distributed-state-leases-of-one", self._renew_all)
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
        due = [kept for kept in list(self._held.values()) if now >= kept.due_at]
        if self._port.several:
            self._hand_out(due, now)
        elif due:
            await self._renew_all(due)

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

    def _hand_out(self, due: list[_Kept], now: float) -> None:
        """Give each lease to the job of the server that has its lock now, without waiting."""
        for kept in due:
            kept.wait(now)
            self._servers.hand(kept.lock.keys.lock, kept)

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
                self._renewed(kept.lease(), answer, sent)

    def _renewed(self, lease: AsyncLease | None, answer: list[bytes], sent: float) -> None:
        if lease is None:
            return  # garbage-collected meanwhile; the next round releases it
        if answer[0] == b"ok":
            lease.renewed(sent)
            if len(answer) > 1:
                self._stop(lease.lock_value, answer[1].decode())
        elif answer[0] != b"uninitialised" and lease.granted:
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
        await self._servers.close()


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
        return RENEW, [lease.keys.lock, lease.keys.meta, lease.keys.stop], [lease.lock_value, lease.ttl_ms]

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
