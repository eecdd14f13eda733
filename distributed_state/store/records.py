"""What a store hands out: a record by its id, plain or of a schema. Law: no I/O."""

from __future__ import annotations

import secrets
from typing import Unpack, overload

from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.typed_session import AsyncTypedSession
from distributed_state.records.home import StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Options, SessionOptions
from distributed_state.records.schema import M, Schema
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.values import field_ttl
from distributed_state.values.model import Ref


class AsyncHandles(StoreContext):
    """The part of a store that makes handles."""

    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession: ...
    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[SessionOptions],
    ) -> AsyncTypedSession[M]: ...
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """Return a conversation by its id, or a new one. No I/O.

        Example::

            session = store.session("c1", user="u1", idle=3600)

        `user` owns it from its first write on; `actor` is noted with every change made through this handle. With
        `schema`, a pydantic model or a Schema of one, its fields are those of the model.

        A session that begins with a commit through this handle ends after `idle` seconds without another, and at the
        age of `lifetime` seconds (see `set_lifetime`); None is the store's `session_idle` and `session_lifetime`,
        `math.inf` is without end.

        What is stored through it: with `on_invalid="stringify"` what JSON cannot hold becomes its `str()`, at any
        depth; `clean(key, value)` and `clean_messages(message)` return what is stored in place of each, or raise. The
        store's own hooks come after them.
        """
        ref = Ref("session", secrets.token_hex(16) if id is None else id)
        fresh = id is None
        idle = options.pop("idle", None)
        lifetime = options.pop("lifetime", None)
        lives = (
            field_ttl.span_ms("idle", self.settings.session_idle if idle is None else idle),
            field_ttl.span_ms("lifetime", self.settings.session_lifetime if lifetime is None else lifetime),
        )
        rest: Options = options
        if schema is not None:
            return AsyncTypedSession(self, ref, schema=schema, user=user, fresh=fresh, lifetime=lives, **rest)
        return AsyncSession(self, ref, user=user, fresh=fresh, lifetime=lives, **rest)

    @overload
    def user(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> AsyncRecord: ...
    @overload
    def user(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> AsyncTypedRecord[M]: ...
    def user(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> AsyncRecord:
        """Return the record of a user, across sessions. No I/O. `schema` and further options as for `session`."""
        return self._handle(Ref("user", id), id, schema, options)

    @overload
    def app(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> AsyncRecord: ...
    @overload
    def app(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> AsyncTypedRecord[M]: ...
    def app(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> AsyncRecord:
        """Return the record that all users of an application share. No I/O. Options as for `session`."""
        return self._handle(Ref("app", id), None, schema, options)

    @overload
    def task(
        self, id: str, *, user: str | None = None, schema: None = None, **options: Unpack[Options]
    ) -> AsyncRecord: ...
    @overload
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[Options],
    ) -> AsyncTypedRecord[M]: ...
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[Options],
    ) -> AsyncRecord:
        """Return the record of a piece of work, which `user` owns. No I/O. Options as for `session`."""
        return self._handle(Ref("task", id), user, schema, options)

    def _handle(self, ref: Ref, user: str | None, schema: type[M] | Schema[M] | None, options: Options) -> AsyncRecord:
        if schema is not None:
            return AsyncTypedRecord(self, ref, schema=schema, user=user, **options)
        return AsyncRecord(self, ref, user=user, **options)
