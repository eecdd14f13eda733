"""The audit trail: events in SQL. Law: a call finds all events published before it, or raises.

Design: section 12.
"""

from __future__ import annotations

import re
from typing import Any

from distributed_state.cold.values import Sought
from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.results import Event
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Happened
from distributed_state.values.model import Ref, is_storable, unescape

_CURSOR = re.compile(r"(\d{1,18})\.(\d{1,9})\.([\w-]{1,100})\.(\d{1,18})", re.ASCII)
_TYPE = re.compile(r"[\w.*-]{1,200}", re.ASCII)
_FOREVER_MS = 2**53


def about(conversation: str | None, subject: str | Ref | None) -> tuple[Ref | None, str | None]:
    """The record that the query is about (None for another subject), and the subject's text."""
    if conversation is not None:
        if subject is not None:
            raise InvalidValue(f"conversation {conversation!r:.80} or subject {subject!r:.80}: give one of them")
        subject = Ref("session", conversation)
    if subject is None or isinstance(subject, Ref):
        return subject, None if subject is None else subject.text
    if not isinstance(subject, str) or not is_storable(subject):
        raise InvalidValue(f"a subject is the name of a record, or a subject passed to `emit`, not {subject!r:.80}")
    try:
        return Ref.parse(subject), subject
    except InvalidValue:
        return None, subject


def sought(
    subject: str | None, type: str | None, since: float | None, until: float | None, limit: int, after: str | None
) -> Sought:
    """Check the arguments of a query."""
    if type is not None and not (isinstance(type, str) and _TYPE.fullmatch(type)):
        raise InvalidValue(
            f"a type is a name such as 'conversation.deleted' or a pattern such as 'conversation.*', not {type!r:.80}"
        )
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000:
        raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r:.80}")
    since_ms = _time_ms("since", since, 0)
    until_ms = _time_ms("until", until, _FOREVER_MS)
    if since_ms > until_ms:
        raise InvalidValue(f"since={since!r} is later than until={until!r}")
    place = None if after is None else _place(after)
    return Sought(subject, None if type == "*" else type, since_ms, until_ms, limit, place)


async def audit(tiers: Tiers, wanted: Sought) -> list[Event]:
    """The requested events, oldest first."""
    # All events of one subject are in one partition.
    await tiers.archiver.drain(None if wanted.subject is None else [tiers.keys.partition_of(wanted.subject)])
    return [event_of(tiers.codec_of(row.subject), row) for row in await tiers.port.sql(tiers.cold.audit, wanted)]


def _time_ms(name: str, seconds: float | None, otherwise: int) -> int:
    if seconds is None:
        return otherwise
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e12:
        raise InvalidValue(f"{name} is a time in seconds since 1970, not {seconds!r:.80}")
    return round(seconds * 1000)


def _place(cursor: Any) -> tuple[int, int, str, int]:
    if cursor == "oldest":
        return (0, 0, "", 0)
    parts = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if parts is None:
        raise InvalidValue(f"after is the cursor of an event or 'oldest', not {cursor!r:.80}")
    return int(parts[1]), int(parts[2]), parts[3], int(parts[4])


def event_of(record_codec: Codec, row: Happened) -> Event:
    """Convert an archived event to its public form."""
    data = codec.decode(record_codec.open_event(row.data, row.type, row.id), "data")
    if not isinstance(data, dict):
        raise CorruptState(f"event {row.id}: its data is not an object", field="data", data=row.data)
    return Event(
        id=row.id,
        type=row.type,
        subject=row.subject,
        time=row.time_ms / 1000,
        data=data,
        source=row.id.partition(".")[0],
        sequence=row.offset,
        epoch=row.epoch,
        partition=row.partition,
        version=row.version,
        actor=unescape(row.actor),
    )
