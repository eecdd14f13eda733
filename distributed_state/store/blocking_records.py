"""Records and sessions on the blocking face. Law: one line a method; a hot read's shortcut is the one exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Literal, TypeVar

from distributed_state.conversation.agent_state import AgentState
from distributed_state.conversation.context import Context
from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.tokens import Counter, estimate
from distributed_state.conversation.tools import Tool
from distributed_state.conversation.typed_session import AsyncTypedSession
from distributed_state.conversation.window import Strategy, Summarizer, Window
from distributed_state.conversation.working_memory import ToolCall
from distributed_state.hot.cache import MISSING
from distributed_state.port.blocking import finish
from distributed_state.records.context import context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.records.schema import M
from distributed_state.records.transaction import Transaction
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.store.blocking_contexts import Edit, Lease, TransactionBody, Turn
from distributed_state.store.twins import twin_of
from distributed_state.values.merge import Merge
from distributed_state.values.model import Message, Ref
from distributed_state.values.results import Change, Checkpoint, Lifetime, Snapshot, Written

T = TypeVar("T")


class Record:
    _kind: type[AsyncRecord] = AsyncRecord

    def __init__(self, twin: AsyncRecord) -> None:
        self._twin = twin
        self._peek = context_of(twin).shortcut()

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

    def create(self, values: Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        return finish(self._twin.create(values, is_clear=is_clear))

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

    def apply(self, change: Callable[[Transaction], T], *, merge: Mapping[str, Merge] | None = None) -> T:
        return finish(self._twin.apply(change, merge=merge))

    def lock(self, *, wait: float = 5.0, ttl: float = 30.0, advisory: bool = False) -> Lease:
        return Lease(self._twin.lock(wait=wait, ttl=ttl, advisory=advisory))

    def erase(self) -> bool:
        return finish(self._twin.erase())

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
        self,
        *,
        last: int | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
        order: Literal["asc", "desc"] = "asc",
        fresh: bool = False,
        max_staleness: float | None = None,
    ) -> list[Message]:
        return finish(
            self._twin.messages(
                last=last, limit=limit, before=before, after=after, order=order,
                fresh=fresh, max_staleness=max_staleness,
            )
        )  # fmt: skip

    def message(self, number: int, *, fresh: bool = False, max_staleness: float | None = None) -> Message:
        return finish(self._twin.message(number, fresh=fresh, max_staleness=max_staleness))

    def window(
        self,
        *,
        max_tokens: int,
        keep_last: int = 6,
        keep_system: bool = True,
        counter: Counter = estimate,
        strategy: Strategy = "drop",
        summarizer: Summarizer | None = None,
        wait: float = 60.0,
    ) -> Window:
        return finish(
            self._twin.window(
                max_tokens=max_tokens, keep_last=keep_last, keep_system=keep_system, counter=counter,
                strategy=strategy, summarizer=summarizer, wait=wait,
            )
        )  # fmt: skip

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

    def context(self, *, last: int = 20, beside: Iterable[Record] = (), counter: Counter = estimate) -> Context:
        return finish(self._twin.context(last=last, beside=[twin_of(each) for each in beside], counter=counter))

    def load_state(self) -> AgentState | None:
        return finish(self._twin.load_state())

    def save_state(self, state: AgentState) -> AgentState:
        return finish(self._twin.save_state(state))

    def switch(self, *, previous_id: str = "", client: str = "", message_count: int | None = None) -> int:
        return finish(self._twin.switch(previous_id=previous_id, client=client, message_count=message_count))

    def lifetime(self) -> Lifetime:
        return finish(self._twin.lifetime())

    def set_lifetime(self, *, idle: float | None = None, lifetime: float | None = None) -> int:
        return finish(self._twin.set_lifetime(idle=idle, lifetime=lifetime))

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
        tool: Tool | str,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str,
        turn_id: str = "",
        wait: float = 60.0,
        tools: Iterable[Tool] = (),
    ) -> ToolCall:
        return finish(self._twin.call(tool, arguments, call_id=call_id, turn_id=turn_id, wait=wait, tools=tools))


class TypedRecord(Record, Generic[M]):
    _twin: AsyncTypedRecord[M]

    def load(self, *, fresh: bool = False) -> M:
        return finish(self._twin.load(fresh=fresh))

    def create(self, values: M | Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        return finish(self._twin.create(values, is_clear=is_clear))

    def edit(self) -> Edit[M]:
        return Edit(self._twin.edit())

    def modify(self, change: Callable[[M], M | None]) -> M:
        return finish(self._twin.modify(change))

    def is_older(self) -> bool:
        return finish(self._twin.is_older())

    def upcast(self) -> int | None:
        return finish(self._twin.upcast())


class TypedSession(TypedRecord[M], Session):
    _twin: AsyncTypedSession[M]


def _session(twin: AsyncSession) -> Session:
    return TypedSession(twin) if isinstance(twin, AsyncTypedSession) else Session(twin)


def _record(twin: AsyncRecord) -> Record:
    return TypedRecord(twin) if isinstance(twin, AsyncTypedRecord) else Record(twin)
