"""What a store hands out: a record by its id, plain or of a schema. Law: no I/O.

Design: section 3.
"""

from __future__ import annotations

from typing import Any

from distributed_state.conversation.session import AsyncSession, AsyncTypedSession
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Options, SessionOptions
from distributed_state.records.schema import Schema
from distributed_state.records.typed import AsyncTypedRecord, TypedContext
from distributed_state.values import chance, field_ttl
from distributed_state.values.model import Ref


def session(
    store: StoreContext,
    id: str | None,
    user: str | None,
    schema: Schema[Any] | type[Any] | None,
    options: SessionOptions,
) -> AsyncSession:
    """A session by its id, or a new one."""
    ref = Ref("session", chance.token_hex(16) if id is None else id)
    idle = options.pop("idle", None)
    lifetime = options.pop("lifetime", None)
    lives = (
        field_ttl.span_ms("idle", store.settings.session_idle if idle is None else idle),
        field_ttl.span_ms("lifetime", store.settings.session_lifetime if lifetime is None else lifetime),
    )
    rest: Options = options
    fresh = id is None
    if schema is not None:
        return AsyncTypedSession(
            TypedContext(store, ref, schema=schema, user=user, fresh=fresh, lifetime=lives, **rest)
        )
    return AsyncSession(RecordContext(store, ref, user=user, fresh=fresh, lifetime=lives, **rest))


def record(
    store: StoreContext, ref: Ref, user: str | None, schema: Schema[Any] | type[Any] | None, options: Options
) -> AsyncRecord:
    """Any other record."""
    if schema is not None:
        return AsyncTypedRecord(TypedContext(store, ref, schema=schema, user=user, **options))
    return AsyncRecord(RecordContext(store, ref, user=user, **options))
