"""The blocking face: the same names, one line a method. Law: no logic here.

Works in threads, inside a running event loop and after fork(): a call steps the asyncio core by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from distributed_state.conversation.agent_state import AgentState
from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.typed_session import AsyncTypedSession
from distributed_state.conversation.workflow import Workflow
from distributed_state.events.consumer import AsyncEvents
from distributed_state.port.blocking import BlockingPort, finish, here
from distributed_state.records.access import Policy
from distributed_state.records.batch import AsyncBatch
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Clean, CleanMessage, Options, SessionOptions
from distributed_state.records.schema import M, Schema
from distributed_state.records.transaction import AsyncTransaction
from distributed_state.records.typed import AsyncEdit, AsyncTypedRecord
from distributed_state.settings import Settings
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking_contexts import Edit, Lease, TransactionBody, Turn
from distributed_state.store.blocking_fleet import Events, Fleet
from distributed_state.store.blocking_records import Record, Session, TypedRecord, TypedSession, _record, _session
from distributed_state.store.doctor import Finding
from distributed_state.store.lifecycle import resolve
from distributed_state.store.reencryption import Reencrypted
from distributed_state.store.twins import twin_of
from distributed_state.store.upcasting import Upcast
from distributed_state.values.encryption import Encryption
from distributed_state.values.model import Ref
from distributed_state.values.results import SessionInfo
from distributed_state.warm.lease import AsyncLease

T = TypeVar("T")


class Batch:
    def __init__(self, twin: AsyncBatch) -> None:
        self._twin = twin

    @property
    def versions(self) -> dict[Ref, int]:
        return self._twin.versions

    def on(self, handle: Any) -> Any:
        return self._twin.on(twin_of(handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))


class StateStore(Fleet):
    _twin: AsyncStateStore

    def __init__(
        self, settings: Settings, *, encryption: Encryption | None = None, access: Policy | None = None
    ) -> None:
        self._twin = AsyncStateStore(settings, BlockingPort, here, encryption=encryption, access=access, wrap=_wrap)

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
        encryption: Encryption | None = None,
        access: Policy | None = None,
        clean: Clean | None = None,
        clean_messages: CleanMessage | None = None,
        **settings: Any,
    ) -> Self:
        store = cls(
            resolve(url=url, archive=archive, namespace=namespace, **settings), encryption=encryption, access=access
        )
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

    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: None = None,
        **options: Unpack[SessionOptions],
    ) -> Session: ...
    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[SessionOptions],
    ) -> TypedSession[M]: ...
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        return _session(self._twin.session(id, user=user, schema=schema, **options))

    @overload
    def user(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> Record: ...
    @overload
    def user(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> TypedRecord[M]: ...
    def user(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> Record:
        return _record(self._twin.user(id, schema=schema, **options))

    @overload
    def app(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> Record: ...
    @overload
    def app(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> TypedRecord[M]: ...
    def app(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> Record:
        return _record(self._twin.app(id, schema=schema, **options))

    @overload
    def task(self, id: str, *, user: str | None = None, schema: None = None, **options: Unpack[Options]) -> Record: ...
    @overload
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[Options],
    ) -> TypedRecord[M]: ...
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[Options],
    ) -> Record:
        return _record(self._twin.task(id, user=user, schema=schema, **options))

    def invalidate(self) -> None:
        return self._twin.invalidate()

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        return self._twin.acting_as(actor)

    def get_many(self, handles: Iterable[Record]) -> list[dict[str, Any]]:
        return finish(self._twin.get_many([twin_of(each) for each in handles]))

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

    def erase(self, id: str, *, scope: str = "session") -> bool:
        return finish(self._twin.erase(id, scope=scope))

    def sessions(
        self, *, user: str | None = None, limit: int = 50, after: str | None = None, scope: str = "session"
    ) -> list[SessionInfo]:
        return finish(self._twin.sessions(user=user, limit=limit, after=after, scope=scope))

    def export(self, id: str, *, scope: str = "session") -> list[str]:
        return finish(self._twin.export(id, scope=scope))

    def import_(self, lines: Iterable[str], *, id: str | None = None) -> str:
        return finish(self._twin.import_(lines, id=id))

    def reencrypt(self, *, dry_run: bool = False, progress: Callable[[Reencrypted], None] | None = None) -> Reencrypted:
        return finish(self._twin.reencrypt(dry_run=dry_run, progress=progress))

    def purge(self, *, older_than: float) -> dict[str, int]:
        return finish(self._twin.purge(older_than=older_than))

    def forget(self, user: str) -> int:
        return finish(self._twin.forget(user))

    def upcast(
        self,
        schema: type[M] | Schema[M],
        *,
        scope: str = "session",
        user: str | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        progress: Callable[[Upcast], None] | None = None,
    ) -> Upcast:
        return finish(
            self._twin.upcast(schema, scope=scope, user=user, dry_run=dry_run, limit=limit, progress=progress)
        )

    def archive(self) -> int:
        return finish(self._twin.archive())

    def doctor(self) -> list[Finding]:
        return finish(self._twin.doctor())

    def stats(self) -> dict[str, int]:
        return finish(self._twin.stats())


def _wrap(twin: AsyncSession | AsyncTurn) -> Session | Turn:
    """What user code is given on this face."""
    return _session(twin) if isinstance(twin, AsyncSession) else Turn(twin)


def _share_docstrings() -> None:
    """The text of each method is written once, on the asyncio face."""
    pairs = (Lease, AsyncLease), (Record, AsyncRecord), (Session, AsyncSession), (StateStore, AsyncStateStore)
    typed = (TypedRecord, AsyncTypedRecord), (TypedSession, AsyncTypedSession), (Edit, AsyncEdit)
    fleet = (Fleet, AsyncStateStore), (Events, AsyncEvents)
    bodies = (Batch, AsyncBatch), (TransactionBody, AsyncTransaction), (Turn, AsyncTurn)
    for face, twin in (*pairs, *fleet, *typed, *bodies):
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
