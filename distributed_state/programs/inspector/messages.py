"""Messages as a chat: who said what, which tools were called, what they gave. Law: unknown shapes are shown, not lost.

Design: section 28.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from distributed_state.programs.inspector.trees import Budget, Node, tree

_TEXT = 8000
_KNOWN = frozenset({"role", "content", "number", "timestamp", "name", "tool_calls", "tool_call_id"})
_NODES = 60  # of one message's values


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the interface, as a template shows it."""
    texts, parts = _content(message.get("content"))
    calls = [_call(each) for each in message.get("tool_calls") or [] if isinstance(each, dict)]
    rest = {name: value for name, value in message.items() if name not in _KNOWN}
    text = "\n".join(texts)
    return {
        "number": message.get("number"),
        "time": message.get("timestamp"),
        "role": str(message.get("role", "?"))[:40],
        "name": str(message.get("name") or message.get("tool_call_id") or "")[:200],
        "text": text[:_TEXT],
        "more": len(text) - _TEXT if len(text) > _TEXT else 0,
        "folded": message.get("role") == "tool",
        "calls": calls,
        "parts": parts,
        "rest": [tree(name, value, Budget(_NODES)) for name, value in rest.items()],
    }


def _content(content: Any) -> tuple[list[str], list[Node]]:
    """The texts of it, and what else there is."""
    if content is None:
        return [], []
    if isinstance(content, str):
        return [content], []
    texts, parts = [], []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = str(part.get("type", "part")) if isinstance(part, dict) else "part"
            parts.append(tree(kind, part, Budget(_NODES)))
    return texts, parts


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool; its arguments are mostly JSON in a text."""
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    assert isinstance(function, dict)
    arguments = function.get("arguments", function.get("input", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    named = str(function.get("name", "tool"))[:200]
    return {
        "name": named,
        "id": str(call.get("id", ""))[:200],
        "arguments": tree("arguments", arguments, Budget(_NODES)),
    }
