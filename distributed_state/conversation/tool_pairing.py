"""Calls and results brought together before they are sent. Law: each call is followed by its result, nothing else is.

Every API refuses a whole conversation for one result without a call, or one call without a result.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_state.conversation.tool_call_format import Call, calls
from distributed_state.errors import InvalidValue
from distributed_state.values import codec
from distributed_state.values.model import Message

Orphans = Literal["repair", "refuse"]
NO_RESULT = "(no result was recorded for this call; it may or may not have had an effect)"


@dataclass(slots=True)
class _Step:
    """A message, and the calls it makes with their results as far as they are known."""

    message: Message
    place: int
    calls: list[Call]
    results: list[Message | None] = field(default_factory=list)


def paired(
    messages: Iterable[Message | dict[str, Any]], orphans: Orphans, safe: Callable[[str], str] = str
) -> list[Message]:
    """The messages with each call's result directly behind it, in the order of the calls, and ids used once.

    Calls come out as `tool_calls` in the OpenAI shape and results as messages of the role tool, however they were
    stored. "repair" gives a call without a result one that says so and leaves out a result without a call. `safe` makes
    of an id one that the receiver takes.
    """
    if orphans not in ("repair", "refuse"):
        raise InvalidValue(f"orphans is 'repair' or 'refuse', not {orphans!r:.80}")
    steps: list[_Step] = []
    waiting: list[tuple[str, _Step, int]] = []  # calls without a result, the newest last
    for place, given in enumerate(messages):
        message = given if isinstance(given, Message) else codec.as_message(given, f"messages[{place}]")
        if message.role is None:
            raise InvalidValue(f"messages[{place}]: has no role, so it cannot be sent to a model; leave it out")
        for each in plain(message):
            if each.role != "tool":
                step = _Step(each, place, calls(each))
                step.results = [None] * len(step.calls)
                steps.append(step)
                waiting += [(call.id, step, number) for number, call in enumerate(step.calls)]
                continue
            asked = next((one for one in reversed(waiting) if one[0] == (each.tool_call_id or "")), None)
            if asked is not None:
                waiting.remove(asked)
                asked[1].results[asked[2]] = each
            elif orphans == "refuse":
                raise InvalidValue(f"messages[{place}]: a result of the call {each.tool_call_id!r}, which is not there")
    if waiting and orphans == "refuse":
        name, step, _ = waiting[0]
        raise InvalidValue(f"messages[{step.place}]: the call {name!r} has no result")
    used: set[str] = set()
    return [message for step in steps for message in _written(step, used, safe)]


def _written(step: _Step, used: set[str], safe: Callable[[str], str]) -> list[Message]:
    if not step.calls:
        return [step.message]
    renamed = [call._replace(id=_unused(safe(call.id) or "call", used)) for call in step.calls]
    written = [changed(step.message, tool_calls=[as_openai(call) for call in renamed])]
    for call, result in zip(renamed, step.results, strict=True):
        found = result or Message(role="tool", content=NO_RESULT)
        written.append(changed(found, tool_call_id=call.id))
    return written


def _unused(id: str, used: set[str]) -> str:
    """Some models count their calls anew in each turn; some APIs refuse an id that was used before."""
    name = id
    number = 1
    while name in used:
        number += 1
        name = f"{id}-{number}"
    used.add(name)
    return name


def as_openai(call: Call) -> dict[str, Any]:
    """A call as OpenAI writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def changed(message: Message, **fields: Any) -> Message:
    """The message with other fields."""
    return Message.model_construct(**{**message.to_dict(), **fields})


def plain(message: Message) -> list[Message]:
    """The message without blocks of calls and results in its content, and without the older `function_call`."""
    given = message.to_dict()
    old = given.get("function_call")
    parts = message.content if isinstance(message.content, list) else []
    if message.role == "function":
        # It names its function instead of a call; there was only one at a time.
        return [changed(message, role="tool", tool_call_id=f"function-{message.name}")]
    if message.role == "assistant" and isinstance(old, dict) and not message.tool_calls:
        call = {"id": f"function-{old.get('name')}", "type": "function", "function": old}
        return [changed(message, tool_calls=[call], function_call=None)]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    if not kinds & {"tool_use", "tool_result"}:
        return [message]
    rest = [part for part in parts if not (isinstance(part, dict) and part.get("type") in ("tool_use", "tool_result"))]
    found = [_result(part) for part in parts if isinstance(part, dict) and part.get("type") == "tool_result"]
    made = [as_openai(call) for call in calls(message)]
    if rest or made or not found:
        fields: dict[str, Any] = {"content": text_of(rest)}
        found.append(changed(message, **fields, tool_calls=made) if made else changed(message, **fields))
    return found


def _result(block: dict[str, Any]) -> Message:
    fields: dict[str, Any] = {"content": text_of(block.get("content") or "")}
    if block.get("is_error"):
        fields["metadata"] = {"is_error": True}
    return codec.as_message({"role": "tool", "tool_call_id": block.get("tool_use_id"), **fields})


def text_of(content: Any) -> Any:
    """Content as text if it is one part of text alone, None if it is an empty list, else as it is."""
    if isinstance(content, list):
        if not content:
            return None
        if len(content) == 1 and isinstance(content[0], dict) and content[0].keys() == {"type", "text"}:
            return content[0]["text"]
    return content
