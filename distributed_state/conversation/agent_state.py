"""The state of an agent in a session: its memory for one task and its phase, and their form in a record.

Law: a save is one commit of the changes since the state was loaded. A state is frozen, but its memory changes in place,
and the states made from it share that memory: a note is not lost, whichever of them is saved.

The whole state is JSON, and is read back as it was written. The history is the record's messages, the phase is the
record's phase, and everything else is a field: `agent.goal`, `agent.note.<key>`, `agent.tool_call.<number>`. The cost
of a save therefore depends on the changes, not on the length of the conversation.

`TaskState` and `UserState` are schemas for typed records; any pydantic model of your own works the same way.

Design: section 13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from enum import StrEnum
from operator import is_
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    Strict,
    ValidationError,
    field_serializer,
)
from pydantic_core import PydanticSerializationError

from distributed_state.conversation import dataclass_state
from distributed_state.conversation.dataclass_state import NOT_STORED, OWN, Saved
from distributed_state.conversation.phases import DEFAULT
from distributed_state.errors import Conflict, CorruptState, InvalidTransition, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES, MOVES
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import chance, codec
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import MAX_PHASE, PHASE, Message, Ref, seconds_of


def as_json(value: Any) -> Any:
    """The value. Raises InvalidValue if it cannot be stored as JSON."""
    codec.encode(value)
    return value


def now() -> float:
    """Seconds since 1970, for display only; no decision depends on it."""
    return datetime.now(UTC).timestamp()


def text_of(value: Any, name: str) -> str:
    """The value. Raises InvalidValue if it is not text."""
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is a str, not {value!r:.80}")
    return value


Json = Annotated[Any, AfterValidator(as_json)]
Seconds = Annotated[float, BeforeValidator(seconds_of)]
Text = Annotated[str, Strict()]  # otherwise pydantic converts bytes to text
FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ToolCall(BaseModel):
    """One call of a tool and its result. `result` is any JSON value; `timestamp` is in seconds since 1970."""

    model_config = FROZEN

    call_id: Text = Field(default_factory=lambda: f"call_{chance.token_hex(16)}", min_length=1)
    tool_name: Text = Field(min_length=1)
    arguments: Annotated[dict[str, Any], AfterValidator(as_json)] = Field(default_factory=dict)
    result: Json = None
    error: Text | None = None
    duration_ms: float | None = None
    timestamp: Seconds = Field(default_factory=now)

    @property
    def succeeded(self) -> bool:
        """Whether the tool returned."""
        return self.error is None

    def to_observation(self) -> str:
        """The text for the model: the result as text or JSON, or the error."""
        if self.error is not None:
            return f"[Tool Error] {self.tool_name} failed: {self.error}"
        if self.result is None:
            return f"{self.tool_name} returned nothing"
        return self.result if isinstance(self.result, str) else codec.encode(self.result).decode().strip()

    def to_request(self) -> dict[str, Any]:
        """The entry for this call in an assistant message's `tool_calls`, in the OpenAI chat format."""
        arguments = codec.encode(self.arguments).decode().strip()
        return {"id": self.call_id, "type": "function", "function": {"name": self.tool_name, "arguments": arguments}}

    def to_message(self) -> Message:
        """The tool message that answers the model; its metadata has the call, its duration and its error."""
        known = {"tool_name": self.tool_name, "arguments": self.arguments, "error": self.error}
        failed = {} if self.succeeded else {"is_error": True}  # to_anthropic and to_langchain pass it to the model
        return Message(
            role="tool",
            tool_call_id=self.call_id,
            content=self.to_observation(),
            timestamp=self.timestamp,
            metadata={
                "call_id": self.call_id,
                "tool_name": self.tool_name,
                "tool_call": {**known, "duration_ms": self.duration_ms},
                **failed,
            },
        )


class WorkingMemory(BaseModel):
    """The notepad of one task: its goal (or `current_goal`), the plan, completed steps, notes, and tool calls.

    It changes in place. Its methods return it as well, so that they can be chained.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_assignment=True)

    goal: Text = Field(default="", validation_alias=AliasChoices("goal", "current_goal"))
    plan_steps: list[Text] = Field(default_factory=list)
    completed_steps: list[Text] = Field(default_factory=list)
    notes: Annotated[dict[str, Any], AfterValidator(as_json)] = Field(default_factory=dict)
    tool_calls: list[ToolCall] = Field(default_factory=list)

    @property
    def current_goal(self) -> str:
        """The goal."""
        return self.goal

    @current_goal.setter
    def current_goal(self, goal: str) -> None:
        self.goal = goal

    def plan(self, *steps: str) -> Self:
        """Begin a new plan, with no step completed."""
        self.plan_steps = [text_of(step, "a step") for step in steps]
        self.completed_steps = []
        return self

    def complete(self, step: str) -> Self:
        """Complete a step. Raises InvalidValue if it is not pending."""
        if step not in self.pending_steps():
            raise InvalidValue(f"step {step!r:.80} is not pending; pending are {self.pending_steps()!r:.200}")
        self.completed_steps.append(step)
        return self

    def pending_steps(self) -> list[str]:
        """The remaining steps of the plan, in order. A step planned twice must be completed twice."""
        done = Counter(self.completed_steps)
        done.subtract(self.plan_steps)
        left = []
        for step in reversed(self.plan_steps):
            if done[step] < 0:
                done[step] += 1
                left.append(step)
        return left[::-1]

    def note(self, key: str, value: Any) -> Self:
        """Add or replace a note, any JSON value."""
        codec.encode(value, f"note {text_of(key, 'the name of a note')!r:.80}")
        self.notes[key] = value
        return self

    def record_tool_call(self, call: ToolCall) -> Self:
        """Add a call."""
        self.tool_calls.append(_checked_call(call))
        return self


def _checked_call(call: Any) -> ToolCall:
    if not isinstance(call, ToolCall):
        raise InvalidValue(f"a tool call is a ToolCall, not {call!r:.80}")
    return call


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    FUNCTION = "function"


class AgentPhase(StrEnum):
    """The phases of the machine DEFAULT. Each equals its stored text, which can be used instead."""

    IDLE = "idle"
    PLANNING = "planning"
    EXECUTING = "executing"
    REFLECTING = "reflecting"
    WAITING_FEEDBACK = "waiting_feedback"
    DONE = "done"
    ERROR = "error"


# The methods of AgentState that follow the events of DEFAULT, for errors that name the possible ones.
_METHODS = {
    "new_task": "new_task",
    "plan_ready": "to_executing",
    "input_received": "to_executing",
    "resume": "to_executing",
    "step_complete": "record_observation",
    "reflect": "to_reflecting",
    "replan": "to_planning",
    "needs_input": "to_waiting",
    "task_complete": "to_done",
    "fail": "to_error",
}


def _as_id(value: str) -> str:
    return Ref("session", value).id


class AgentState(BaseModel):
    """Everything that an agent knows about one session at one moment. Times are in seconds since 1970.

    Each `to_...` follows an event of the machine DEFAULT, counts an iteration, and raises InvalidTransition where the
    table has no such event, naming the methods that are possible. Two states are equal if their fields are equal,
    wherever they are saved.
    """

    model_config = FROZEN

    session_id: Annotated[Text, AfterValidator(_as_id)] = Field(default_factory=lambda: chance.token_hex(16))
    phase: Text = Field(default="idle", min_length=1, max_length=MAX_PHASE)
    history: tuple[Message, ...] = ()
    memory: WorkingMemory = Field(default_factory=WorkingMemory)
    iteration: int = Field(default=0, ge=0)
    final_answer: Text | None = None
    error_message: Text | None = None
    created_at: Seconds = Field(default_factory=now)
    updated_at: Seconds = Field(default_factory=now)
    _saved: Saved | None = PrivateAttr(default=None)

    @classmethod
    def from_user_input(cls, user_input: str, session_id: str | None = None) -> Self:
        """A state in the phase of planning an answer to a user, with the given session id or a new one."""
        return (cls() if session_id is None else cls(session_id=Ref("session", session_id).id)).new_task(user_input)

    def new_task(self, text: str) -> Self:
        """Begin the next task of the conversation: the memory holds only the goal, and iterations start at 0.

        After a task that ended in phase "error", the history first gets its error, as a message of the assistant.
        """
        memory = WorkingMemory(goal=text_of(text, "the user's input"))
        begun = self._move("new_task", memory=memory, iteration=0, final_answer=None, error_message=None)
        asked = Message(role="user", content=text, timestamp=begun.updated_at)
        if self.phase != AgentPhase.ERROR or self.error_message is None:
            return begun.with_messages(asked)
        error, marked = f"[Error] {self.error_message}", {"is_error": True}
        failed = Message(role="assistant", content=error, metadata=marked, timestamp=self.updated_at)
        return begun.with_messages(failed, asked)

    def to_executing(self) -> Self:
        """Work: the plan is ready, the user has answered, or reflection confirmed the plan."""
        return self._move({"waiting_feedback": "input_received", "reflecting": "resume"}.get(self.phase, "plan_ready"))

    def to_reflecting(self) -> Self:
        """Reflect on the results."""
        return self._move("reflect")

    def to_planning(self) -> Self:
        """Plan again."""
        return self._move("replan")

    def to_waiting(self) -> Self:
        """Wait for the user."""
        return self._move("needs_input")

    def to_done(self, answer: str) -> Self:
        """End with an answer, which becomes the last message. Possible in every phase but "done", as `to_error` is."""
        done = self._move("task_complete", final_answer=text_of(answer, "an answer"))
        return done.with_messages(Message(role="assistant", content=answer, timestamp=done.updated_at))

    def to_error(self, message: str) -> Self:
        """End without an answer; `new_task` begins again."""
        return self._move("fail", error_message=text_of(message, "an error message"))

    def record_observation(self, thought: str, call: ToolCall) -> Self:
        """Add a finished call to the memory, and its message to the history.

        The thought is in the message's metadata. `formats` writes the assistant's message that made the call, with the
        thought as its text, unless the history has it.
        """
        moved = self._move("step_complete")
        observed = _checked_call(call).to_message().to_dict()
        observed["metadata"]["thought"] = text_of(thought, "a thought")
        moved.memory.record_tool_call(call)
        return moved.with_messages(observed)

    def with_messages(self, *messages: Message | dict[str, Any]) -> Self:
        """The state with messages added to its history."""
        added = [each if isinstance(each, Message) else codec.as_message(each) for each in messages]
        return self.model_copy(update={"history": (*self.history, *added), "updated_at": now()})

    def with_memory(self, memory: WorkingMemory) -> Self:
        """The state with another memory: `state.with_memory(WorkingMemory(goal="Oslo"))`."""
        if not isinstance(memory, WorkingMemory):
            raise InvalidValue(f"a memory is a WorkingMemory, not {memory!r:.80}")
        return self.model_copy(update={"memory": memory, "updated_at": now()})

    @property
    def saved(self) -> Saved | None:
        """The stored part of this state; None if it was neither loaded nor saved."""
        return self._saved

    def with_saved(self, saved: Saved) -> Self:
        """The state with a note of its stored part. Used by the store when it loads or saves a state."""
        state: Self = self.model_copy()
        state.mark_saved(saved)
        return state

    def mark_saved(self, saved: Saved | None) -> None:
        """Note the stored part of this state, which is not part of its value."""
        self.__pydantic_private__ = {"_saved": saved}

    def _move(self, event: str, **fields: Any) -> Self:
        try:
            phase = DEFAULT.next(self.phase, event)
        except InvalidTransition as error:
            possible = dict.fromkeys(_METHODS[each] for each in DEFAULT.events(self.phase))
            text = f"{error}; possible methods of the state: {', '.join(possible) or 'none'}"
            raise InvalidTransition(text, phase=self.phase, event=event) from None
        known = {"iteration": self.iteration + 1, "updated_at": now()}
        return self.model_copy(update={**known, **fields, "phase": phase})

    @field_serializer("history")
    def _as_given(self, history: tuple[Message, ...]) -> list[dict[str, Any]]:
        # Only the given fields: an absent field and a null field are stored differently.
        return [message.to_dict() for message in history]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentState) and self.__dict__ == other.__dict__


def valid(fields: dict[str, Any], kind: type[AgentState] = AgentState) -> AgentState:
    """A state from its fields. Raises InvalidValue, which names the wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise codec.refused(error, "state") from None  # pydantic's error repeats the input


_MEMORY = ("goal", "plan_steps", "completed_steps")
_STATE = ("iteration", "final_answer", "error_message", "created_at", "updated_at")
_NOTE = "agent.note."
_CALL = "agent.tool_call."
ERROR_MESSAGE = "agent.error_message"
_MARK = b"agent.created_at"  # a record without this field holds no state
_GO_ON = "go on from load_state(), or from the result of each save: state = session.save_state(state), in asyncio await"


# Loading


def checked_kind(kind: Any) -> type[AgentState]:
    """The class of states to load: AgentState or a subclass. Raises InvalidValue."""
    if isinstance(kind, type) and issubclass(kind, AgentState):
        return kind
    raise InvalidValue(
        f"a state is an AgentState, of a subclass, or of a dataclass, not {kind!r:.80}; schema= takes other classes"
    )


async def load(context: RecordContext, kind: type[Any] = AgentState) -> Any:
    """The last saved state, with the version that the next save expects."""
    if dataclass_state.is_one(kind):
        entry = await read_path.read(context.tiers, context.keys, fresh=True)
        return dataclass_state.read(context.keys, entry, kind)
    shown = await messages.chosen(context.tiers, context.keys, messages.Page(), fresh=True)
    return read(context.keys, shown.entry, shown.messages(), kind)


def shown(state: Any) -> tuple[str, ...]:
    """The fields of its record that a state shows; the policy is asked for them."""
    if state is None:
        return ()
    if dataclass_state.is_one(type(state)):
        return (*dataclass_state.fields(state), MOVES)
    notes = (_NOTE + key for key in state.memory.notes)
    calls = (f"{_CALL}{number}" for number in range(len(state.memory.tool_calls)))
    return (*_fields(state), *notes, *calls, MESSAGES, MOVES)


def read(keys: RecordKeys, entry: CachedRecord, history: list[Message], kind: type[Any] = AgentState) -> Any:
    """The state in a record, None without one. Raises CorruptState."""
    if dataclass_state.is_one(kind):
        return dataclass_state.read(keys, entry, kind)
    if entry.deleted or _MARK not in entry.fields:
        return None
    stored = entry.fields.get(PHASE)
    phase = DEFAULT.initial if stored is None else stored.decode("utf-8", "surrogatepass")
    fields = dict(sorted(entry.all().items()))  # Redis keeps no order, and prompts should not differ between workers
    calls = {name[len(_CALL) :]: value for name, value in fields.items() if name.startswith(_CALL)}
    memory = {name: fields[f"agent.{name}"] for name in _MEMORY if f"agent.{name}" in fields}
    memory["notes"] = {name[len(_NOTE) :]: value for name, value in fields.items() if name.startswith(_NOTE)}
    known = {name: fields[f"agent.{name}"] for name in _STATE if f"agent.{name}" in fields}
    known |= {name: fields[OWN + name] for name in _own_names(checked_kind(kind)) if OWN + name in fields}
    try:
        memory["tool_calls"] = [calls[str(number)] for number in range(len(calls))]
        found = valid({**known, "session_id": keys.ref.id, "phase": phase, "history": history, "memory": memory}, kind)
    except (KeyError, ValueError) as error:
        raise CorruptState(f"{keys.ref.text[:200]}: its agent state cannot be read: {error}") from error
    return saved(found, keys, entry.epoch, entry.version)


def saved(state: Any, keys: RecordKeys, epoch: str, version: int) -> Any:
    """The state with a note that this version of its record holds it."""
    if dataclass_state.is_one(type(state)):
        return dataclass_state.saved(state, keys, epoch, version)
    notes = {key: codec.encode(value) for key, value in state.memory.notes.items()}
    tool_calls = tuple(state.memory.tool_calls)
    return state.with_saved(
        Saved(keys.ref.text, epoch, version, _fields(state), state.phase, state.history, notes, tool_calls)
    )


def _fields(state: AgentState) -> dict[str, Any]:
    """The fields of the record that do not grow in number; None: absent."""
    memory = {"goal": state.memory.goal} | {name: list(getattr(state.memory, name)) for name in _MEMORY[1:]}
    rest = {name: getattr(state, name) for name in _STATE}
    own = {OWN + name: value for name, value in _own_fields(state).items()}
    return {f"agent.{name}": value for name, value in (memory | rest).items()} | own


def _own_names(kind: type[AgentState]) -> set[str]:
    return kind.model_fields.keys() - AgentState.model_fields.keys()


def _own_fields(state: AgentState) -> dict[str, Any]:
    """The fields of a subclass as JSON values. Raises InvalidValue."""
    if not (names := _own_names(type(state))):
        return {}
    try:
        return state.model_dump(mode="json", include=names, warnings=False)
    except (PydanticSerializationError, ValueError) as error:
        raise InvalidValue(f"{type(state).__name__}: cannot be written as JSON: {error}") from error


# Saving


def saved_of(state: Any) -> Saved | None:
    """The stored part of a state; None if it was neither loaded nor saved."""
    own = dataclass_state.is_one(type(state))
    found: Saved | None = dataclass_state.saved_of(state) if own else state.saved
    return found


def known(keys: RecordKeys, state: Any) -> tuple[Saved, bool]:
    """The part of a state that this record holds according to the state, and whether it holds no state yet."""
    if not dataclass_state.is_one(type(state)):
        checked_kind(type(state))
    if getattr(state, "session_id", keys.ref.id) != keys.ref.id:
        text = f"{keys.ref.text[:200]}: cannot hold the state of session {state.session_id!r:.80}"
        raise InvalidValue(f"{text}; make the state with session_id={keys.ref.id!r:.80}")
    base = saved_of(state)
    if base is None or base.record != keys.ref.text:
        return Saved(keys.ref.text, "", 0, {}, None, (), {}, ()), True
    return base, False


async def save(context: RecordContext, state: Any) -> Any:
    """Write the changes since the state was loaded, unless the record changed meanwhile; returns the saved state.

    The given state is marked as saved, too: a loop that drops the result may go on from it.
    """
    keys = context.keys
    base, new = known(keys, state)

    async def once() -> Any:
        nonlocal base
        assert base is not None
        change = context.changes()
        whole = put(change, state, base)
        if not change:
            return state
        try:
            done = await context.commit(change.draft("save_state", expected=base.version, epoch=base.epoch))
        except Conflict as conflict:
            if not new:
                raise Conflict(f"{conflict}; {_GO_ON}", version=conflict.version, found=conflict.found) from conflict
            shown = await messages.chosen(context.tiers, keys, messages.Page(), fresh=True)
            base = before(keys, shown.entry, shown.messages(), conflict)
            raise
        result = saved(whole, keys, done.epoch, done.version)
        if result is not state:
            state.mark_saved(result.saved)
        return result

    return await (write_path.until_no_conflict(context.tiers, once) if new else once())


def before(keys: RecordKeys, entry: CachedRecord, history: list[Message], cause: Exception | None = None) -> Saved:
    """The base for a new state. Raises InvalidValue if the record holds a state already."""
    if not entry.deleted and (_MARK in entry.fields or dataclass_state.stored(entry)):
        text = f"{keys.ref.text[:200]}: holds a state already, at version {entry.version}; {_GO_ON}"
        raise InvalidValue(text) from cause
    return Saved(keys.ref.text, entry.epoch, entry.version, {}, None, tuple(history), {}, ())


async def base_for(
    keys: RecordKeys, entry: CachedRecord, state: Any, history: Callable[[], Awaitable[list[Message]]]
) -> Saved:
    """The base for saving a state in a turn that began with this entry.

    Raises Conflict if the state has another base.
    """
    base, new = known(keys, state)
    if new and dataclass_state.is_one(type(state)):
        # dataclasses.replace loses the note. The turn holds the record, so the state follows the one it began with.
        return dataclass_state.base_in(keys, entry)
    if new:
        return before(keys, entry, await history())
    if (base.epoch, base.version) != (entry.epoch, entry.version):
        text = f"{keys.ref.text[:200]}: the state was loaded at version {base.version}, the turn at {entry.version}"
        raise Conflict(text, version=entry.version)
    return base


def put(change: Changes, state: Any, base: Saved) -> Any:
    """Put the differences from `base` into `change`; returns the state as it will be stored."""
    if dataclass_state.is_one(type(state)):
        dataclass_state.put(change, state, base)
        return state
    state, start, first = _checked(state, base)
    memory = state.memory
    for name, value in _fields(state).items():
        if value is None and base.fields.get(name) is not None and not name.startswith(OWN):
            change.delete(name)
        elif value != base.fields.get(name, NOT_STORED if name.startswith(OWN) else None):
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
    """The validated state, and the indexes from which its messages and its tool calls are new.

    Only new parts are checked: loaded and saved parts were checked before, and checking a long history takes time.
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
    own = _own_fields(state)
    checked = valid(
        {
            **state.__dict__,
            **own,
            "history": [each.to_dict() if isinstance(each, Message) else each for each in history[start:]],
            "memory": {
                **memory.__dict__,
                "notes": _new_notes(memory, base),
                "tool_calls": [dict(each.__dict__) if isinstance(each, ToolCall) else each for each in calls[first:]],
            },
        },
        type(state),
    )
    for name in own:
        if getattr(checked, name) != getattr(state, name):
            raise InvalidValue(f"state.{name}: this {type(getattr(state, name)).__name__} changes when written as JSON")
    # The given objects stay, so that the next save of this state compares by identity.
    calls = (*calls[:first], *map(_given_if_equal, calls[first:], checked.memory.tool_calls))
    added = tuple(map(_given_if_equal, history[start:], checked.history))
    memory = checked.memory.model_copy(update={"notes": dict(memory.notes), "tool_calls": [*calls]})
    return checked.model_copy(update={"history": base.history + added, "memory": memory}), start, first


def _given_if_equal(given: Any, checked: Any) -> Any:
    return given if given == checked else checked


def _new_notes(memory: WorkingMemory, base: Saved) -> dict[str, Any]:
    # Compared by their bytes: True equals 1, and a list in a note may have been changed in place.
    return {
        key: value
        for key, value in memory.notes.items()
        if codec.encode(value, f"state.memory.notes.{key}") != base.notes.get(key)
    }


class TaskState(BaseModel):
    """A task: `store.task("t1", schema=TaskState)`. Steps are counted, `data` has the results so far.

    `task_id` is for your own use: the id of the record is the argument of `store.task`.
    """

    task_id: str | None = None
    goal: str
    status: Literal["pending", "in_progress", "waiting", "done", "failed"] = "pending"
    steps_completed: int = Field(default=0, ge=0)
    steps_remaining: int = Field(default=0, ge=0)
    current_step: str | None = None
    data: dict[str, JsonValue] = Field(default_factory=dict)


class UserState(BaseModel):
    """A user's facts across all sessions: `store.user("u1", schema=UserState)`. `user_id` is for your own use."""

    user_id: str | None = None
    preferences: dict[str, JsonValue] = Field(default_factory=dict)
    history: dict[str, list[JsonValue]] = Field(default_factory=dict)
