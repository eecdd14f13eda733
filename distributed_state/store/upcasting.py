"""Brings many records to a newer schema. Law: one commit a record, which says how many are done.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distributed_state.cold.values import Wanted
from distributed_state.errors import Deleted, InvalidValue, StateError, Unavailable
from distributed_state.records.context import StoreContext
from distributed_state.records.schema import M, Schema
from distributed_state.records.typed import TypedContext
from distributed_state.store import maintenance
from distributed_state.values.model import Ref, escape

_PAGE = 500


_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Upcast:
    """How far an `upcast` came: records brought up, found as they should be, and failed; what the first 100 said."""

    upcast: int = 0
    unchanged: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()


async def upcast_many(
    store: StoreContext,
    schema: type[M] | Schema[M],
    scope: str,
    user: str | None,
    dry_run: bool,
    limit: int | None,
    progress: Callable[[Upcast], None] | None,
) -> Upcast:
    """Bring the archived records of a scope up, the last changed first. A server that is away ends it."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidValue(f"limit is an int from 1 on or None, not {limit!r}")
    schema = Schema.of(schema)
    tiers = store.tiers()
    sofar = Upcast()
    after = None
    owner = None if user is None else escape(Ref("user", user).id)
    Ref(scope, "any")
    await tiers.archiver.drain()
    while rows := await maintenance.listing(tiers, Wanted(scope, _PAGE, owner=owner, after=after)):
        for row in rows:
            if limit is not None and sofar.upcast >= limit:
                return sofar
            if not row.deleted:
                context = TypedContext(store, Ref(scope, row.id), schema=schema)
                sofar = await _one(context, dry_run, sofar)
                if progress is not None:
                    progress(sofar)
        # Those brought up are now the last changed: behind us.
        after = rows[-1].cursor
    return sofar


async def _one(context: TypedContext[Any], dry_run: bool, sofar: Upcast) -> Upcast:
    try:
        older = await context.is_older() if dry_run else await context.upcast() is not None
    except Deleted:
        older = False
    except Unavailable:
        raise
    except StateError as error:
        failures = (*sofar.failures, str(error))[:_SHOWN]
        return replace(sofar, failed=sofar.failed + 1, failures=failures)
    if older:
        return replace(sofar, upcast=sofar.upcast + 1)
    return replace(sofar, unchanged=sofar.unchanged + 1)
