"""What a store hands out: a record by its id, plain or of a schema. Law: no I/O."""

from __future__ import annotations

import secrets
from typing import overload

from distributed_state.model import Ref
from distributed_state.schema import M, Schema
from distributed_state.session import AsyncRecord, AsyncSession
from distributed_state.tiers import Home
from distributed_state.typed import AsyncTypedRecord, AsyncTypedSession


class AsyncHandles(Home):
    """The part of a store that makes handles."""

    @overload
    def session(
        self, id: str | None = None, *, user: str | None = None, actor: str = "", schema: None = None
    ) -> AsyncSession: ...
    @overload
    def session(
        self, id: str | None = None, *, user: str | None = None, actor: str = "", schema: type[M] | Schema[M]
    ) -> AsyncTypedSession[M]: ...
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        actor: str = "",
        schema: type[M] | Schema[M] | None = None,
    ) -> AsyncSession:
        """A conversation by its id, or a new one. No I/O.

        `user` owns it from its first write on; `actor` is noted with every change made through this handle. With
        `schema`, a pydantic model or a Schema of one, its fields are those of the model.
        """
        ref = Ref("session", secrets.token_hex(16) if id is None else id)
        if schema is not None:
            return AsyncTypedSession(self, ref, schema=schema, user=user, actor=actor, fresh=id is None)
        return AsyncSession(self, ref, user=user, actor=actor, fresh=id is None)

    @overload
    def user(self, id: str, *, actor: str = "", schema: None = None) -> AsyncRecord: ...
    @overload
    def user(self, id: str, *, actor: str = "", schema: type[M] | Schema[M]) -> AsyncTypedRecord[M]: ...
    def user(self, id: str, *, actor: str = "", schema: type[M] | Schema[M] | None = None) -> AsyncRecord:
        """What is kept about a user, across sessions. No I/O."""
        return self._handle(Ref("user", id), id, actor, schema)

    @overload
    def app(self, id: str, *, actor: str = "", schema: None = None) -> AsyncRecord: ...
    @overload
    def app(self, id: str, *, actor: str = "", schema: type[M] | Schema[M]) -> AsyncTypedRecord[M]: ...
    def app(self, id: str, *, actor: str = "", schema: type[M] | Schema[M] | None = None) -> AsyncRecord:
        """What all users of an application share. No I/O."""
        return self._handle(Ref("app", id), None, actor, schema)

    @overload
    def task(self, id: str, *, user: str | None = None, actor: str = "", schema: None = None) -> AsyncRecord: ...
    @overload
    def task(
        self, id: str, *, user: str | None = None, actor: str = "", schema: type[M] | Schema[M]
    ) -> AsyncTypedRecord[M]: ...
    def task(
        self, id: str, *, user: str | None = None, actor: str = "", schema: type[M] | Schema[M] | None = None
    ) -> AsyncRecord:
        """The state of a piece of work. No I/O."""
        return self._handle(Ref("task", id), user, actor, schema)

    def _handle(self, ref: Ref, user: str | None, actor: str, schema: type[M] | Schema[M] | None) -> AsyncRecord:
        if schema is not None:
            return AsyncTypedRecord(self, ref, schema=schema, user=user, actor=actor)
        return AsyncRecord(self, ref, user=user, actor=actor)
