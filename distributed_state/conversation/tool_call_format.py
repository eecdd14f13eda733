"""How tool calls and their results are written in stored messages. Law: what is malformed is not taken for a call.

Design: section 13.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from distributed_state.values.model import Message


class Call(NamedTuple):
    """One tool call: `arguments` is JSON text, as in the OpenAI chat format; `id` is '' if it has none."""

    id: str
    name: str
    arguments: str


def calls(message: Message) -> list[Call]:
    """The tool calls that a message makes, in `tool_calls` or as `tool_use` blocks of its content."""
    found = [_call(each) for each in _list(message.tool_calls)]
    found += [_call(block) for block in blocks(message, "tool_use")]
    return [call for call in found if call is not None]


def results(message: Message) -> list[str]:
    """The ids of the calls that a message answers."""
    found = [message.tool_call_id] if message.role == "tool" else []
    found += [block.get("tool_use_id") for block in blocks(message, "tool_result")]
    return [id for id in found if isinstance(id, str) and id]


def blocks(message: Message, kind: str) -> list[dict[str, Any]]:
    """The parts of one type in a message's content."""
    return [part for part in _list(message.content) if isinstance(part, dict) and part.get("type") == kind]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(raw: Any) -> Call | None:
    """From the shape of OpenAI, of Anthropic, of LangChain or of a ToolCall."""
    if not isinstance(raw, dict):
        return None
    function = raw.get("function")
    inner: dict[str, Any] = function if isinstance(function, dict) else raw
    name = inner.get("name") or inner.get("tool_name")
    if not isinstance(name, str):
        return None
    given: Any = next((inner[key] for key in ("arguments", "args", "input") if inner.get(key) is not None), {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return Call(str(raw.get("id") or raw.get("call_id") or ""), name, arguments)
