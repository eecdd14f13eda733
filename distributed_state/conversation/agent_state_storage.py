"""An agent's state in a session's record. Law: a save is one commit of what changed since the state was loaded.

The history is the record's messages, the phase is its phase, everything else are fields, and what grows is a field
each: `agent.goal`, `agent.note.<key>`, `agent.tool_call.<number>`. So a save costs what changed, however long the
conversation is.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import is_
from typing import Any

from distributed_state.conversation.agent_state import AgentState, Saved, valid
from distributed_state.conversation.phases import DEFAULT
from distributed_state.conversation.working_memory import ToolCall, WorkingMemory
from distributed_state.errors import Conflict, CorruptState, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES, MOVES
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PHASE, Message

_MEMORY = ("goal", "plan_steps", "completed_steps")
_STATE = ("iteration", "final_answer", "error_message", "created_at", "updated_at")
_NOTE = "agent.note."
_CALL = "agent.tool_call."
_MARK = b"agent.created_at"  # a record without it holds no state
_ABSENT: Any = object()


# Loading


async def load(context: RecordContext) -> AgentState | None:
    """The state as it was last saved, with the version that the next save expects."""
    entry, history = await messages.messages(context.tiers, context.keys, None, fresh=True)
    return read(context.keys, entry, history)


def shown(state: AgentState | None) -> tuple[str, ...]:
    """What a state shows of its record, as a policy is asked for it."""
    if state is None:
        return ()
    notes = (_NOTE + key for key in state.memory.notes)
    calls = (f"{_CALL}{number}" for number in range(len(state.memory.tool_calls)))
    return (*_fields(state), *notes, *calls, MESSAGES, MOVES)


def read(names: RecordKeys, entry: CachedRecord, history: list[Message]) -> AgentState | None:
    """The state that a record holds, None if it holds none. Raises CorruptState."""
    if entry.deleted or _MARK not in entry.fields:
        return None
    stored = entry.fields.get(PHASE)
    phase = DEFAULT.initial if stored is None else stored.decode("utf-8", "surrogatepass")
    fields = dict(sorted(entry.all().items()))  # Redis keeps no order, and a prompt should not differ between workers
    calls = {name[len(_CALL) :]: value for name, value in fields.items() if name.startswith(_CALL)}
    memory = {name: fields[f"agent.{name}"] for name in _MEMORY if f"agent.{name}" in fields}
    memory["notes"] = {name[len(_NOTE) :]: value for name, value in fields.items() if name.startswith(_NOTE)}
    known = {name: fields[f"agent.{name}"] for name in _STATE if f"agent.{name}" in fields}
    try:
        memory["tool_calls"] = [calls[str(number)] for number in range(len(calls))]
        found = valid({**known, "session_id": names.ref.id, "phase": phase, "history": history, "memory": memory})
    except (KeyError, ValueError) as error:
        raise CorruptState(f"{names.ref.text[:200]}: holds no agent state that can be read: {error}") from error
    return saved(found, names, entry.epoch, entry.version)


def saved(state: AgentState, names: RecordKeys, epoch: str, version: int) -> AgentState:
    """The state, knowing that this version of its record holds it."""
    notes = dict(state.memory.notes)
    tool_calls = state.memory.tool_calls
    return state.with_saved(
        Saved(names.ref.text, epoch, version, _fields(state), state.phase, state.history, notes, tool_calls)
    )


def _fields(state: AgentState) -> dict[str, Any]:
    """The fields of the record that do not grow in number; None: absent."""
    memory = {"goal": state.memory.goal} | {name: list(getattr(state.memory, name)) for name in _MEMORY[1:]}
    rest = {name: getattr(state, name) for name in _STATE}
    return {f"agent.{name}": value for name, value in (memory | rest).items()}


# Saving


def known(names: RecordKeys, state: AgentState) -> tuple[Saved, bool]:
    """What this record holds of a state, as far as the state knows, and whether that is nothing."""
    if type(state) is not AgentState:
        raise InvalidValue(f"save_state takes an AgentState, not {type(state).__name__}")
    if state.session_id != names.ref.id:
        raise InvalidValue(f"{names.ref.text[:200]}: cannot hold the state of session {state.session_id!r:.80}")
    base = state.saved
    if base is None or base.record != names.ref.text:
        return Saved(names.ref.text, "", 0, {}, None, (), {}, ()), True
    return base, False


async def save(context: RecordContext, state: AgentState) -> AgentState:
    """Write what changed since the state was loaded, if the record did not change meanwhile; the state as saved."""
    names = context.keys
    base, new = known(names, state)

    async def once() -> AgentState:
        nonlocal base
        assert base is not None
        change = context.changes()
        whole = put(change, state, base)
        if not change:
            return state
        draft = change.draft("save_state")
        draft.expected = base.version
        draft.epoch = base.epoch
        try:
            done = await context.commit(draft)
        except Conflict as conflict:
            if new:
                entry, history = await messages.messages(context.tiers, names, None, fresh=True)
                base = before(names, entry, history, conflict)
            raise
        return saved(whole, names, done.epoch, done.version)

    return await (write_path.until_no_conflict(context.tiers, once) if new else once())


def before(names: RecordKeys, entry: CachedRecord, history: list[Message], cause: Exception | None = None) -> Saved:
    """A record that a new state is to be saved in, which may exist but should hold no state yet."""
    if not entry.deleted and _MARK in entry.fields:
        text = f"{names.ref.text[:200]}: holds a state already, at version {entry.version}; go on from load_state()"
        raise InvalidValue(text) from cause
    return Saved(names.ref.text, entry.epoch, entry.version, {}, None, tuple(history), {}, ())


async def base_for(
    names: RecordKeys, entry: CachedRecord, state: AgentState, history: Callable[[], Awaitable[list[Message]]]
) -> Saved:
    """What a turn that began with this entry saves a state on. Raises Conflict if it was loaded from another one."""
    base, new = known(names, state)
    if new:
        return before(names, entry, await history())
    if (base.epoch, base.version) != (entry.epoch, entry.version):
        text = f"{names.ref.text[:200]}: the state was loaded at version {base.version}, the turn at {entry.version}"
        raise Conflict(text, version=entry.version)
    return base


def put(change: Changes, state: AgentState, base: Saved) -> AgentState:
    """Put what differs from `base` into `change`; the state that then is stored."""
    state, start, first = _checked(state, base)
    memory = state.memory
    for name, value in _fields(state).items():
        if value is None and base.fields.get(name) is not None:
            change.delete(name)
        elif value != base.fields.get(name):
            change.set(name, value)
    for key in sorted(base.notes.keys() - memory.notes.keys()):
        change.delete(_NOTE + key)
    for key, value in _new_notes(memory, base).items():
        change.set(_NOTE + key, value)
    for number, call in enumerate(memory.tool_calls[first:], first):
        change.set(f"{_CALL}{number}", dict(call.__dict__))
    for number in range(len(memory.tool_calls), len(base.tool_calls)):
        change.delete(f"{_CALL}{number}")
    for message in state.history[start:]:
        change.append(message)
    if state.phase != base.phase:
        change.phase(state.phase)
    return state


def _checked(state: AgentState, base: Saved) -> tuple[AgentState, int, int]:
    """The state, valid; where its new messages begin, and its new tool calls.

    Only what is new is looked into: what was loaded or saved was valid then, and a long history would cost time.
    """
    memory = state.memory
    if not isinstance(memory, WorkingMemory):
        raise InvalidValue(f"state.memory: is a WorkingMemory, not {memory!r:.80}")
    for name, many in ("history", state.history), ("memory.tool_calls", memory.tool_calls):
        if not isinstance(many, (tuple, list)):
            raise InvalidValue(f"state.{name}: is a tuple, not {many!r:.80}")
    if not isinstance(memory.notes, dict):
        raise InvalidValue(f"state.memory.notes: is a dict, not {memory.notes!r:.80}")
    history = tuple(state.history)
    start = len(base.history)
    # Equal tuples of the same objects are compared by identity, which takes microseconds for a thousand messages.
    if history[:start] != base.history:
        text = f"{base.record[:200]}: holds {start} messages, and the history does not begin with them"
        raise InvalidValue(f"{text}; messages are only ever added")
    calls = tuple(memory.tool_calls)
    first = len(base.tool_calls)
    if len(calls) < first or not all(map(is_, calls, base.tool_calls)):
        first = 0
    checked = valid(
        {
            **state.__dict__,
            "history": [each.to_dict() if isinstance(each, Message) else each for each in history[start:]],
            "memory": {
                **memory.__dict__,
                "notes": _new_notes(memory, base),
                "tool_calls": [dict(each.__dict__) if isinstance(each, ToolCall) else each for each in calls[first:]],
            },
        }
    )
    calls = calls[:first] + checked.memory.tool_calls
    memory = checked.memory.model_copy(update={"notes": dict(memory.notes), "tool_calls": calls})
    return checked.model_copy(update={"history": base.history + checked.history, "memory": memory}), start, first


def _new_notes(memory: WorkingMemory, base: Saved) -> dict[str, Any]:
    # By identity: True is equal to 1, but not the same note.
    return {key: value for key, value in memory.notes.items() if value is not base.notes.get(key, _ABSENT)}
