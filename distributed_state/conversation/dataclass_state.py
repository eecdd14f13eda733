"""The state of an agent in a dataclass of its own. Law: a save is one commit of the fields that changed.

Each field is a field of the record, `agent.own.<name>`, checked and converted as by a schema. A field `phase` is the
record's phase as well, which wins when the state is read. The state notes the version that holds it, so that the next
save detects a conflict: `copy.copy` keeps that note, `dataclasses.replace` does not.

Design: section 13.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ValidationError

from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.schema import Schema, complaint_of
from distributed_state.tiers.changes import Changes
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PHASE

OWN = "agent.own."  # the fields of a dataclass, or of a subclass of AgentState
NOT_STORED: Any = object()
_NOTE = "_distributed_state_saved"
_SENT = "_distributed_state_sent"  # the fields of a save that is not acknowledged yet


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """The stored part of a state: the version that the next save expects, and the values that it need not write.

    `history`, `notes` and `tool_calls` are those of an AgentState.
    """

    record: str
    epoch: str
    version: int
    fields: dict[str, Any]
    phase: str | None
    history: tuple[Any, ...] = ()
    notes: dict[str, bytes] = dataclasses.field(default_factory=dict)
    tool_calls: tuple[Any, ...] = ()


def is_one(kind: Any) -> bool:
    """Whether this is a dataclass. Raises InvalidValue for one with slots, which cannot note its version."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel):
        return False
    if not kind.__dictoffset__:
        text = f"{kind.__name__}: a dataclass with slots=True cannot note the version that holds it; leave slots out"
        raise InvalidValue(f"{text}, or use schema={kind.__name__} with edit()")
    return True


def stored(entry: CachedRecord) -> dict[str, Any]:
    """The fields of the state in a record, with its phase; empty if there is none."""
    if entry.deleted or not any(name.startswith(OWN.encode()) for name in entry.fields):
        return {}
    found = {name[len(OWN) :]: value for name, value in entry.all().items() if name.startswith(OWN)}
    phase = _phase(entry)
    return found if phase is None or "phase" not in found else found | {"phase": phase}


def _phase(entry: CachedRecord) -> str | None:
    data = None if entry.deleted else entry.fields.get(PHASE)
    return None if data is None else data.decode("utf-8", "surrogatepass")


def read(keys: RecordKeys, entry: CachedRecord, kind: type[Any]) -> Any:
    """The state in a record, None without one. Raises CorruptState."""
    schema: Schema[Any] = Schema.of(kind)
    if not (found := stored(entry)):
        return None
    try:
        state = schema.parse(found)
    except ValidationError as error:
        field, complaint = complaint_of(error)
        text = f"{keys.ref.text[:200]}: holds no {kind.__name__} that can be read: {complaint}"
        raise CorruptState(text, field=OWN + field, data=entry.fields.get((OWN + field).encode(), b"")) from None
    return saved(state, keys, entry.epoch, entry.version)


def fields(state: Any) -> dict[str, Any]:
    """The fields of the record for a state. Raises InvalidValue."""
    return {OWN + name: value for name, value in Schema.of(type(state)).settle(state).items()}


def saved(state: Any, keys: RecordKeys, epoch: str, version: int) -> Any:
    """The state, with a note that this version of its record holds it."""
    # Not the fields of now: those that changed since they were sent are not stored.
    holds = vars(state).pop(_SENT, None) or fields(state)
    phase = holds.get(f"{OWN}phase")
    # Also in a frozen dataclass: the note is not part of its value.
    object.__setattr__(state, _NOTE, Saved(keys.ref.text, epoch, version, holds, phase))
    return state


def saved_of(state: Any) -> Saved | None:
    """The stored part of this state; None if it was neither loaded nor saved."""
    found: Saved | None = vars(state).get(_NOTE)
    return found


def base_in(keys: RecordKeys, entry: CachedRecord) -> Saved:
    """The base for a state without a note that follows the one in this record."""
    holds = {OWN + name: value for name, value in stored(entry).items()}
    return Saved(keys.ref.text, entry.epoch, entry.version, holds, _phase(entry))


def put(change: Changes, state: Any, base: Saved) -> None:
    """Put the differences from `base` into `change`."""
    sent = fields(state)
    object.__setattr__(state, _SENT, sent)
    for name, value in sent.items():
        if value != base.fields.get(name, NOT_STORED):
            change.set(name, value)
        if name == f"{OWN}phase" and isinstance(value, str) and value != base.phase:
            change.phase(value)
