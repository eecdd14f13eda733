"""What concerns whole records and many of them: listing, deleting, export, purge.

Law: nothing is removed before it is archived, and nothing half of it.

Design: section 15.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.model import unescape
from distributed_state.values.results import SessionInfo

_EVENT = re.compile(r"\w+\.\d+\.\w+", re.ASCII)


async def listing(tiers: Tiers, scope: str, owner: str | None, limit: int, after: str | None) -> list[SessionInfo]:
    """One page of the index in SQL."""

    def page() -> Any:
        return tiers.cold.listing(scope, owner=owner, limit=limit, after=after)

    return [
        SessionInfo(
            id=unescape(row.id),
            user=None if row.owner is None else unescape(row.owner),
            version=row.version,
            created=row.created_ms / 1000,
            updated=row.updated_ms / 1000,
            deleted=row.deleted,
            cursor=row.cursor,
        )
        for row in await tiers.port.sql(page)
    ]


# An export: one JSON object a line. Bytes travel as text that keeps every one of them (surrogateescape).


# Removing


async def compact(tiers: Tiers, older_than: float, progress: Callable[[int], None] | None) -> dict[str, int]:
    """Pack old history in SQL into blocks."""
    shortest = tiers.settings.op_window
    # A write whose answer was lost may be repeated that long, and is looked for among the rows.
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= shortest:
        raise InvalidValue(f"older_than is a number of seconds from {shortest:g} (op_window) on, not {older_than!r}")
    await tiers.clock.know()
    before_ms = int((tiers.clock.now() - older_than) * 1000)
    records = changes = messages = 0
    after: int | None = 0
    while after is not None:
        done, after = await tiers.port.sql(partial(tiers.cold.compact, before_ms, after=after))
        records, changes, messages = records + done.records, changes + done.changes, messages + done.messages
        if progress:
            progress(records)
    return {"records": records, "changes": changes, "messages": messages}


async def purge(tiers: Tiers, older_than: float) -> dict[str, int]:
    """Remove old history and old events from SQL."""
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= 0:
        raise InvalidValue(f"older_than is a number of seconds from 0 on, not {older_than!r}")
    await tiers.archiver.drain()
    await tiers.clock.know()
    done = await tiers.port.sql(tiers.cold.purge, int((tiers.clock.now() - older_than) * 1000))
    return {"records": done.records, "changes": done.changes, "messages": done.messages, "events": done.events}
