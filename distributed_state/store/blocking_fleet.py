"""The blocking face of what a store does for the whole fleet. Law: no logic here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from distributed_state.events.config import Source
from distributed_state.events.consumer import AsyncEvents
from distributed_state.events.handlers import Handler
from distributed_state.port.blocking import finish
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking_records import Record
from distributed_state.store.twins import twin_of
from distributed_state.values.results import Event, Replica

H = TypeVar("H", bound=Handler)


class Events:
    def __init__(self, twin: AsyncEvents) -> None:
        self._twin = twin

    @property
    def position(self) -> str:
        return self._twin.position

    @property
    def waiting(self) -> int:
        return self._twin.waiting

    def next(self, timeout: float | None = None) -> Event | None:
        return finish(self._twin.next(timeout))

    def close(self, *, handled: bool = True) -> None:
        return finish(self._twin.close(handled=handled))

    def __enter__(self) -> Self:
        finish(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self.next()
        if event is None:
            raise StopIteration
        return event


class Fleet:
    _twin: AsyncStateStore

    def emit(self, type: str, data: Mapping[str, Any] | None = None, *, subject: str | Record = "") -> Event:
        return finish(self._twin.emit(type, data, subject=twin_of(subject)))

    def activate_agent(
        self, agent: str | None, *, client: str = "", conversation_id: str = "", previous_agent: str | None = None
    ) -> Event:
        return finish(
            self._twin.activate_agent(
                agent, client=client, conversation_id=conversation_id, previous_agent=previous_agent
            )
        )

    def change_directory(self, new_path: str, *, client: str = "", old_path: str | None = None) -> Event:
        return finish(self._twin.change_directory(new_path, client=client, old_path=old_path))

    def events(self, *types: str, group: str | None = None, since: str | None = None) -> Events:
        return Events(self._twin.events(*types, group=group, since=since))

    @overload
    def on(
        self, types: str | Iterable[str], handler: H, *, group: str | None = None, since: str | None = None
    ) -> H: ...
    @overload
    def on(
        self, types: str | Iterable[str], handler: None = None, *, group: str | None = None, since: str | None = None
    ) -> Callable[[H], H]: ...
    def on(
        self, types: str | Iterable[str], handler: Any = None, *, group: str | None = None, since: str | None = None
    ) -> Any:
        return self._twin.on(types, handler, group=group, since=since)

    def off(self, handler: Handler) -> None:
        return finish(self._twin.off(handler))

    def ready(self) -> None:
        return finish(self._twin.ready())

    def replicas(self) -> list[Replica]:
        return finish(self._twin.replicas())

    def announce(self, **fields: Any) -> None:
        return self._twin.announce(**fields)

    def reload_config(self, config: Source, *, agent: str = "") -> int:
        return finish(self._twin.reload_config(config, agent=agent))

    def audit(
        self,
        *,
        conversation: str | None = None,
        subject: str | Record | None = None,
        type: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Event]:
        return finish(
            self._twin.audit(
                conversation=conversation,
                subject=twin_of(subject),
                type=type,
                since=since,
                until=until,
                limit=limit,
                after=after,
            )
        )
