"""What an agent notes down for one task: goal, plan, notes, and the tools that it called. Law: values are frozen.

All of it is JSON and comes back from JSON as it was.

Design: section 13.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, Strict

from distributed_state.errors import InvalidValue
from distributed_state.values import chance, codec
from distributed_state.values.model import Message


def as_json(value: Any) -> Any:
    """The value, if it can be stored. Raises InvalidValue."""
    codec.encode(value)
    return value


def now() -> float:
    """Seconds since 1970, to be shown; nothing is decided by it."""
    return datetime.now(UTC).timestamp()


def text_of(value: Any, name: str) -> str:
    """The value, if it is a text. Raises InvalidValue."""
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is a str, not {value!r:.80}")
    return value


Json = Annotated[Any, AfterValidator(as_json)]
Text = Annotated[str, Strict()]  # pydantic would make text of bytes
FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ToolCall(BaseModel):
    """One call of a tool and what came of it. `result` is any JSON value; `timestamp` is in seconds since 1970."""

    model_config = FROZEN

    call_id: Text = Field(default_factory=lambda: f"call_{chance.token_hex(16)}", min_length=1)
    tool_name: Text = Field(min_length=1)
    arguments: Annotated[dict[str, Any], AfterValidator(as_json)] = Field(default_factory=dict)
    result: Json = None
    error: Text | None = None
    duration_ms: float | None = None
    timestamp: float = Field(default_factory=now)

    @property
    def succeeded(self) -> bool:
        """Whether the tool returned."""
        return self.error is None

    def to_observation(self) -> str:
        """What the model sees: the result as text or JSON, or the error."""
        if self.error is not None:
            return f"[Tool Error] {self.tool_name} failed: {self.error}"
        if self.result is None:
            return f"{self.tool_name} returned nothing"
        return self.result if isinstance(self.result, str) else codec.encode(self.result).decode().strip()

    def to_request(self) -> dict[str, Any]:
        """The call as an assistant message's `tool_calls` holds it, in the OpenAI chat format."""
        arguments = codec.encode(self.arguments).decode().strip()
        return {"id": self.call_id, "type": "function", "function": {"name": self.tool_name, "arguments": arguments}}

    def to_message(self) -> Message:
        """The answer to the model, a tool message; what the call was, its duration and error are in the metadata."""
        known = {"tool_name": self.tool_name, "arguments": self.arguments, "error": self.error}
        failed = {} if self.succeeded else {"is_error": True}  # what to_anthropic and to_langchain show the model
        return Message(
            role="tool",
            tool_call_id=self.call_id,
            content=self.to_observation(),
            timestamp=self.timestamp,
            metadata={"tool_call": {**known, "duration_ms": self.duration_ms}, **failed},
        )


class WorkingMemory(BaseModel):
    """The notepad of one task: its goal (or `current_goal`), the plan, what is done, notes, and the tools called."""

    model_config = FROZEN

    goal: Text = Field(default="", validation_alias=AliasChoices("goal", "current_goal"))
    plan_steps: tuple[Text, ...] = ()
    completed_steps: tuple[Text, ...] = ()
    notes: Annotated[dict[str, Any], AfterValidator(as_json)] = Field(default_factory=dict)
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def current_goal(self) -> str:
        """The goal."""
        return self.goal

    def plan(self, *steps: str) -> Self:
        """The memory with a new plan, nothing of which is done."""
        for step in steps:
            text_of(step, "a step")
        return self.model_copy(update={"plan_steps": steps, "completed_steps": ()})

    def complete(self, step: str) -> Self:
        """The memory with a step done. Raises InvalidValue if it is not pending."""
        if step not in self.pending_steps():
            raise InvalidValue(f"step {step!r:.80} is not pending; pending are {list(self.pending_steps())!r:.200}")
        return self.model_copy(update={"completed_steps": (*self.completed_steps, step)})

    def pending_steps(self) -> tuple[str, ...]:
        """The steps of the plan that are left, in order. A step planned twice is to be completed twice."""
        done = Counter(self.completed_steps)
        done.subtract(self.plan_steps)
        left = []
        for step in reversed(self.plan_steps):
            if done[step] < 0:
                done[step] += 1
                left.append(step)
        return tuple(reversed(left))

    def note(self, key: str, value: Any) -> Self:
        """The memory with a note, any JSON value, added or replaced."""
        codec.encode(value, f"note {text_of(key, 'the name of a note')!r:.80}")
        return self.model_copy(update={"notes": {**self.notes, key: value}})

    def record_tool_call(self, call: ToolCall) -> Self:
        """The memory with one more call."""
        if not isinstance(call, ToolCall):
            raise InvalidValue(f"a tool call is a ToolCall, not {call!r:.80}")
        return self.model_copy(update={"tool_calls": (*self.tool_calls, call)})
