"""Pages of what was read. Law: as Agno's database in memory sorts and cuts, so does this."""

from __future__ import annotations

from collections.abc import Sequence
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


async def every(store: Any, scope: str, prefix: str = "", user: str | None = None) -> list[str]:
    """The ids of all records of a scope that begin so, the oldest first."""
    await store.archive()  # what is not archived is not listed
    found: list[Any] = []
    after = None
    while page := await store.sessions(scope=scope, user=user, limit=_PAGE, after=after):
        found += [info for info in page if not info.deleted and info.id.startswith(prefix)]
        after = page[-1].cursor
    return [info.id for info in sorted(found, key=lambda info: (info.created, info.id))]


async def in_pieces(store: Any, records: Sequence[Any]) -> list[dict[str, Any]]:
    """The fields of many records, some in each round trip: one answer for all would hold up others'."""
    found: list[dict[str, Any]] = []
    for at in range(0, len(records), _AT_ONCE):
        found += await store.get_many(records[at : at + _AT_ONCE])
    return found
