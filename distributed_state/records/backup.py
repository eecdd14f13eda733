"""The state of a record as one dict, and back. Law: everything is checked first, then all of it is one commit.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import MESSAGES, MOVES
from distributed_state.records.context import RecordContext
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import as_text, codec, field_ttl, message_ranges
from distributed_state.values.model import PHASE, Message

_PARTS = ("fields", "bytes", "phase", "expires", "messages")


async def export_state(context: RecordContext, *, messages: bool) -> dict[str, Any]:
    """Read the state of a record, with its messages if asked."""
    context.allow("read", MOVES, *([MESSAGES] if messages else []))
    entry = await context.read(fresh=True)
    if not messages:
        return export(entry, context.fields(entry), None)
    # One look at the record for both: a later one might show another conversation.
    entry = await read_path.load_whole(context.tiers, context.keys, entry)
    runs = message_ranges.segments(context.text, entry.fields)
    shown = (await shown_messages.shown_in(context.tiers, context.keys, entry, runs)).messages()
    return export(entry, context.fields(entry), shown)


async def restore_state(context: RecordContext, state: Mapping[str, Any]) -> int:
    """Replace the state of a record; the new version."""
    context.allow("write", None)
    changes = context.changes()
    changes.whole()
    clock = context.tiers.clock
    await clock.know()
    restore(changes, state, clock.now())
    return (await context.commit(changes.draft("restore"))).version


def export(entry: CachedRecord, fields: dict[str, Any], messages: list[Message] | None) -> dict[str, Any]:
    """Fields, bytes in base64, phase, deadlines, all but the first if there are any, messages if given: JSON only."""
    phase = entry.fields.get(PHASE)
    state: dict[str, Any] = {
        **as_text.apart(fields),
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
    }
    if entry.expires != field_ttl.NEVER:
        ends = {name: field_ttl.split(data)[0] for name, data in entry.fields.items() if field_ttl.marked(data)}
        state["expires"] = {codec.decode_key(name): deadline for name, deadline in ends.items()}
    if messages is not None:
        # With the times of their commits, which are not to be that of the one that restores them.
        dated = ({"timestamp": each.timestamp} if each.timestamp is not None else {} for each in messages)
        state["messages"] = [each.to_dict() | time for each, time in zip(messages, dated, strict=True)]
    return state


def restore(changes: Changes, state: Mapping[str, Any], now: float) -> None:
    """Make `changes` replace a record's state by this one. Raises one InvalidValue that names every bad entry."""
    if not isinstance(state, Mapping):
        raise InvalidValue(f"a state to restore is a mapping as of export_state, not a {type(state).__name__}")
    if "fields" not in state:
        state = {"fields": state}  # as get_all() returns it; an export always has its fields
    bad: list[str] = []

    def tried(place: str, step: Callable[..., Any], *given: Any) -> None:
        try:
            step(*given)
        except InvalidValue as error:
            bad.append(f"{place}: {error}")

    bad += [f"{part!r:.80}: none of {', '.join(_PARTS)}" for part in state if part not in _PARTS]
    fields = _part(state, "fields", Mapping, bad)
    try:
        fields = as_text.together(fields, _part(state, "bytes", Mapping, bad))
    except InvalidValue as error:
        bad.append(f"bytes: {error}")
    expires = _part(state, "expires", Mapping, bad)
    messages = _part(state, "messages", list, bad)
    changes.clear(messages="messages" in state)
    for key, value in fields.items():
        end = expires.get(key)
        if end is None:
            tried("fields", changes.set, key, value)
        elif isinstance(end, bool) or not isinstance(end, (int, float)) or not 0 <= end < 1e12:
            bad.append(f"expires[{key!r:.80}]: {end!r:.80} is no time in seconds since 1970")
        elif end > now:
            tried("fields", partial(changes.set, until=float(end)), key, value)
    bad += [f"expires[{key!r:.80}]: there is no such field" for key in expires if key not in fields]
    for at, message in enumerate(messages):
        tried(f"messages[{at}]", changes.append, message)
    if "phase" in state:
        tried("phase", changes.phase, state["phase"])
    if bad:
        raise InvalidValue(f"nothing was restored, {len(bad)} bad: " + "; ".join(bad))


def _part(state: Mapping[str, Any], part: str, kind: type, bad: list[str]) -> Any:
    found = state.get(part, kind() if kind is list else {})
    if isinstance(found, kind):
        return found
    bad.append(f"{part}: a {type(found).__name__}, not a {kind.__name__.lower()}")
    return [] if kind is list else {}
