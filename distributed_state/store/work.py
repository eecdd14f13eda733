"""Workers: they begin turns of sessions that are due, in the session's handler. Law: a due session is served once.

A worker takes due sessions of its handlers out of the partitions' due sets: `due.lua` moves each ahead by the lease's
ttl, so that no other worker finds it meanwhile. Then it takes the session's lease without waiting. The commit of the
turn computes when the session is due again. If the worker dies, the lease ends, and the session is due again after the
ttl. A session whose lease somebody else holds is looked at again when that lease may have ended.

The partitions are shared among the workers of a handler, and a worker that has room also looks at some of the others.
It looks once a second, and at once where a commit has published that a session is due.

Design: section 31.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from distributed_state.conversation import inbox, workflow
from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.turn import HandledTurn
from distributed_state.conversation.workflow import Workflow
from distributed_state.errors import (
    Backpressure,
    Deleted,
    DurabilityUnknown,
    Fenced,
    InvalidValue,
    LockTimeout,
    StateError,
    Stopped,
    Unavailable,
)
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import Job
from distributed_state.port.background import ENDINGS
from distributed_state.records.context import context_of
from distributed_state.results import Input
from distributed_state.store.due_sets import DueSets, Place, filled
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import chance
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import FAILURE, Ref, log_fields
from distributed_state.values.schedule import Failure, checked_handler
from distributed_state.warm.partition_assignment import PartitionAssignment
from distributed_state.warm.scripts import DEFER, DUE

log = logging.getLogger(__name__)
Serves = Callable[[Any], Any] | Workflow
"""A handler of sessions: a function of a turn, or a workflow."""

_EVERY = 1.0  # seconds between two looks at partitions about which nothing was published
_SHORTEST = 0.02  # seconds between two looks because of wakes
_OTHERS = 8  # places of other workers at which one with room looks each time, at least
_LOT = 8  # sessions taken at once of a place that has many
_SOON_MS = 1000  # after which a session is looked at again whose lease somebody holds
_LONGEST_RETRY = 300.0
_FREE = b"free"  # published by a worker that has released partitions
_BUSY = 10_000  # sessions of which it is known how often somebody else held their leases


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker works: see `store.work`."""

    concurrency: int
    ttl: float
    max_attempts: int
    shutdown_timeout: float

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("max_attempts", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise InvalidValue(f"{name} is an int from {least} on, not {value!r:.80}")
        for name in ("ttl", "shutdown_timeout"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise InvalidValue(f"{name} is a number of seconds above 0, not {value!r:.80}")

    def retry_ms(self, failed: int) -> int | None:
        """The pause after this number of failed turns; None: no further attempt."""
        if failed >= self.max_attempts:
            return None
        return round(1000 * min(2.0 ** (failed - 1), _LONGEST_RETRY) * (0.8 + 0.4 * chance.source.random()))


class Handlers(dict[str, Serves]):
    """The handlers of one store, by name. `working`: its call of `work`, while that runs."""

    working: SessionWorker | None = None
    _worked = False
    _stopped = False  # before the first call of `work`

    def add(self, name: str, serves: Serves) -> None:
        """Add a handler. Raises InvalidValue if there is another one of this name, or if the store works already."""
        if not callable(serves) and not isinstance(serves, Workflow):
            raise InvalidValue(f"a handler is a function that takes a turn, or a Workflow, not {serves!r:.80}")
        if checked_handler(name) not in self and self.working is not None:
            raise InvalidValue(f"this store works already, without handler {name!r}: add it before `work`")
        if self.setdefault(name, serves) is not serves:
            raise InvalidValue(f"there is a handler {name!r} already")

    async def work(self, worker: SessionWorker) -> None:
        """Let this worker run. Raises InvalidValue while another one does."""
        if self.working is not None:
            raise InvalidValue("this store works already: give it a greater concurrency, or open another store")
        # In this order, because a signal handler may call `stop` between any two of these lines.
        self.working = worker
        self._worked = True
        if self._stopped:
            worker.stop()
        try:
            await worker.run()
        finally:
            self._stopped, self.working = False, None

    def stop(self) -> None:
        """Let the worker end, or the first one, if none has begun yet; from any thread, or a signal handler."""
        self._stopped = self._stopped or not self._worked
        self.close()

    def close(self) -> None:
        """Let the worker end, if there is one."""
        if self.working is not None:
            self.working.stop()


@dataclass(eq=False, slots=True)
class _Taken:
    """A due session that this worker took; `score`: the present one in the due set. `job`: None until it has begun."""

    handler: str
    keys: RecordKeys
    score: bytes
    job: Job | None = None


class SessionWorker:
    """One call of `store.work`."""

    def __init__(
        self, tiers: Tiers, handlers: Mapping[str, Serves], plan: Plan, session: Callable[[str], AsyncSession],
        dressed: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        if not handlers:
            raise InvalidValue("there is no handler: add one with @store.handler(name)")
        for name, serves in handlers.items():
            functions = serves.steps.values() if isinstance(serves, Workflow) else (serves,)
            if any(map(_awaits, functions)) and not tiers.port.suspends:
                raise InvalidValue(f"handler {name!r} is a coroutine function, for asyncio only")
        self._tiers = tiers
        self._port = tiers.port
        self._handlers = dict(handlers)
        self._plan = plan
        self._session = session
        self._dressed = dressed
        self._news = tiers.port.signal()
        self._published: set[Place] = set()
        self._full: set[Place] = set()  # that had more sessions than were taken
        self._mutex = tiers.port.mutex()
        self._running: set[_Taken] = set()
        self._busy: dict[str, int] = {}  # how often the lease of a session was held by somebody else, in a row
        places = [(name, *each) for each in self._partitions() for name in handlers]
        self._names: dict[bytes, Place] = {keys.due_of(name): (name, partition) for name, partition, keys in places}
        order = chance.source.sample(list(self._names.values()), len(self._names))
        self._turns = deque(order)
        # When this worker looked there last, by the monotonic clock; at first another order than that of other workers.
        self._last: dict[Place, float] = {place: float(at - len(order)) for at, place in enumerate(order)}
        self._next: dict[Place, float] = {}  # when a session is due there, by the monotonic clock, as far as is known
        self._stopping = self._released = False
        self._looked = -math.inf
        self._assignments = {
            name: PartitionAssignment(
                tiers.port, tiers.keys,
                team=tiers.keys.workers(name), member=f"{tiers.replica}.{chance.token_hex(4)}",
                claim=lambda partition, name=name: tiers.keys.partition(partition).worker(name),  # type: ignore[misc]
                rounds=tiers.rounds,
            )
            for name in handlers
        }  # fmt: skip
        self._sets = DueSets(tiers, list(handlers), self._places, self._publish)

    def _partitions(self) -> list[tuple[int, Any]]:
        return [(each, self._tiers.keys.partition(each)) for each in range(self._tiers.keys.partitions)]

    async def run(self) -> None:
        """Serve sessions until `stop`, or until the caller is cancelled or interrupted; the running turns end then."""
        for _, keys in self._partitions():
            self._tiers.link.listen(keys.due_channel, self._hear)
        self._sets.begin()
        try:
            while not self._stopping:
                try:
                    pause = await self._round()
                except StateError as error:
                    pause = _EVERY
                    log.warning("work: %s; trying again in %.1f s", error, pause)
                if not self._stopping:
                    await self._news.wait(pause)
        finally:
            for _, keys in self._partitions():
                self._tiers.link.leave(keys.due_channel)
            await self._port.shield(self._end())

    def stop(self) -> None:
        """Let `run` end; from any thread."""
        self._stopping = True
        self._news.set()

    def _hear(self, _: bytes, payload: bytes) -> None:
        found = self._names.get(payload)
        if found is not None:
            self._publish(found)
        elif payload == _FREE:
            self._released = True
            self._news.set()

    def _publish(self, place: Place) -> None:
        """Look at this place at once."""
        with self._mutex:
            self._published.add(place)
        self._news.set()

    async def _round(self) -> float:
        """Take and begin what is due; return the seconds until the next look."""
        self._news.clear()
        mine = await self._mine()
        with self._mutex:
            free = self._plan.concurrency - len(self._running)
            published, self._published = self._published, set()
        if free <= 0:
            with self._mutex:
                self._published |= published
            return _EVERY  # the end of a turn is noticed at once
        now = self._port.monotonic()
        looks = {each for each in published if each in mine}
        looks |= {each for each, at in self._next.items() if at <= now and each in mine}
        whole = now >= self._looked + _EVERY
        if whole:
            self._looked = now
            looks |= mine
        free -= await self._take(looks, free)
        if whole and free > 0:
            await self._take(self._others(mine), free)
        if self._published and len(self._running) < self._plan.concurrency:
            return 0.0
        until = min([self._looked + _EVERY, *(at for each, at in self._next.items() if each in mine)])
        return max(_SHORTEST, min(_EVERY, until - self._port.monotonic()))

    async def _mine(self) -> set[Place]:
        """Renew the claims of partitions, give back those beyond a fair share; return the places of this worker."""
        released, self._released = self._released, False
        for assignment in self._assignments.values():
            if released:
                assignment.hurry()
            try:
                await assignment.hold()
                if excess := assignment.excess:
                    await assignment.give_back(excess)
                    await self._let_know(excess)
            except StateError as error:
                log.debug("work: partitions cannot be claimed: %s", error)
        return self._places()

    def _others(self, mine: set[Place]) -> list[Place]:
        """Some places of other workers, the next ones: such a worker may have died, or have no room.

        Twice as many as this worker has, so that all workers together look at each place twice, however many they are.
        """
        found: list[Place] = []
        for _ in range(len(self._turns)):
            if self._turns[0] not in mine:
                found.append(self._turns[0])
            self._turns.rotate(-1)
            if len(found) >= max(_OTHERS, 2 * len(mine)):
                break
        return found

    async def _let_know(self, free: list[int]) -> None:
        """Have the other workers claim these partitions at once."""
        channel = self._tiers.keys.partition(free[0]).due_channel
        await self._tiers.warm.command(b"SPUBLISH", channel, _FREE)

    def _places(self) -> set[Place]:
        return {(name, each) for name, assigned in self._assignments.items() for each in assigned.mine}

    async def _take(self, looks: Iterable[Place], free: int) -> int:
        """Take and begin due sessions of these handlers in these partitions, at most `free`; return how many."""
        # The full ones last: each of them alone can fill what is free. In turn, because some would wait long by chance.
        waiting = sorted(looks, key=lambda place: (place in self._full, self._last[place]))
        taken = 0
        while waiting and taken < free:
            some = looked_at(waiting, self._full, free - taken)
            waiting = waiting[len(some) :]
            self._last.update(dict.fromkeys(some, self._port.monotonic()))
            taken += await self._look(some, max(1, (free - taken) // len(some)))
        with self._mutex:
            self._published.update(waiting)
        return taken

    async def _look(self, looks: list[Place], most: int) -> int:
        """Take and begin at most `most` sessions of each place; return how many there were."""
        tiers = self._tiers
        ahead = round(self._plan.ttl * 1000)
        calls = []
        for name, partition in looks:
            keys = tiers.keys.partition(partition)
            calls.append((DUE, [keys.due_of(name), keys.meta], [most, filled(name), ahead]))
        count = 0
        there, absent = set[int](), set[int]()
        unfilled: dict[Place, str] = {}
        for place, answer in zip(looks, await self._port.scripts(calls), strict=True):
            name, partition = place
            self._next.pop(place, None)
            self._full.discard(place)
            if isinstance(answer, StateError):
                log.log(_level(answer), "work: partition %d: %s", partition, answer)
                continue
            if answer[0] == b"uninitialised":
                absent.add(partition)
                continue
            _, epoch, filled_for, now_ms, rows, later_ms = answer
            there.add(partition)
            if filled_for != epoch:
                unfilled[place] = epoch.decode()
            if later_ms:
                left = (float(later_ms) - int(now_ms)) / 1000
                self._next[place] = self._port.monotonic() + max(left, 0.0)
            elif len(rows) == 2 * most:
                self._full.add(place)
                with self._mutex:
                    self._published.add(place)
            for member, score in zip(rows[::2], rows[1::2], strict=True):
                taken = _Taken(name, tiers.keys.of(Ref.parse(member.decode())), score)
                if self._stopping:  # meanwhile: others serve it at once
                    await self._send(taken, self._now_ms())
                else:
                    self._begin(taken)
                count += 1
        self._sets.note(there, absent, unfilled)
        return count

    def _begin(self, taken: _Taken) -> None:
        """Begin a turn of a session that was taken."""
        with self._mutex:
            self._running.add(taken)  # first: a thread may be over before it is known here
        taken.job = self._port.spawn_here(partial(self._serve, taken), f"distributed-state-work-{taken.handler}"[:60])

    # One session

    async def _serve(self, taken: _Taken) -> None:
        about = taken.keys.ref.text
        try:
            await self._turn(taken)
        except StateError as error:
            log.log(_level(error), "%s is served later: %s", about[:200], error, extra=log_fields(about))
        finally:
            with self._mutex:
                self._running.discard(taken)
            self._news.set()

    async def _turn(self, taken: _Taken) -> None:
        """Run the handler in a turn of the session. An error of the handler itself counts as its failure."""
        session = self._session(taken.keys.ref.id)
        turn = self._turn_of(taken, session)
        try:
            await turn.__aenter__()
        except LockTimeout:
            await self._later(taken)
            return
        except Deleted:
            await self._send(taken, None)
            return
        except Stopped:  # before a step of a workflow
            entry = await context_of(session).read(fresh=True)
            await self._drop(taken, session, entry, inbox.waiting(entry, self._tiers.clock.now()))
            return
        self._busy.pop(taken.keys.ref.text, None)
        visible: tuple[Input, ...] = ()
        try:
            async with _Entered(turn):
                schedule = inbox.schedule_of(turn.begun)
                visible = turn.inbox
                if schedule is None or schedule.handler != taken.handler or schedule.due is None:
                    await self._send(taken, None)
                    return
                if schedule.due > self._now_ms() + inbox.AHEAD * 1000:
                    # Found too early: see fill.lua. Or our clock is late, and the turn does not see the wake yet.
                    await self._send(taken, schedule.due)
                    return
                if visible:
                    await self._call(taken.handler, turn)
                    turn.settle(b"d", forgets=schedule.failed > 0)
        except BaseException as error:
            if turn.stopping:
                # It must not be repeated: the user does not want what it had taken, or was about to take.
                await self._drop(taken, session, turn.begun, turn.taken or visible)
            elif not isinstance(error, Exception):
                raise
            elif (turn.lost and not turn.overdue) or _passes(error):
                about = taken.keys.ref.text
                log.info("%s is served later: %s", about[:200], error, extra=log_fields(about))
            else:
                await self._note(taken, session, error)
            return
        if turn.written is not None:
            self._tiers.work.served += bool(turn.taken)
        else:
            await self._settle(taken, session)

    def _turn_of(self, taken: _Taken, session: AsyncSession) -> HandledTurn:
        serves = self._handlers[taken.handler]
        options: dict[str, Any] = {"request_id": None, "busy": "reject", "wait": 0.0, "ttl": self._plan.ttl}
        if not isinstance(serves, Workflow):
            return HandledTurn(session, context_of(session), limit=None, **options)
        turn = HandledTurn(session, context_of(session), limit=serves.step_timeout, slot=workflow.SLOT, **options)
        turn.serve(None)  # so that a stop between two steps reaches the next one
        return turn

    async def _call(self, name: str, turn: HandledTurn) -> None:
        """Call the handler. Raises NothingTaken, and what the handler raises."""
        serves, given = self._handlers[name], self._dressed(turn)
        if isinstance(serves, Workflow):
            await workflow.serve(
                serves, turn, turn.session.ref.id, lambda step, state: self._result(name, step, state, given)
            )
            return
        await self._result(name, serves, given)
        if not turn.taken:
            raise NothingTaken(f"handler {name!r} took no input: call turn.take()")

    async def _result(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of the user: a coroutine function in this task, another one in a thread."""
        try:
            result = function(*given) if _awaits(function) else await self._port.thread(function, *given)
            if inspect.isawaitable(result):
                if not self._port.suspends:
                    raise InvalidValue(f"handler {name!r} returned {result!r:.80}, for asyncio only")
                result = await self._port.complete(result)
        except BaseException as error:
            if isinstance(error, (Exception, *ENDINGS)):
                raise
            # SystemExit, or for example PanicException of a library in Rust.
            raise RuntimeError(f"handler {name!r} raised {type(error).__name__}") from error
        return result

    def _failure(self, failed: int) -> bytes:
        pause = self._plan.retry_ms(failed)
        return b"f !" if pause is None else b"f %d" % pause

    async def _note(self, taken: _Taken, session: AsyncSession, error: BaseException) -> None:
        """Note that a turn of the handler failed, and when it is tried again."""
        about = taken.keys.ref.text
        self._tiers.work.failed += 1
        log.error("handler %s failed for %s", taken.handler, about[:200], exc_info=error, extra=log_fields(about))
        context = context_of(session)
        schedule = inbox.schedule_of(await context.read(fresh=True))
        if schedule is None:
            return  # deleted meanwhile
        name = type(error).__name__[:100]
        changes = context.changes()
        changes.reserved(FAILURE, Failure(name, self._now_ms()).stored)
        failure = self._failure(schedule.failed + 1)
        if failure == b"f !":
            log.error("%s is stuck: its handler %s is not tried again", about[:200], taken.handler)
            changes.emit("turn.failed", {"handler": taken.handler, "attempts": schedule.failed + 1, "error": name})
        await self._write(taken, changes, failure)

    async def _settle(self, taken: _Taken, session: AsyncSession) -> None:
        """Compute when the session is due next: nothing waits now."""
        changes = context_of(session).changes()
        changes.reserved(FAILURE, None)
        await self._write(taken, changes, b"d")

    async def _drop(self, taken: _Taken, session: AsyncSession, entry: CachedRecord, inputs: Iterable[Input]) -> None:
        """Remove the inputs of a turn that was stopped, without an answer."""
        context = context_of(session)
        changes = context.changes()
        changes.reserved(FAILURE, None)
        most = context.store.settings.remembered_requests
        inbox.take(changes, entry, inputs, {}, most, self._tiers.clock.now())
        await self._write(taken, changes, b"d")

    async def _write(self, taken: _Taken, changes: Changes, mode: bytes) -> None:
        draft = changes.draft("schedule").scheduled(taken.handler, mode)
        await write_path.commit(self._tiers, taken.keys, draft)

    async def _later(self, taken: _Taken) -> None:
        """Look again at a session whose lease somebody else holds: soon, then more rarely, or when that lease ends."""
        left_ms = await self._tiers.warm.command(b"PTTL", taken.keys.lock)
        if len(self._busy) >= _BUSY:
            self._busy.clear()  # others have served most of them
        times = self._busy[taken.keys.ref.text] = self._busy.get(taken.keys.ref.text, 0) + 1
        pause = min(_SOON_MS << min(times - 1, 10), left_ms) if left_ms > 0 else 0
        await self._send(taken, self._now_ms() + pause)

    def _now_ms(self) -> int:
        return int(self._tiers.clock.now() * 1000)

    async def _send(self, taken: _Taken, score: int | None) -> None:
        """Set when the session is due, None: not at all; unless that was changed meanwhile."""
        words = [taken.keys.text, taken.score, b"" if score is None else score]
        await self._tiers.warm.script(DEFER, [taken.keys.due_of(taken.handler)], words)

    # The end

    async def _end(self) -> None:
        """Release the partitions, wait for the running turns, stop those that take too long, and give them back."""
        await self._sets.close()
        await self._leave()
        end = self._port.monotonic() + self._plan.shutdown_timeout
        while self._running and (left := end - self._port.monotonic()) > 0:
            self._news.clear()
            if self._running:
                await self._news.wait(min(left, _EVERY))
        with self._mutex:
            left_over = list(self._running)
        for taken in left_over:
            if taken.job is not None:
                taken.job.ask()
        for taken in left_over:
            if taken.job is not None:
                await taken.job.stop()
        try:
            for taken in left_over:
                await self._send(taken, self._now_ms())
        except StateError as error:
            log.warning("work: %s; others go on when the leases have ended", error)

    async def _leave(self) -> None:
        """Release all partitions, and let the other workers know: they serve them while the last turns run here."""
        for assignment in self._assignments.values():
            try:
                mine = assignment.mine
                await assignment.leave()
                if mine:
                    await self._let_know(mine)
            except StateError as error:
                log.warning("work: %s; others go on when the claims have ended", error)


class NothingTaken(Exception):
    """A handler returned without having taken an input: it would be called again at once, for ever."""


@dataclass(frozen=True, slots=True)
class _Entered:
    """The rest of a turn that has been entered."""

    turn: HandledTurn

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.turn.__aexit__(kind, error, trace)


def looked_at(waiting: list[Place], full: Set[Place], free: int) -> list[Place]:
    """The first of these places, to take `free` sessions: one place for each, or few places if each has many."""
    return [each for each in waiting[:free] if each not in full] or waiting[: math.ceil(free / _LOT)]


def _awaits(serves: Any) -> bool:
    called = getattr(serves, "__call__", None)  # noqa: B004 - whether it is a coroutine function
    return inspect.iscoroutinefunction(serves) or inspect.iscoroutinefunction(called)


def _passes(error: BaseException) -> bool:
    """Whether a server is away. Not if an inbox is full: if the journal is, the failure is refused, too."""
    return isinstance(error, Unavailable | DurabilityUnknown) and not isinstance(error, Backpressure)


def _level(error: StateError) -> int:
    """How an error is logged that passes by itself, and any other one."""
    return logging.INFO if isinstance(error, Unavailable | Fenced | DurabilityUnknown) else logging.ERROR
