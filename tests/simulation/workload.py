"""The operations of clients through the public API, and their outcomes. Law: each write names its writer.

The writer of a change is its `actor`, so the history shows whether an operation was applied, where, and how often.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_state import AsyncStateStore
from distributed_state.errors import DurabilityUnknown, Interrupted, StateError, Unavailable
from tests.simulation.plan import Operation
from tests.simulation.world import World

ACKNOWLEDGED, REFUSED, UNKNOWN = "acknowledged", "refused", "unknown"


@dataclass(slots=True)
class Outcome:
    """The outcome of an operation. `writer`: its actor; `records`: those that it may have changed.

    `version`: the one in its answer, 0 if none; `base`: the one that it required, or that a lease protected.
    `seen`: the version and fields that a read returned.
    """

    operation: Operation
    writer: str
    began: float
    records: tuple[str, ...]
    replica: str = ""
    ended: float = 0.0
    state: str = UNKNOWN
    error: str = ""
    version: int = 0
    base: int | None = None
    level: str = "memory"
    died: bool = False  # the replica on which it was made died before the end of the run
    seen: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    relied: dict[str, Any] | None = None  # the fields from which a change was computed
    left: list[str] = field(default_factory=list)  # records that a forgotten user still had
    fresh: bool = False
    repeated: bool = False
    seizes: bool = False  # a turn that takes the lease from another one
    counted: int | None = None  # the number that a turn or a transaction read; it wrote this plus one
    target: int = 0  # the version to which a rollback or a fork refers

    @property
    def is_write(self) -> bool:
        """Whether it may have changed anything."""
        return not self.operation.kind.startswith(("get", "read", "messages", "item get", "follow", "stop"))

    def __str__(self) -> str:
        told = f" as version {self.version}" if self.version else ""
        return (
            f"{self.writer} ({self.operation.kind}) on {self.replica} at {self.began:.3f}-{self.ended:.3f}: "
            f"{self.state}{told} {self.error}"
        )


def fork_of(outcome: Outcome) -> str:
    """The id of the record that a fork creates."""
    return f"fork-{outcome.writer}"


BRIEF = "brief"  # a field that expires after BRIEF_SECONDS
BRIEF_SECONDS = 0.4


def lasting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without the one that expires."""
    return {key: value for key, value in fields.items() if key != BRIEF}


PRIVATE = {"keep secret": "private", "erase": "private", "keep own": "own", "fork own": "own", "forget": "own"}
"""Operations on records that are erased, or forgotten with their user, by how these are called."""
ERASURES = ("erase", "forget")
IDLE = 0.6  # seconds until a short session ends


def private(operation: Operation) -> str:
    """The id of a record that may be erased, or forgotten with its user."""
    return f"{PRIVATE[operation.kind]}{operation.record}"


def short(operation: Operation) -> str:
    """The id of a session with a lifetime."""
    return f"short{operation.record}"


def secret(writer: str) -> str:
    """The text that a writer writes into a record that may be erased."""
    return f"secret of {writer}!"


class Withheld(StateError):
    """A turn that took inputs and fails."""


class Caller:
    """Does one operation on one replica."""

    levels: tuple[str, ...] = ()  # of durable writes

    def __init__(self, world: World, store: AsyncStateStore, outcome: Outcome, ttl: float) -> None:
        self.world, self.store, self.outcome, self.ttl = world, store, outcome, ttl
        self.operation = outcome.operation
        self.chance = random.Random(self.operation.draw)
        self.value = outcome.writer
        self.session = self._session(outcome.records[0] if outcome.records else "nobody")

    def _session(self, id: str) -> Any:
        return self.store.session(id, actor=self.outcome.writer)

    async def run(self) -> None:
        """Do it, and record the outcome."""
        outcome = self.outcome
        work: Callable[[], Awaitable[None]] = getattr(self, "_" + self.operation.kind.replace(" ", "_"))
        try:
            await work()
            outcome.state = ACKNOWLEDGED
        except (Unavailable, DurabilityUnknown, Interrupted, asyncio.CancelledError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:300]
            if isinstance(error, asyncio.CancelledError):
                raise
        except StateError as error:
            # A batch is not atomic, and a caller that loses a lease may have written under it.
            outcome.state = UNKNOWN if self.operation.kind in ("batch", "locked") else REFUSED
            outcome.error = f"{type(error).__name__}: {error}"[:300]
        finally:
            outcome.ended = self.world.now

    # Reads

    async def _look(self, fresh: bool) -> None:
        self.outcome.fresh = fresh
        view = await self.session.view(fresh=fresh)
        self.outcome.seen.append((self.session.id, view.version, dict(view)))

    async def _get(self) -> None:
        await self._look(False)

    async def _read(self) -> None:
        await self._look(True)

    async def _messages(self) -> None:
        self.outcome.fresh = True
        found = await self.session.messages(fresh=True)
        self.outcome.seen.append((self.session.id, -1, {"messages": [each.content for each in found]}))

    async def _item_get(self) -> None:
        self.outcome.fresh = True
        key = self.chance.choice("xy")
        self.outcome.seen.append((self.session.id, -1, {key: await self.session.items("notes").get(key)}))

    # Writes

    async def _set(self) -> None:
        self.outcome.version = await self.session.set(self.chance.choice("ab"), self.value)

    async def _set_large(self) -> None:
        """More than is published: a receiver of the event must read it."""
        self.outcome.version = await self.session.set("c", self.value + "." * 5000)

    async def _set_brief(self) -> None:
        self.outcome.version = await self.session.set(BRIEF, self.value, ttl=BRIEF_SECONDS)

    async def _set_if_unchanged(self) -> None:
        self.outcome.base = await self.session.version()
        await self._think()
        self.outcome.version = await self.session.set("a", self.value, expect_version=self.outcome.base)

    async def _set_if_equal(self) -> None:
        view = await self.session.view()
        self.outcome.counted = view.get("swaps", 0)
        expect = {"swaps": view["swaps"]} if "swaps" in view else {}
        if not expect:
            await self.session.write(set={"swaps": 1}, expect_version=view.version)
            return
        written = await self.session.write(set={"swaps": view["swaps"] + 1}, expect=expect)
        self.outcome.version = written.version

    async def _delete_field(self) -> None:
        self.outcome.version = await self.session.delete(self.chance.choice("ab"))

    async def _increment(self) -> None:
        await self.session.increment("n")

    async def _append(self) -> None:
        self.outcome.version = await self.session.append({"role": "user", "content": self.value})

    async def _turn(self) -> None:
        outcome = self.outcome
        async with self.session.turn(request_id=outcome.writer, ttl=self.ttl, wait=2.0) as turn:
            outcome.repeated = turn.repeated
            if not turn.repeated:
                turn.append({"role": "user", "content": self.value})
                outcome.counted = counted = turn.get("count", 0)
                outcome.relied = lasting(turn)
                await self._think()
                turn["count"] = counted + 1
                turn["by"] = self.value

    async def _serve(self) -> None:
        """Take inputs, now and then also those that come meanwhile."""
        self.outcome.seizes = self.chance.random() < 0.5
        busy = "interrupt" if self.outcome.seizes else "wait"
        async with self.session.turn(ttl=self.ttl, wait=2.0, busy=busy) as turn:
            turn.append(*(each.message for each in turn.take()))
            await turn.stream(self.value)
            await self._think()
            if self.chance.random() < 0.5:
                await turn.arrived()
                turn.append(*(each.message for each in turn.take()))
            turn["served"] = self.value
            if self.chance.random() < 0.2:
                raise Withheld

    async def _transaction(self) -> None:
        async with self.session.transaction() as transaction:
            self.outcome.base = transaction.version
            self.outcome.counted = counted = transaction.get("sum", 0)
            self.outcome.relied = lasting(transaction)
            await self._think()
            transaction["sum"] = counted + 1

    async def _apply(self) -> None:
        def change(state: Any) -> None:
            self.outcome.counted = state.get("sum", 0)
            state["sum"] = self.outcome.counted + 1

        await self.session.apply(change)

    async def _locked(self) -> None:
        async with self.session.lock(ttl=self.ttl, wait=2.0):
            view = await self.session.view(fresh=self.chance.random() < 0.5)
            self.outcome.base, self.outcome.counted = view.version, (counted := view.get("held", 0))
            self.outcome.relied = lasting(view)
            await self._think()
            self.outcome.version = await self.session.set("held", counted + 1)

    async def _item_put(self) -> None:
        self.outcome.version = await self.session.items("notes").put(self.chance.choice("xy"), self.value)

    async def _item_delete(self) -> None:
        self.outcome.version = await self.session.items("notes").delete(self.chance.choice("xy"))

    async def _tag(self) -> None:
        written = await self.session.write(tag={"by": self.value}, set={"a": self.value})
        self.outcome.version = written.version

    async def _batch(self) -> None:
        async with self.store.batch() as batch:
            for id in self.outcome.records:
                batch.on(self._session(id)).set("b", self.value)

    async def _durable(self) -> None:
        self.outcome.level = self.chance.choice(self.levels)
        self.outcome.version = await self.session.set("a", self.value, durability=self.outcome.level)

    async def _delete_record(self) -> None:
        with self.store.acting_as(self.outcome.writer):
            self.outcome.version = await self.store.delete(self.session.id)

    async def _revive(self) -> None:
        self.outcome.version = (await self.session.write(set={"a": self.value}, revive=True)).version

    async def _clear(self) -> None:
        self.outcome.version = await self.session.clear(messages=True, items=True)

    async def _checkpoint(self) -> None:
        self.outcome.version = await self.session.checkpoint(self.value)

    async def _roll_back(self) -> None:
        version = await self.session.version(fresh=True)
        self.outcome.target = max(1, version - self.chance.randrange(6))
        self.outcome.version = await self.session.rollback(version=self.outcome.target)

    async def _fork(self) -> None:
        version = await self.session.version(fresh=True)
        self.outcome.target = max(1, version - self.chance.randrange(3))
        await self.session.fork(fork_of(self.outcome), version=self.outcome.target)

    async def _keep_secret(self) -> None:
        await self._keep(self._session(private(self.operation)))

    async def _keep_own(self) -> None:
        id = private(self.operation)
        await self._keep(self.store.session(id, user=self._user, actor=self.outcome.writer))

    async def _keep(self, session: Any) -> None:
        said = secret(self.value)
        match self.chance.randrange(3):
            case 0:
                await session.set("secret", said)
            case 1:
                await session.append({"role": "user", "content": said})
            case _:
                await session.items("secrets").put(self.value, said)

    async def _fork_own(self) -> None:
        await self._session(private(self.operation)).fork(fork_of(self.outcome))

    async def _erase(self) -> None:
        await self.store.erase(private(self.operation))

    async def _forget(self) -> None:
        await self.store.forget(self._user)
        await self._think()
        self.outcome.left = [each.id for each in await self.store.sessions(user=self._user, fresh=True)]

    @property
    def _user(self) -> str:
        return f"user{self.operation.record}"

    async def _write_short(self) -> None:
        session = self.store.session(short(self.operation), idle=IDLE, actor=self.value)
        self.outcome.version = await session.set("a", self.value)

    async def _compact(self) -> None:
        await self.store.admin.compact(older_than=self.store.settings.op_window)

    async def _emit(self) -> None:
        type = self.chance.choice(("app.a", "app.b", "app.c"))
        await self.store.emit(type, {"by": self.value}, subject=self.session)

    async def _think(self) -> None:
        await self.world.sleep(self.chance.choice((0.0, 0.002, 0.02, 0.2)))
