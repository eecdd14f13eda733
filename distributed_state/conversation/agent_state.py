"""What an agent knows while it works. Law: values are frozen; a transition returns a new one.

All of it is JSON and comes back from JSON as it was. Where a value is kept is said in `agent_state_storage`.

Design: section 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    field_serializer,
)

from distributed_state.conversation.phases import DEFAULT
from distributed_state.conversation.working_memory import FROZEN, Text, ToolCall, WorkingMemory, now, text_of
from distributed_state.errors import InvalidTransition, InvalidValue
from distributed_state.values import chance, codec
from distributed_state.values.model import MAX_PHASE, Message, Ref


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    FUNCTION = "function"


class AgentPhase(StrEnum):
    """The phases of the machine DEFAULT. Each is equal to the text that is stored, and may stand wherever it may."""

    IDLE = "idle"
    PLANNING = "planning"
    EXECUTING = "executing"
    REFLECTING = "reflecting"
    WAITING_FEEDBACK = "waiting_feedback"
    DONE = "done"
    ERROR = "error"


# The methods of AgentState that follow the events of DEFAULT, for whoever asks what is possible.
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


@dataclass(frozen=True, slots=True)
class Saved:
    """What the store is known to hold of a state: the version to expect, and the values to write no second time."""

    record: str
    epoch: str
    version: int
    fields: dict[str, Any]
    phase: str | None
    history: tuple[Message, ...]
    notes: dict[str, Any]
    tool_calls: tuple[ToolCall, ...]


class AgentState(BaseModel):
    """All that an agent knows of one session at one moment. Times are in seconds since 1970.

    Each `to_...` follows an event of the machine DEFAULT, counts an iteration, and raises InvalidTransition where the
    table has no such event, naming the methods that are possible. Two states are equal if their fields are, wherever
    they are saved.
    """

    model_config = FROZEN

    session_id: Annotated[Text, AfterValidator(_as_id)] = Field(default_factory=lambda: chance.token_hex(16))
    phase: Text = Field(default="idle", min_length=1, max_length=MAX_PHASE)
    history: tuple[Message, ...] = ()
    memory: WorkingMemory = Field(default_factory=WorkingMemory)
    iteration: int = Field(default=0, ge=0)
    final_answer: Text | None = None
    error_message: Text | None = None
    created_at: float = Field(default_factory=now)
    updated_at: float = Field(default_factory=now)
    _saved: Saved | None = PrivateAttr(default=None)

    @classmethod
    def from_user_input(cls, text: str, session_id: str | None = None) -> Self:
        """A state that plans how to answer a user, under a new session id or the one given."""
        return (cls() if session_id is None else cls(session_id=Ref("session", session_id).id)).new_task(text)

    def new_task(self, text: str) -> Self:
        """Begin the next task of the conversation: the memory is empty but for the goal, iterations count from 0."""
        memory = WorkingMemory(goal=text_of(text, "the user's input"))
        begun = self._move("new_task", memory=memory, iteration=0, final_answer=None, error_message=None)
        return begun.with_messages(Message(role="user", content=text, timestamp=begun.updated_at))

    def to_executing(self) -> Self:
        """Work: the plan is ready, the user has answered, or reflection found that the plan still holds."""
        return self._move({"waiting_feedback": "input_received", "reflecting": "resume"}.get(self.phase, "plan_ready"))

    def to_reflecting(self) -> Self:
        """Look at what was found."""
        return self._move("reflect")

    def to_planning(self) -> Self:
        """Plan again."""
        return self._move("replan")

    def to_waiting(self) -> Self:
        """Wait for the user."""
        return self._move("needs_input")

    def to_done(self, answer: str) -> Self:
        """End with an answer, which becomes the last message."""
        done = self._move("task_complete", final_answer=text_of(answer, "an answer"))
        return done.with_messages(Message(role="assistant", content=answer, timestamp=done.updated_at))

    def to_error(self, message: str) -> Self:
        """End without an answer."""
        return self._move("fail", error_message=text_of(message, "an error message"))

    def record_observation(self, thought: str, call: ToolCall) -> Self:
        """Add a finished call to memory and to history, as the assistant's message that asks and the tool's answer."""
        moved = self._move("step_complete", memory=self.memory.record_tool_call(call))
        asked = Message(
            role="assistant",
            content=text_of(thought, "a thought") or None,
            tool_calls=[call.to_request()],
            timestamp=moved.updated_at,
        )
        answered = Message(
            role="tool", content=call.to_observation(), tool_call_id=call.call_id, timestamp=moved.updated_at
        )
        return moved.with_messages(asked, answered)

    def with_messages(self, *messages: Message | dict[str, Any]) -> Self:
        """The state with messages added to its history."""
        added = [each if isinstance(each, Message) else codec.as_message(each) for each in messages]
        return self.model_copy(update={"history": (*self.history, *added), "updated_at": now()})

    def with_memory(self, memory: WorkingMemory) -> Self:
        """The state with another memory: `state.with_memory(state.memory.note("city", "Oslo"))`."""
        if not isinstance(memory, WorkingMemory):
            raise InvalidValue(f"a memory is a WorkingMemory, not {memory!r:.80}")
        return self.model_copy(update={"memory": memory, "updated_at": now()})

    @property
    def saved(self) -> Saved | None:
        """What the store is known to hold of this state; None for one that was neither loaded nor saved."""
        return self._saved

    def with_saved(self, saved: Saved) -> Self:
        """The state, knowing what the store holds of it. For the store, which loads and saves it."""
        state: Self = self.model_copy()
        state.__pydantic_private__ = {"_saved": saved}
        return state

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
        # Only the fields that were given: a name that is absent and one that is null are stored differently.
        return [message.to_dict() for message in history]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentState) and self.__dict__ == other.__dict__


def valid(fields: dict[str, Any]) -> AgentState:
    """A state from its fields. Raises InvalidValue naming the wrong one."""
    try:
        return AgentState.model_validate(fields)
    except ValidationError as error:
        raise codec.refused(error, "state") from None  # pydantic repeats what it was given
