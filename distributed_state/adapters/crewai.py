"""The state of CrewAI's flows kept in a store: `MyFlow(persistence=DistributedFlowPersistence(store))`.

Law: a save is one commit, and writes only what changed since this object read or saved the flow.

| CrewAI | here |
|---|---|
| flow (the `id` of its state) | `store.session(id)` |
| key of its state | field `state/<key>` |
| method that saved it last | field `crewai` |
| pending feedback | field `pending`, and the tag `crewai=pending` |

A flow holds its state in memory and saves the whole of it after each method. So the persistence keeps what it read, and
writes the difference: two workers that change different keys do not undo each other. A flow whose state it has not read
replaces a stored one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, Field, PrivateAttr

from distributed_state import PRESENT, AsyncSession, AsyncStateStore, Conflict, Deleted, StateStore
from distributed_state.adapters.stores import difference, dumped, finish, lacking, named, open_store

try:
    from crewai.flow.async_feedback.types import PendingFeedbackContext
    from crewai.flow.persistence import FlowPersistence
except ImportError as error:
    raise lacking("crewai", error) from error

SAVED, PENDING, STATE = "crewai", "pending", "state/"
TAG = {"crewai": "pending"}
_FLOWS = 1000  # whose fields an object keeps


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Place:
    """The store, and the options of its sessions."""

    store: AsyncStateStore
    options: dict[str, Any]


_places: WeakValueDictionary[str, _Place] = WeakValueDictionary()


class DistributedFlowPersistence(FlowPersistence):
    """The state of flows that any worker can continue; replaces SQLiteFlowPersistence.

    Example::

        flow = Trip(persistence=DistributedFlowPersistence(store, user="ada"))
        flow.kickoff(inputs={"id": "trip-1"})
        assert store.session("trip-1").get("state/city") == "Oslo"

    `store` is an open StateStore or AsyncStateStore, which its owner closes. Pass it to a flow, to `@persist`, or to
    `set_flow_persistence_factory`. `options` are those of `store.session`: `user`, `idle`, `lifetime`, ... CrewAI
    reports an error of the store (`StateError`) as RuntimeError, with the first one as its cause.

    CrewAI creates a persistence again from its description, which has no store, when it restores a checkpoint. It then
    gets the store of the living object of this `name`, by default the newest one.
    """

    persistence_type: str = Field(default="DistributedFlowPersistence")
    name: str = Field(default="default")
    _place: _Place = PrivateAttr()
    _read: dict[str, dict[str, str]] = PrivateAttr(default_factory=dict)
    # Parallel methods of a flow save at the same time; each must compare with the state that the last one saved.
    _saving: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def __init__(self, store: StateStore | AsyncStateStore | None = None, /, **given: Any) -> None:
        fields = {name: given.pop(name) for name in type(self).model_fields if name in given}
        super().__init__(**fields)
        place = _places.get(self.name) if store is None else None
        self._place = place or _Place(open_store(store).aio, given)
        _places[self.name] = self._place

    def init_db(self) -> None:
        """Do nothing: the store is open."""

    def _session(self, flow_uuid: str) -> AsyncSession:
        session: AsyncSession = self._place.store.session(named(flow_uuid, "a flow's id"), **self._place.options)
        return session

    def save_state(self, flow_uuid: str, method_name: str, state_data: dict[str, Any] | BaseModel) -> None:
        """Save the state of a flow. A deleted one begins again, but a flow that was read before gets Deleted."""
        self._save(flow_uuid, method_name, state_data)

    def load_state(self, flow_uuid: str) -> dict[str, Any] | None:
        """Read the state of a flow from the server, None if there is none."""
        with self._saving:
            fields = finish(self._session(flow_uuid).get_all(fresh=True))
            if SAVED not in fields:
                self._keep(flow_uuid, {})  # what another worker begins meanwhile stays
                return None
            self._keep(flow_uuid, own(fields))
        return {name.removeprefix(STATE): value for name, value in fields.items() if name.startswith(STATE)}

    def save_pending_feedback(
        self, flow_uuid: str, context: PendingFeedbackContext, state_data: dict[str, Any] | BaseModel
    ) -> None:
        """Save the state and what the flow waits for in one commit. `store.sessions(tags=TAG)` finds all that wait."""
        pending = pending_of(_plain(context.to_dict()), _state(state_data))
        self._save(flow_uuid, context.method_name, state_data, pending, tag=TAG)

    def load_pending_feedback(self, flow_uuid: str) -> tuple[dict[str, Any], PendingFeedbackContext] | None:
        """Read the state and what the flow waits for, None if it does not wait."""
        if self.load_state(flow_uuid) is None:  # reads the state that the flow will change
            return None
        pending = finish(self._session(flow_uuid).get(PENDING))
        return None if pending is None else (pending["state"], PendingFeedbackContext.from_dict(pending["context"]))

    def clear_pending_feedback(self, flow_uuid: str) -> None:
        """Remove what the flow waits for, if it waits."""
        with suppress(Conflict, Deleted):
            finish(self._session(flow_uuid).write(delete=[PENDING], untag=TAG, expect={PENDING: PRESENT}))

    def _save(
        self, flow_uuid: str, method: str, state: Any, more: Mapping[str, Any] | None = None, **change: Any
    ) -> None:
        session = self._session(flow_uuid)
        with self._saving:
            fields = fields_of(_state(state))
            read = self._read.get(flow_uuid)
            stored = dumped(own(finish(session.get_all(fresh=True)))) if read is None else read
            changes = difference(fields, stored)
            changes["set"] |= {**saved_by(method), **(more or {})}
            finish(session.write(**changes, **change, revive=not read))
            self._keep(flow_uuid, fields)

    def _keep(self, flow_uuid: str, fields: dict[str, Any]) -> None:
        self._read.pop(flow_uuid, None)
        self._read[flow_uuid] = dumped(fields)
        if len(self._read) > _FLOWS:
            del self._read[next(iter(self._read))]


def fields_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that hold a flow's state."""
    return {STATE + key: value for key, value in state.items()}


def saved_by(method: str) -> dict[str, Any]:
    """The field without which a session is not a flow."""
    return {SAVED: {"method": method}}


def pending_of(context: Any, state: Any) -> dict[str, Any]:
    """The field with what a flow waits for."""
    return {PENDING: {"context": context, "state": state}}


def own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are keys of a flow's state."""
    return {name: value for name, value in fields.items() if name.startswith(STATE)}


def _state(given: dict[str, Any] | BaseModel) -> dict[str, Any]:
    if not isinstance(given, dict | BaseModel):
        raise ValueError(f"state_data must be either a Pydantic BaseModel or dict, got {type(given)}")
    found: dict[str, Any] = _plain(given)
    return found


def _plain(value: Any) -> Any:
    """The value as JSON values, as CrewAI's own persistence writes it."""
    return json.loads(json.dumps(value, default=_as_json))


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", fallback=str)
    if isinstance(value, set):
        return list(value)
    return value.isoformat() if isinstance(value, date) else str(value)
