"""Workers: they begin turns of sessions that are due, in the session's handler. Law: a due session is served once.

A worker takes due sessions of its handlers out of the partitions' due sets: `due.lua` moves each ahead by the lease's
ttl, so that no other worker finds it meanwhile. Then it takes the session's lease without waiting. The commit of the
turn computes when the session is due again. If the worker dies, the lease ends, and the session is due again after the
ttl. A session whose lease somebody else holds is looked at again when that lease may have ended.

The partitions are shared among the workers of a handler, and a worker that has nothing to do also looks at the others.
It looks once a second, and at once where a commit has published that a session is due.

Design: section 31.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed_state.cold.values import DueRow
from distributed_state.conversation import inbox
from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.turn import AsyncTurn, HandledTurn
from distributed_state.errors import (
    Deleted,
    DurabilityUnknown,
    Fenced,
    InvalidValue,
    LockTimeout,
    StateError,
    Stopped,
    Unavailable,
)
from distributed_state.port import Job
from distributed_state.records.context import context_of
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import chance
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import FAILURE, Ref, log_fields
from distributed_state.values.schedule import checked_handler, due_ms
from distributed_state.warm.partition_assignment import PartitionAssignment
from distributed_state.warm.scripts import DEFER, DUE, FILL

log = logging.getLogger(__name__)
Serves = Callable[[Any], Any]
"""A handler of sessions: a function of a turn."""

_EVERY = 1.0  # seconds between two looks at partitions about which nothing was published
_PAGE = 1000
_SOON_MS = 1000  # after which a session is looked at again whose lease somebody holds
_LONGEST_RETRY = 300.0


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
    """The handlers of one store, by name. `working`: its calls of `work` that run."""

    def __init__(self) -> None:
        super().__init__()
        self.working: list[SessionWorker] = []

    def add(self, name: str, serves: Serves) -> None:
        """Add a handler. Raises InvalidValue if there is another one of this name."""
        if not callable(serves):
            raise InvalidValue(f"a handler is a function that takes a turn, not {serves!r:.80}")
        if self.setdefault(checked_handler(name), serves) is not serves:
            raise InvalidValue(f"there is a handler {name!r} already")


@dataclass(slots=True)
class _Taken:
    """A due session that this worker took; `score`: the present one in the due set."""

    handler: str
    keys: RecordKeys
    score: bytes


class SessionWorker:
    """One call of `store.work`."""

    def __init__(
        self, tiers: Tiers, handlers: Mapping[str, Serves], plan: Plan, session: Callable[[str], AsyncSession],
        dressed: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        if not handlers:
            raise InvalidValue("there is no handler: add one with @store.handler(name)")
        for name, serves in handlers.items():
            if inspect.iscoroutinefunction(serves) and not tiers.port.suspends:
                raise InvalidValue(f"handler {name!r} is a coroutine function, for asyncio only")
        self._tiers = tiers
        self._port = tiers.port
        self._handlers = handlers
        self._plan = plan
        self._session = session
        self._dressed = dressed
        self._news = tiers.port.signal()
        self._published: set[tuple[str, int]] = set()
        self._mutex = tiers.port.mutex()
        self._jobs: dict[int, tuple[_Taken, Job]] = {}
        self._waiting: deque[_Taken] = deque()
        self._names = {
            keys.due_of(name): (name, partition) for partition, keys in self._partitions() for name in handlers
        }
        self._filled: set[tuple[str, int, str]] = set()
        self._stopping = False
        self._looked = -math.inf
        self._next = math.inf  # when a session is due, by the monotonic clock, as far as is known
        self._assignments = {
            name: PartitionAssignment(
                tiers.port, tiers.keys,
                team=tiers.keys.workers(name), member=f"{tiers.replica}.{chance.token_hex(4)}",
                claim=lambda partition, name=name: tiers.keys.partition(partition).worker(name),  # type: ignore[misc]
                rounds=tiers.rounds,
            )
            for name in handlers
        }  # fmt: skip

    def _partitions(self) -> list[tuple[int, Any]]:
        return [(each, self._tiers.keys.partition(each)) for each in range(self._tiers.keys.partitions)]

    async def run(self) -> None:
        """Serve sessions until `stop`, or until the caller is cancelled or interrupted; the running turns end then."""
        for _, keys in self._partitions():
            self._tiers.link.listen(keys.due_channel, self._hear)
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
            with self._mutex:
                self._published.add(found)
            self._news.set()

    async def _round(self) -> float:
        """Take and begin what is due; return the seconds until the next look."""
        self._news.clear()
        for assignment in self._assignments.values():
            await assignment.hold()
        self._begin()
        free = self._plan.concurrency - len(self._jobs)
        now = self._port.monotonic()
        if free > 0:
            with self._mutex:
                published, self._published = self._published, set()
            if now >= min(self._looked + _EVERY, self._next):
                self._looked, self._next = now, math.inf
                looks = {(name, each) for name, assigned in self._assignments.items() for each in assigned.mine}
                if not await self._take(looks | published, free) and not self._jobs:
                    everywhere = {
                        (name, each) for name in self._handlers for each in range(self._tiers.keys.partitions)
                    }
                    await self._take(everywhere - looks - published, free)
            else:
                mine = {name: set(assigned.mine) for name, assigned in self._assignments.items()}
                await self._take({(name, each) for name, each in published if each in mine[name]}, free)
                # The rest is found by its worker, or at the next look.
            self._begin()
        if self._published and len(self._jobs) < self._plan.concurrency:
            return 0.0
        until = min(self._looked + _EVERY, self._next)
        return max(0.001, min(_EVERY, until - self._port.monotonic()))

    async def _take(self, looks: Iterable[tuple[str, int]], free: int) -> int:
        """Take due sessions of these handlers in these partitions; return how many."""
        looks = list(looks)
        chance.source.shuffle(looks)
        if not looks:
            return 0
        tiers, most = self._tiers, max(1, free // len(looks))
        ahead = round(self._plan.ttl * 1000)
        calls = []
        for name, partition in looks:
            keys = tiers.keys.partition(partition)
            calls.append((DUE, [keys.due_of(name), keys.meta], [most, f"due:{name}", ahead]))
        count = 0
        for (name, partition), answer in zip(looks, await self._port.scripts(calls), strict=True):
            if isinstance(answer, Unavailable):
                log.debug("work: partition %d: %s", partition, answer)
                continue
            if isinstance(answer, StateError):
                raise answer
            if answer[0] == b"uninitialised":
                await self._revive(name, partition)
                continue
            _, epoch, filled, now_ms, rows, later_ms = answer
            if filled != epoch:
                await self._fill(name, partition, epoch.decode())
            if later_ms:
                left = (float(later_ms) - int(now_ms)) / 1000
                self._next = min(self._next, self._port.monotonic() + max(left, 0.0))
            elif len(rows) == 2 * most:
                with self._mutex:
                    self._published.add((name, partition))  # there may be more
            for member, score in zip(rows[::2], rows[1::2], strict=True):
                self._waiting.append(_Taken(name, tiers.keys.of(Ref.parse(member.decode())), score))
                count += 1
        return count

    def _begin(self) -> None:
        """Begin turns of sessions that were taken, as many as there is room for."""
        while self._waiting and len(self._jobs) < self._plan.concurrency:
            taken = self._waiting.popleft()
            job = self._port.spawn_here(partial(self._serve, taken), f"distributed-state-work-{taken.handler}"[:60])
            self._jobs[id(taken)] = taken, job

    # Sets that Redis lost

    async def _revive(self, name: str, partition: int) -> None:
        """Start a partition that Redis does not have, if SQL has sessions there."""
        if (name, partition, "") in self._filled:
            return
        rows = await self._port.sql(partial(self._tiers.cold.due, partition, name, after=None, limit=1))
        if rows:
            await self._tiers.start(partition)
        else:
            self._filled.add((name, partition, ""))

    async def _fill(self, name: str, partition: int, epoch: str) -> None:
        """Put the sessions that SQL has into the partition's due set, once in each epoch."""
        keys = self._tiers.keys.partition(partition)
        after: DueRow | None = None
        last = False
        while not last:
            look = partial(self._tiers.cold.due, partition, name, after=after, limit=_PAGE)
            rows = await self._port.sql(look)
            last = len(rows) < _PAGE
            members = [word for row in rows for word in (b"%d" % due_ms(row.due), row.record.encode())]
            words = [epoch, b"1" if last else b"0", f"due:{name}", *members]
            answer = (await self._port.scripts([(FILL, [keys.due_of(name), keys.meta], words)]))[0]
            if isinstance(answer, StateError):
                raise answer
            if answer[0] != b"ok":
                return  # another epoch has begun
            after = rows[-1] if rows else None
        with self._mutex:
            self._published.add((name, partition))

    # One session

    async def _serve(self, taken: _Taken) -> None:
        about = taken.keys.ref.text
        try:
            await self._turn(taken)
        except LockTimeout:
            await self._later(taken)
        except Deleted:
            await self._send(taken, None)
        except Unavailable as error:
            log.warning("%s is served later: %s", about[:200], error, extra=log_fields(about))
        except StateError as error:
            log.error("%s cannot be served: %s", about[:200], error, extra=log_fields(about))
        finally:
            self._jobs.pop(id(taken), None)
            self._news.set()

    async def _turn(self, taken: _Taken) -> None:
        """Run the handler in a turn of the session."""
        session = self._session(taken.keys.ref.id)
        context = context_of(session)
        turn = HandledTurn(session, context, request_id=None, busy="reject", wait=0.0, ttl=self._plan.ttl, limit=None)
        try:
            async with turn:
                schedule = inbox.schedule_of(turn.begun)
                if schedule is None or schedule.handler != taken.handler or schedule.due is None:
                    await self._send(taken, None)
                    return
                if schedule.due > self._now_ms() + _SOON_MS:
                    await self._send(taken, schedule.due)  # it was found too early: see fill.lua
                    return
                if turn.inbox:
                    await self._call(taken.handler, turn)
                    served = bool(turn.taken)
                    mode = b"d" if served else self._failure(schedule.failed + 1)
                    turn.settle(mode, forgets=served and schedule.failed > 0)
        except Stopped:
            await self._drop(taken, turn)
        except (Fenced, LockTimeout, Deleted, Unavailable, DurabilityUnknown):
            raise
        except Exception as error:
            self._tiers.work.failed += 1
            about = taken.keys.ref.text
            log.exception("handler %s failed for %s", taken.handler, about[:200], extra=log_fields(about))
            await self._failed(taken, session, type(error).__name__)
        else:
            if turn.written is not None:
                self._tiers.work.served += bool(turn.taken)
                return
            if turn.inbox:
                log.error("handler %s took no input of %s", taken.handler, taken.keys.ref.text[:200])
                await self._failed(taken, session, "NothingTaken")
            else:
                await self._settle(taken, session)

    async def _call(self, name: str, turn: AsyncTurn) -> None:
        serves, given = self._handlers[name], self._dressed(turn)
        called = getattr(serves, "__call__", None)  # noqa: B004 - whether it is a coroutine function
        if inspect.iscoroutinefunction(serves) or inspect.iscoroutinefunction(called):
            await serves(given)
        else:
            await self._port.thread(serves, given)

    def _failure(self, failed: int) -> bytes:
        pause = self._plan.retry_ms(failed)
        return b"f !" if pause is None else b"f %d" % pause

    async def _failed(self, taken: _Taken, session: AsyncSession, error: str) -> None:
        """Note that a turn of the handler failed, and when it is tried again."""
        context = context_of(session)
        schedule = inbox.schedule_of(await context.read(fresh=True))
        if schedule is None:
            return  # deleted meanwhile
        changes = context.changes()
        changes.reserved(FAILURE, error.encode()[:200])
        failure = self._failure(schedule.failed + 1)
        if failure == b"f !":
            log.error("%s is stuck: its handler %s is not tried again", taken.keys.ref.text[:200], taken.handler)
            data = {"handler": taken.handler, "attempts": schedule.failed + 1, "error": error}
            changes.emit("turn.failed", data)
        await self._write(taken, changes, failure)

    async def _settle(self, taken: _Taken, session: AsyncSession) -> None:
        """Compute when the session is due next: nothing waits now."""
        changes = context_of(session).changes()
        changes.reserved(FAILURE, None)
        await self._write(taken, changes, b"d")

    async def _drop(self, taken: _Taken, turn: HandledTurn) -> None:
        """Remove what a stopped turn had taken, without an answer: it must not be repeated."""
        context = context_of(turn.session)
        changes = context.changes()
        changes.reserved(FAILURE, None)
        most = context.store.settings.remembered_requests
        inbox.take(changes, turn.begun, turn.taken, {}, most, self._tiers.clock.now())
        await self._write(taken, changes, b"d")

    async def _write(self, taken: _Taken, changes: Changes, mode: bytes) -> None:
        draft = changes.draft("schedule").scheduled(taken.handler, mode)
        await write_path.commit(self._tiers, taken.keys, draft)

    async def _later(self, taken: _Taken) -> None:
        """Look again at a session whose lease somebody else holds: soon, or when that lease ends."""
        lock = taken.keys.lock
        left_ms = await self._tiers.warm.command(b"PTTL", lock)
        pause = min(_SOON_MS, left_ms) if left_ms > 0 else 0
        await self._send(taken, self._now_ms() + pause)

    def _now_ms(self) -> int:
        return int(self._tiers.clock.now() * 1000)

    async def _send(self, taken: _Taken, score: int | None) -> None:
        """Set when the session is due, None: not at all; unless that was changed meanwhile."""
        words = [taken.keys.text, taken.score, b"" if score is None else score]
        await self._tiers.warm.script(DEFER, [taken.keys.due_of(taken.handler)], words)

    # The end

    async def _end(self) -> None:
        """Give back what was not begun, wait for the running turns, and stop those that take too long."""
        try:
            await self._give_back(list(self._waiting))
            self._waiting.clear()
            end = self._port.monotonic() + self._plan.shutdown_timeout
            while self._jobs and (left := end - self._port.monotonic()) > 0:
                self._news.clear()
                if self._jobs:
                    await self._news.wait(min(left, _EVERY))
            left_over = list(self._jobs.values())
            for _, job in left_over:
                job.ask()
            for _, job in left_over:
                await job.stop()
            await self._give_back([taken for taken, _ in left_over])
            for assignment in self._assignments.values():
                await assignment.leave()
        except StateError as error:
            log.warning("work: %s; others go on when the leases have ended", error)

    async def _give_back(self, all: list[_Taken]) -> None:
        for taken in all:
            await self._send(taken, self._now_ms())
