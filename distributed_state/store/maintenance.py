"""What concerns whole records and many of them: listing, deleting, export, purge.

Law: nothing is removed before it is archived, and nothing half of it.

Design: section 15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from distributed_state.cold.values import Listed, Purged, Wanted
from distributed_state.conversation import window
from distributed_state.errors import InvalidValue
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.unarchived import unarchived
from distributed_state.values.model import Ref, checked_phase, escape, unescape
from distributed_state.values.results import SessionInfo

_EVENT = re.compile(r"\w+\.\d+\.\w+", re.ASCII)


async def listing(tiers: Tiers, wanted: Wanted, *, fresh: bool = False) -> list[SessionInfo]:
    """One page of the index in SQL; `fresh`: with what is not archived yet."""
    # The journals first: what is archived meanwhile is found in SQL as well, and counts once.
    late = await unarchived(tiers, wanted) if fresh else []
    return [shown(row) for row in await tiers.port.sql(tiers.cold.listing, wanted, late)]


def narrowed(
    wanted: Wanted, phase: Any, changed_since: Any, changed_before: Any, larger_than: Any
) -> Wanted:  # fmt: skip
    """The listing with these conditions too. Raises InvalidValue."""
    for name, value in ("changed_since", changed_since), ("changed_before", changed_before):
        if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1e12):
            raise InvalidValue(f"{name} is in seconds since 1970 or None, not {value!r:.80}")
    if larger_than is not None and (type(larger_than) is not int or not 0 <= larger_than < 2**62):
        raise InvalidValue(f"larger_than is an int from 0 on or None, not {larger_than!r:.80}")
    return replace(
        wanted,
        phase=None if phase is None else escape(checked_phase(phase)),
        changed_from_ms=None if changed_since is None else math.ceil(changed_since * 1000),
        changed_to_ms=None if changed_before is None else math.ceil(changed_before * 1000),
        size=None if larger_than is None else larger_than + 1,
    )


def shown(row: Listed) -> SessionInfo:
    """A row of the index as users see it."""
    return SessionInfo(
        id=unescape(row.id),
        user=None if row.owner is None else unescape(row.owner),
        version=row.version,
        created=row.created_ms / 1000,
        updated=row.updated_ms / 1000,
        deleted=row.deleted,
        cursor=row.cursor,
        phase=None if row.phase is None else unescape(row.phase),
        size=row.size,
    )


# Removing


async def compact(tiers: Tiers, older_than: float, progress: Callable[[int], None] | None) -> dict[str, int]:
    """Pack old history in SQL into blocks."""
    require_age(older_than, tiers.settings.op_window)
    await tiers.clock.know()
    before_ms = _before_ms(tiers, older_than)
    records = changes = messages = 0
    after: int | None = 0
    while after is not None:
        done, after = await tiers.port.sql(partial(tiers.cold.compact, before_ms, after=after))
        records, changes, messages = records + done.records, changes + done.changes, messages + done.messages
        if progress:
            progress(records)
    return {"records": records, "changes": changes, "messages": messages}


def _before_ms(tiers: Tiers, age: float) -> int:
    """When what has this age by now was written; nothing is older than the clock, however large the number is."""
    now = tiers.clock.now()
    return int((now - min(age, now)) * 1000)


def require_age(older_than: Any, shortest: float) -> None:
    """Raise InvalidValue unless history of this age may be packed.

    A write whose answer was lost may be repeated for `op_window`, and is looked for among the rows.
    """
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= shortest:
        raise InvalidValue(f"older_than is a number of seconds from {shortest:g} (op_window) on, not {older_than!r}")


async def purge(
    store: StoreContext,
    older_than: float | None,
    keep_changes: int | None,
    messages_older_than: float | None,
    keep_messages: int | None,
    events_older_than: float | None,
    branches_older_than: float | None,
) -> dict[str, int]:
    """Remove old history and old events from SQL."""
    ages = {
        "older_than": older_than,
        "messages_older_than": messages_older_than,
        "events_older_than": events_older_than,
        "branches_older_than": branches_older_than,
    }
    counts = {"keep_changes": keep_changes, "keep_messages": keep_messages}
    require_sense(ages, counts)
    tiers = store.tiers()
    await tiers.archiver.drain()
    await tiers.clock.know()
    before = {name: None if age is None else _before_ms(tiers, age) for name, age in ages.items()}
    left_out = 0
    if keep_messages is not None or messages_older_than is not None:
        left_out = await _leave_out(store, keep_messages, before["messages_older_than"])
        await tiers.archiver.drain()
    purging = partial(
        tiers.cold.purge,
        before["older_than"] or 0,
        keep=keep_changes,
        events_before_ms=before["events_older_than"],
        branches_before_ms=before["branches_older_than"],
    )
    done = await tiers.port.sql(purging)
    return counted(done, left_out)


def counted(done: Purged, left_out: int) -> dict[str, int]:
    """What a purge did, as its caller is told."""
    return {
        "records": done.records,
        "changes": done.changes,
        "messages": done.messages,
        "events": done.events,
        "left_out": left_out,
    }


def require_sense(ages: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Raise InvalidValue unless these say what is to be purged."""
    for name, age in ages.items():
        if age is not None and (isinstance(age, bool) or not isinstance(age, (int, float)) or not age >= 0):
            raise InvalidValue(f"{name} is a number of seconds from 0 on, not {age!r}")
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise InvalidValue(f"{name} is an int from 1 on, not {count!r}")
    if all(each is None for each in (*ages.values(), *counts.values())):
        raise InvalidValue(f"purge takes at least one of {', '.join([*ages, *counts])}")


async def _leave_out(store: StoreContext, keep: int | None, before_ms: int | None) -> int:
    """Let conversations show no more than that; how many messages they show no more."""
    tiers = store.tiers()
    left_out = 0
    after: int | None = 0
    while after is not None:
        names, after = await tiers.port.sql(tiers.cold.overfull, keep, before_ms, after)
        for name in names:
            left_out += await window.leave_out(RecordContext(store, Ref.parse(name)), keep, before_ms)
    return left_out
