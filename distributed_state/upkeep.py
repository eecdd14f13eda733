"""What concerns whole records and many of them: listing, deleting, export, purge.

Law: nothing is removed before it is archived, and nothing half of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distributed_state import lineage, record
from distributed_state.changes import Changes
from distributed_state.codec import Form
from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.keys import RecordKeys
from distributed_state.model import (
    DELETED,
    INITIALIZED,
    PHASE,
    SEGMENTS,
    Ref,
    Segment,
    SessionInfo,
    unescape,
    unpack,
)
from distributed_state.settings import Settings
from distributed_state.tiers import Tiers
from distributed_state.warm import Draft

FORMAT = "distributed_state/1"
_EVENT = re.compile(r"\w+\.\d+\.\w+", re.ASCII)


def tombstone(settings: Settings, form: Form, kind: str, *, expired: str = "") -> Draft:
    """The change that deletes a record, or ends a session that `expired` for this reason."""
    changes = Changes(settings, form)
    changes.clear(messages=True)
    changes.reserved(PHASE, None)
    changes.reserved(INITIALIZED, None)
    changes.reserved(DELETED, b"1")
    changes.lives(0, 0)
    if expired:
        changes.tell("session.expired", {"reason": expired})
    else:
        changes.tell("conversation.deleted", {})
    return changes.draft(kind)


async def delete(tiers: Tiers, names: RecordKeys, hooks: Sequence[Callable[[Ref], Awaitable[None]]]) -> int:
    """Delete a record that is there; the version of its tombstone. `hooks` are awaited if it was not deleted yet."""
    entry = await record.read(tiers, names, fresh=True)
    if entry.version == 0:
        raise NotFound(f"{names.ref.text[:200]}: there is nothing to delete")
    if not entry.deleted:
        for hook in tuple(hooks):
            await hook(names.ref)
    try:
        return (await record.commit(tiers, names, tombstone(tiers.settings, entry.form, "delete"))).version
    except Deleted:
        return (await record.read(tiers, names, fresh=True)).version


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


async def export(tiers: Tiers, names: RecordKeys) -> list[str]:
    """The record as lines: a header, its state before the first kept change, shared messages, then every change."""
    await record.reach(tiers, names)
    return await tiers.port.sql(_export, tiers, names.ref)


def _export(tiers: Tiers, ref: Ref) -> list[str]:
    cold = tiers.cold
    text = ref.text
    version = cold.version(text)
    if version is None:
        raise NotFound(f"{text[:200]}: there is nothing to export")
    entries = cold.history(text)
    base = None if entries and entries[0].version == 1 else cold.state_at(text, cold.oldest(text))
    if base is not None:
        entries = [entry for entry in entries if entry.version > base.version]
    runs: list[Segment] = [] if base is None else lineage.segments(text, base.fields)
    own: set[int] = set()
    for entry in entries:
        for kind, name, value in unpack(entry.data):
            if kind == b"m":
                own.add(int(name))
            elif kind == b"s" and name == SEGMENTS:
                runs += lineage.segments(text, {SEGMENTS: value})
    shared = {number: data for number, data in cold.messages(text, runs).items() if number not in own}
    head = {"format": FORMAT, "namespace": cold.namespace, "scope": ref.scope, "id": ref.id, "version": version}
    lines: list[dict[str, Any]] = [head | {"messages": len(shared), "changes": len(entries)}]
    if base is not None:
        lines.append(
            {"base": base.version, "epoch": base.epoch, "fields": {_text(k): _text(v) for k, v in base.fields.items()}}
        )
    lines += [{"message": number, "data": _text(data)} for number, data in sorted(shared.items())]
    for entry in entries:
        # Without its events: those belong to the stream of this store, and have their numbers in it.
        steps = (op for op in unpack(entry.data) if op.kind != b"e")
        ops = [[kind.decode(), _text(name), _text(value)] for kind, name, value in steps]
        lines.append(
            {
                "version": entry.version, "time_ms": entry.time_ms, "kind": entry.kind, "actor": unescape(entry.actor),
                "token": entry.token, "event": entry.event, "ops": ops,
            }
        )  # fmt: skip
    return [json.dumps(line, separators=(",", ":")) for line in lines]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# Removing


async def purge(tiers: Tiers, older_than: float) -> dict[str, int]:
    """Remove old history and old events from SQL."""
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= 0:
        raise InvalidValue(f"older_than is a number of seconds from 0 on, not {older_than!r}")
    await tiers.archiver.drain()
    await tiers.clock.know()
    done = await tiers.port.sql(tiers.cold.purge, int((tiers.clock.now() - older_than) * 1000))
    return {"records": done.records, "changes": done.changes, "messages": done.messages, "events": done.events}
