"""What is listed, and pages of what was read. Law: as Agno's database in memory sorts and cuts, so does this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agno.db.in_memory.utils import apply_sorting

_PAGE = 1000
_AT_ONCE = 200


def page_of(
    rows: list[dict[str, Any]], limit: int | None, page: int | None, sort_by: str | None, sort_order: str | None
) -> list[dict[str, Any]]:
    """These rows sorted, and of them a page; pages count from 1."""
    ordered: list[dict[str, Any]] = apply_sorting(rows, sort_by, sort_order)
    if limit is None:
        return ordered
    start = ((page or 1) - 1) * limit
    return ordered[start : start + limit]


async def every(
    store: Any, scope: str, prefix: str, *, user: str | None = None, tags: Mapping[str, str] | None = None
) -> list[str]:
    """The ids of all records of a scope that begin so, the oldest first; of one owner, or with tags."""
    found: dict[str, Any] = {}
    if user is None:
        await _walk(store, found, scope=scope, prefix=prefix, tags=tags)
    else:
        await _walk(store, found, scope=scope, user=user)
        if len(found) >= _PAGE:
            # Those of an owner come with the newest change first: one that changed meanwhile is at the front now.
            await _walk(store, found, scope=scope, user=user, as_far_as_new=True)
    named = [info for info in found.values() if info.id.startswith(prefix)]
    return [info.id for info in sorted(named, key=lambda info: (info.created, info.id))]


async def _walk(store: Any, found: dict[str, Any], *, as_far_as_new: bool = False, **wanted: Any) -> None:
    after = None
    while True:
        page = await store.sessions(**wanted, fresh=True, limit=_PAGE, after=after)
        new = {info.id: info for info in page if info.id not in found}
        found.update(new)
        if len(page) < _PAGE or (as_far_as_new and not new):
            return
        after = page[-1].cursor


async def in_pieces(store: Any, records: Sequence[Any]) -> list[dict[str, Any]]:
    """The fields of many records, some in each round trip: one answer for all would hold up others'."""
    found: list[dict[str, Any]] = []
    for at in range(0, len(records), _AT_ONCE):
        found += await store.get_many(records[at : at + _AT_ONCE], fresh=True)
    return found
