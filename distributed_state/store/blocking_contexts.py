"""What the blocking face enters with `with`. Law: one line a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from types import TracebackType
from typing import Any, Generic, Self

from distributed_state.conversation.agent_state import AgentState
from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.tokens import Counter, estimate
from distributed_state.conversation.tools import Tool
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.window import Strategy, Summarizer, Window
from distributed_state.conversation.working_memory import ToolCall
from distributed_state.port.blocking import finish
from distributed_state.records.schema import M
from distributed_state.records.transaction import AsyncTransaction, Transaction
from distributed_state.records.typed import AsyncEdit
from distributed_state.values.model import Message
from distributed_state.values.results import Written
from distributed_state.warm.lease import AsyncLease


class Lease:
    def __init__(self, twin: AsyncLease) -> None:
        self._twin = twin

    @property
    def token(self) -> int:
        return self._twin.token

    @property
    def lost(self) -> bool:
        return self._twin.lost

    def acquire(self) -> Self:
        finish(self._twin.acquire())
        return self

    def release(self) -> None:
        finish(self._twin.release())

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))


class TransactionBody:
    def __init__(self, twin: AsyncTransaction) -> None:
        self._twin = twin

    def __enter__(self) -> Transaction:
        return finish(self._twin.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))


class Turn(MutableMapping[str, Any]):
    def __init__(self, twin: AsyncTurn) -> None:
        self._twin = twin

    def __getitem__(self, key: str) -> Any:
        return self._twin[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._twin[key] = value

    def __delitem__(self, key: str) -> None:
        del self._twin[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._twin)

    def __len__(self) -> int:
        return len(self._twin)

    @property
    def version(self) -> int:
        return self._twin.version

    @property
    def phase(self) -> str | None:
        return self._twin.phase

    @property
    def pending(self) -> tuple[Message, ...]:
        return self._twin.pending

    @property
    def token(self) -> int:
        return self._twin.token

    @property
    def lost(self) -> bool:
        return self._twin.lost

    @property
    def epoch(self) -> str:
        return self._twin.epoch

    @property
    def suspends(self) -> bool:
        return self._twin.suspends

    @property
    def state(self) -> AgentState | None:
        return self._twin.state

    def load_state(self) -> AgentState | None:
        return finish(self._twin.load_state())

    def save_state(self, state: AgentState) -> None:
        return finish(self._twin.save_state(state))

    @property
    def request_id(self) -> str | None:
        return self._twin.request_id

    @property
    def session(self) -> Any:
        return self._twin.session

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self._twin.tool_calls

    @property
    def repeated(self) -> bool:
        return self._twin.repeated

    @property
    def written(self) -> Written | None:
        return self._twin.written

    @property
    def answered_version(self) -> int:
        return self._twin.answered_version

    @property
    def outcome(self) -> Any:
        return self._twin.outcome

    @outcome.setter
    def outcome(self, value: Any) -> None:
        self._twin.outcome = value

    def append(self, *messages: Message | dict[str, Any]) -> None:
        return self._twin.append(*messages)

    def move_to(self, phase: str | None) -> None:
        return self._twin.move_to(phase)

    def transition(self, event: str, *, machine: StateMachine = DEFAULT) -> str:
        return self._twin.transition(event, machine=machine)

    def messages(self, *, last: int | None = None) -> list[Message]:
        return finish(self._twin.messages(last=last))

    def window(
        self,
        *,
        max_tokens: int,
        keep_last: int = 6,
        keep_system: bool = True,
        counter: Counter = estimate,
        strategy: Strategy = "drop",
        summarizer: Summarizer | None = None,
    ) -> Window:
        return finish(
            self._twin.window(
                max_tokens=max_tokens, keep_last=keep_last, keep_system=keep_system, counter=counter,
                strategy=strategy, summarizer=summarizer,
            )
        )  # fmt: skip

    def call(
        self,
        tool: Tool | str,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str = "",
        tools: Iterable[Tool] = (),
    ) -> ToolCall:
        return finish(self._twin.call(tool, arguments, call_id=call_id, tools=tools))

    def __enter__(self) -> Self:
        finish(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))


class Edit(Generic[M]):
    def __init__(self, twin: AsyncEdit[M]) -> None:
        self._twin = twin

    def __enter__(self) -> M:
        return finish(self._twin.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))
