"""Reading a record for an answer. Law: what is too large to answer is refused before it is in memory.

Design: section 24.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service.limits import Limits
from distributed_state.records import history as past
from distributed_state.records import messages
from distributed_state.records.context import RecordContext
from distributed_state.records.messages import Page, Shown
from distributed_state.values.results import Change, Snapshot

T = TypeVar("T")


async def shown(context: RecordContext, page: Page, limits: Limits, *, fresh: bool) -> tuple[Shown, int]:
    """Fields, phase and messages of one version, as one look at the record gives them, and their size in bytes.

    Raises InvalidValue, which says how to ask for less, if they are larger than an answer may be.
    """
    return await waited.with_room(partial(_shown, context, page, limits.answer, fresh))


async def _shown(context: RecordContext, page: Page, most: int, fresh: bool) -> tuple[Shown, int]:
    found = await _small(messages.chosen(context.tiers, context.keys, page, fresh=fresh, most=most))
    size = sum(map(len, found.entry.fields.values())) + sum(map(len, found.stored.values()))
    if size > most:
        raise InvalidValue(f"fields and messages are {size} bytes, more than {most}: ask for fewer messages at once")
    waited.room(size)
    return found, size


def size_of(entry: CachedRecord, limits: Limits) -> int:
    """Count the bytes of a record's fields and return them. Raises InvalidValue if an answer may not be that large."""
    size = sum(map(len, entry.fields.values()))
    if size > limits.answer:
        raise InvalidValue(f"the fields are {size} bytes, more than {limits.answer}: read them one by one")
    waited.room(size)
    return size


async def history(
    context: RecordContext, limits: Limits, *, after: int, limit: int, before: int | None = None,
    branch: str | None = None,
) -> list[Change]:  # fmt: skip
    """The changes between two versions. Raises InvalidValue if they are larger than an answer may be."""
    read = partial(past.history, context, after, before, limit, branch, most=limits.answer)
    return await waited.with_room(lambda: _small(read()))


async def at(context: RecordContext, limits: Limits, *, version: int, branch: str | None = None) -> Snapshot:
    """The record as it was at a version. Raises InvalidValue if that is larger than an answer may be."""
    return await waited.with_room(lambda: _small(past.at(context, version, branch, most=limits.answer)))


async def _small(read: Coroutine[Any, Any, T]) -> T:
    try:
        return await read
    except TooLarge as error:
        raise InvalidValue(f"{error}: ask for fewer of them, page by page") from error
