"""Changes of one field that depend on what it holds. Law: none of two that meet is lost; one is made on the other's.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import add
from distributed_state.values import codec

_EXACT = 10**15  # the server adds doubles, exact up to here


async def update(context: RecordContext, key: str, values: Mapping[str, Any]) -> int:
    """Merge into the object that the field holds; the new version."""
    if not isinstance(values, Mapping):
        raise InvalidValue(f"{key!r}: update takes a mapping, not {type(values).__name__}")

    def merged(stored: Any) -> Any:
        if not isinstance(stored, dict):
            raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not an object; set() replaces it")
        return {**stored, **values}

    return (await context.swap(key, "update", {}, merged))[1].version


async def append_to(context: RecordContext, key: str, items: Iterable[Any]) -> int:
    """Add to the list that the field holds; the new version."""

    def longer(stored: Any) -> Any:
        if not isinstance(stored, list):
            raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not a list; set() replaces it")
        return [*stored, *items]

    return (await context.swap(key, "append_to", [], longer))[1].version


async def increment(context: RecordContext, key: str, by: int | float) -> int | float:
    """Add to the number that the field holds; the sum."""
    codec.encode_key(key)
    if isinstance(by, bool) or not isinstance(by, (int, float)):
        raise InvalidValue(f"{key!r}: a {type(by).__name__} is not a number")
    if type(by) is int and abs(by) < _EXACT and context.server_adds(key):
        changes = context.changes()
        changes.increment(key, by)
        draft = changes.draft("increment")
        try:
            done = await context.commit(draft)
            return (await write_path.sums(context.tiers, context.keys, draft, done, [key]))[key]
        except Conflict:
            pass  # what is stored is no plain integer: added here and swapped in
    context.allow("read", key)
    data, _ = await context.swap(key, "increment", 0, lambda stored: add(stored, by, key))
    return context.codec.decode(data, key)  # type: ignore[no-any-return]  # what was just encoded
