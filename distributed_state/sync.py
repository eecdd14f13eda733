"""The blocking face: the same names, one line a method. Law: no logic here but the shortcut of a hot read.

Works in threads, inside a running event loop and after fork(): a call steps the asyncio core by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from distributed_state.agent.machine import DEFAULT, StateMachine
from distributed_state.agent.state import AgentState, ToolCall
from distributed_state.agent.tools import Tool
from distributed_state.agent.turn import AsyncTurn
from distributed_state.agent.workflow import Workflow
from distributed_state.applying import AsyncTransaction
from distributed_state.bodies import Lease, TransactionBody, Turn
from distributed_state.doctor import Finding
from distributed_state.hot import MISSING
from distributed_state.lease import AsyncLease
from distributed_state.merging import Policy
from distributed_state.model import Change, Checkpoint, Message, Ref, SessionInfo, Snapshot, Written
from distributed_state.port.blocking import BlockingPort, finish, here
from distributed_state.sanitizing import Clean, CleanMessage, Sanitizing
from distributed_state.session import AsyncRecord, AsyncSession
from distributed_state.settings import Settings
from distributed_state.store import AsyncBatch, AsyncStateStore, resolve
from distributed_state.transaction import Transaction

T = TypeVar("T")


class Record:
    _kind: type[AsyncRecord] = AsyncRecord

    def __init__(self, twin: AsyncRecord) -> None:
        self._twin = twin
        self._peek = twin._peek

    @property
    def ref(self) -> Ref:
        return self._twin.ref

    @property
    def id(self) -> str:
        return self._twin.id

    @property
    def ephemeral(self) -> dict[str, Any]:
        return self._twin.ephemeral

    def get(self, key: str, default: Any = None, *, fresh: bool = False, max_staleness: float | None = None) -> Any:
        if not fresh and max_staleness is None:
            value = self._peek(key)
            if value is not MISSING:
                return value
        return finish(self._twin.get(key, default, fresh=fresh, max_staleness=max_staleness))

    def has(self, key: str, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        return finish(self._twin.has(key, fresh=fresh, max_staleness=max_staleness))

    def get_all(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, Any]:
        return finish(self._twin.get_all(fresh=fresh, max_staleness=max_staleness))

    def version(self, *, fresh: bool = False, max_staleness: float | None = None) -> int:
        return finish(self._twin.version(fresh=fresh, max_staleness=max_staleness))

    def exists(self, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        return finish(self._twin.exists(fresh=fresh, max_staleness=max_staleness))

    def set(self, key: str, value: Any, *, ttl: float | None = None, expect_version: int | None = None) -> int:
        return finish(self._twin.set(key, value, ttl=ttl, expect_version=expect_version))

    def set_many(
        self, values: Mapping[str, Any], *, ttl: float | None = None, expect_version: int | None = None
    ) -> int:
        return finish(self._twin.set_many(values, ttl=ttl, expect_version=expect_version))

    def delete(self, key: str, *, expect_version: int | None = None) -> int:
        return finish(self._twin.delete(key, expect_version=expect_version))

    def clear(self, *, messages: bool = False) -> int:
        return finish(self._twin.clear(messages=messages))

    def update(self, key: str, values: Mapping[str, Any]) -> int:
        return finish(self._twin.update(key, values))

    def append_to(self, key: str, *items: Any) -> int:
        return finish(self._twin.append_to(key, *items))

    def increment(self, key: str, by: int | float = 1) -> int | float:
        return finish(self._twin.increment(key, by))

    def write(
        self,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        increment: Mapping[str, int] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
        phase: str | None = None,
        expect_version: int | None = None,
        expect_phase: str | None = None,
    ) -> Written:
        return finish(
            self._twin.write(
                set=set, delete=delete, increment=increment, append=append, phase=phase,
                expect_version=expect_version, expect_phase=expect_phase,
            )
        )  # fmt: skip

    def create(self, values: Mapping[str, Any] | None = None) -> int:
        return finish(self._twin.create(values))

    def initialize(self, defaults: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> bool:
        return finish(self._twin.initialize(defaults))

    def export_state(self, *, messages: bool = False) -> dict[str, Any]:
        return finish(self._twin.export_state(messages=messages))

    def restore_state(self, state: Mapping[str, Any]) -> int:
        return finish(self._twin.restore_state(state))

    def cleanup(self, *, days: float) -> int:
        return finish(self._twin.cleanup(days=days))

    def invalidate(self, key: str | None = None) -> None:
        return self._twin.invalidate(key)

    def transaction(self) -> TransactionBody:
        return TransactionBody(self._twin.transaction())

    def apply(self, change: Callable[[Transaction], T], *, merge: Mapping[str, Policy] | None = None) -> T:
        return finish(self._twin.apply(change, merge=merge))

    def lock(self, *, wait: float = 5.0, ttl: float = 30.0, advisory: bool = False) -> Lease:
        return Lease(self._twin.lock(wait=wait, ttl=ttl, advisory=advisory))

    def history(self, *, after: int = 0, before: int | None = None, limit: int | None = None) -> list[Change]:
        return finish(self._twin.history(after=after, before=before, limit=limit))

    def at(self, *, version: int) -> Snapshot:
        return finish(self._twin.at(version=version))

    def checkpoint(self, label: str) -> int:
        return finish(self._twin.checkpoint(label))

    def checkpoints(self) -> list[Checkpoint]:
        return finish(self._twin.checkpoints())

    def rollback(self, *, steps: int | None = None, label: str | None = None, version: int | None = None) -> int:
        return finish(self._twin.rollback(steps=steps, label=label, version=version))

    def fork(self, new_id: str, *, version: int | None = None) -> int:
        return finish(self._twin.fork(new_id, version=version))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._twin.ref.text[:200]}>"


class Session(Record):
    _twin: AsyncSession

    def append(self, *messages: Message | dict[str, Any]) -> int:
        return finish(self._twin.append(*messages))

    def messages(
        self, *, last: int | None = None, fresh: bool = False, max_staleness: float | None = None
    ) -> list[Message]:
        return finish(self._twin.messages(last=last, fresh=fresh, max_staleness=max_staleness))

    def phase(self, *, fresh: bool = False, max_staleness: float | None = None) -> str | None:
        return finish(self._twin.phase(fresh=fresh, max_staleness=max_staleness))

    def transition(
        self,
        event: str,
        *,
        machine: StateMachine = DEFAULT,
        set: Mapping[str, Any] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
    ) -> str:
        return finish(self._twin.transition(event, machine=machine, set=set, append=append))

    def load_state(self) -> AgentState | None:
        return finish(self._twin.load_state())

    def save_state(self, state: AgentState) -> AgentState:
        return finish(self._twin.save_state(state))

    def turn(
        self,
        *,
        request_id: str | None = None,
        busy: str = "wait",
        wait: float = 60.0,
        ttl: float = 30.0,
        limit: float | None = None,
        slot: str | None = None,
    ) -> Turn:
        return Turn(self._twin.turn(request_id=request_id, busy=busy, wait=wait, ttl=ttl, limit=limit, slot=slot))

    def call(
        self,
        tool: Tool,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str,
        turn_id: str = "",
        wait: float = 60.0,
    ) -> ToolCall:
        return finish(self._twin.call(tool, arguments, call_id=call_id, turn_id=turn_id, wait=wait))


class Batch:
    def __init__(self, twin: AsyncBatch) -> None:
        self._twin = twin

    @property
    def versions(self) -> dict[Ref, int]:
        return self._twin.versions

    def on(self, handle: Any) -> Any:
        return self._twin.on(getattr(handle, "_twin", handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))


class StateStore:
    def __init__(self, settings: Settings) -> None:
        self._twin = AsyncStateStore(settings, BlockingPort, here)
        self._twin.dress = _dress

    @property
    def settings(self) -> Settings:
        return self._twin.settings

    @property
    def replica(self) -> str:
        return self._twin.replica

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        archive: str | None = None,
        namespace: str | None = None,
        clean: Clean | None = None,
        clean_messages: CleanMessage | None = None,
        **settings: Any,
    ) -> Self:
        store = cls(resolve(url=url, archive=archive, namespace=namespace, **settings))
        store._twin.hook(clean, clean_messages)
        finish(store._twin.__aenter__())
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        finish(self._twin.close())

    def session(
        self, id: str | None = None, *, user: str | None = None, actor: str = "", **options: Unpack[Sanitizing]
    ) -> Session:
        return Session(self._twin.session(id, user=user, actor=actor, **options))

    def user(self, id: str, *, actor: str = "", **options: Unpack[Sanitizing]) -> Record:
        return Record(self._twin.user(id, actor=actor, **options))

    def app(self, id: str, *, actor: str = "", **options: Unpack[Sanitizing]) -> Record:
        return Record(self._twin.app(id, actor=actor, **options))

    def task(self, id: str, *, user: str | None = None, actor: str = "", **options: Unpack[Sanitizing]) -> Record:
        return Record(self._twin.task(id, user=user, actor=actor, **options))

    def invalidate(self) -> None:
        return self._twin.invalidate()

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        return self._twin.acting_as(actor)

    def get_many(self, handles: Iterable[Record]) -> list[dict[str, Any]]:
        return finish(self._twin.get_many([handle._twin for handle in handles]))

    def batch(self) -> Batch:
        return Batch(self._twin.batch())

    def run(
        self,
        workflow: Workflow,
        user_input: str | None = None,
        *,
        session_id: str | None = None,
        user: str | None = None,
        request_id: str | None = None,
        wait: float = 60.0,
        ttl: float = 30.0,
    ) -> AgentState:
        return finish(
            self._twin.run(
                workflow, user_input, session_id=session_id, user=user, request_id=request_id, wait=wait, ttl=ttl
            )
        )

    def delete(self, id: str, *, scope: str = "session") -> int:
        return finish(self._twin.delete(id, scope=scope))

    def sessions(
        self, *, user: str | None = None, limit: int = 50, after: str | None = None, scope: str = "session"
    ) -> list[SessionInfo]:
        return finish(self._twin.sessions(user=user, limit=limit, after=after, scope=scope))

    def export(self, id: str, *, scope: str = "session") -> list[str]:
        return finish(self._twin.export(id, scope=scope))

    def import_(self, lines: Iterable[str], *, id: str | None = None) -> str:
        return finish(self._twin.import_(lines, id=id))

    def purge(self, *, older_than: float) -> dict[str, int]:
        return finish(self._twin.purge(older_than=older_than))

    def forget(self, user: str) -> int:
        return finish(self._twin.forget(user))

    def archive(self) -> int:
        return finish(self._twin.archive())

    def doctor(self) -> list[Finding]:
        return finish(self._twin.doctor())

    def stats(self) -> dict[str, int]:
        return finish(self._twin.stats())


def _dress(twin: AsyncSession | AsyncTurn) -> Session | Turn:
    """What user code is given on this face."""
    return Session(twin) if isinstance(twin, AsyncSession) else Turn(twin)


def _share_docstrings() -> None:
    """The text of each method is written once, on the asyncio face."""
    pairs = (Lease, AsyncLease), (Record, AsyncRecord), (Session, AsyncSession), (StateStore, AsyncStateStore)
    for face, twin in (*pairs, (Batch, AsyncBatch), (TransactionBody, AsyncTransaction), (Turn, AsyncTurn)):
        face.__doc__ = _blocking(twin.__doc__ or "")
        for name, method in vars(face).items():
            text = getattr(getattr(twin, name, None), "__doc__", None)
            if text and not name.startswith("_"):
                target = getattr(method, "__func__", method)
                if not isinstance(target, property):
                    target.__doc__ = _blocking(text)


def _blocking(text: str) -> str:
    return text.replace("async with", "with").replace("await ", "").replace("AsyncStateStore", "StateStore")


_share_docstrings()
