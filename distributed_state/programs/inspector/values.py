"""Users' values and messages, in the form for a template. Law: a page shows a bounded number of nodes and characters.

Messages of unknown shape are shown as well.

Design: section 28.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

_NODES = 400  # of all fields
_NODES_OF_MESSAGE = 60  # of one message's values
_LONGEST_VALUE = 4000  # characters
_LONGEST_MESSAGE = 8000
_KNOWN = frozenset({"role", "content", "number", "timestamp", "name", "tool_calls", "tool_call_id"})


# Values as trees to unfold


class Budget:
    """The number of nodes that may still be shown."""

    def __init__(self, nodes: int = _NODES) -> None:
        self.left = nodes


@dataclass(slots=True)
class Node:
    """A value with its name; `more` says how much of it is left out."""

    name: str
    kind: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    more: str = ""


def trees(values: dict[str, Any], encoded: dict[str, str] | None = None, budget: Budget | None = None) -> list[Node]:
    """Fields as trees; bytes fields come in base64, in `encoded`."""
    budget = budget or Budget()
    found = list[Node]()
    for name, value in sorted(values.items()):
        if budget.left <= 0:
            found.append(Node("", "more", f"{len(values) - len(found)} more fields"))
            break
        found.append(tree(name, value, budget))
    for name, text in sorted((encoded or {}).items()):
        found.append(Node(name, "bytes", text[:200], more=_left(text, 200)))
    return found


def tree(name: str, value: Any, budget: Budget) -> Node:
    """A value and its contents, within the budget."""
    budget.left -= 1
    if isinstance(value, dict | list):
        kind = "object" if isinstance(value, dict) else "list"
        node = Node(name, kind, f"{len(value)} in {'{}' if isinstance(value, dict) else '[]'}")
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            if budget.left <= 0:
                node.more = f"{len(value) - len(node.children)} more"
                break
            node.children.append(tree(str(key), part, budget))
        return node
    if isinstance(value, str):
        return Node(name, "text", value[:_LONGEST_VALUE], more=_left(value))
    return Node(name, "value", json.dumps(value)[:_LONGEST_VALUE])


def _left(text: str, most: int = _LONGEST_VALUE) -> str:
    return f"{len(text) - most} more characters" if len(text) > most else ""


# Messages as a chat


def message_shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the interface, in the form for a template."""
    texts, parts = _content(message.get("content"))
    calls = [_call(each) for each in message.get("tool_calls") or [] if isinstance(each, dict)]
    rest = {name: value for name, value in message.items() if name not in _KNOWN}
    text = "\n".join(texts)
    return {
        "number": message.get("number"),
        "time": message.get("timestamp"),
        "role": str(message.get("role", "?"))[:40],
        "name": str(message.get("name") or message.get("tool_call_id") or "")[:200],
        "text": text[:_LONGEST_MESSAGE],
        "more": len(text) - _LONGEST_MESSAGE if len(text) > _LONGEST_MESSAGE else 0,
        "folded": message.get("role") == "tool",
        "calls": calls,
        "parts": parts,
        "rest": [tree(name, value, Budget(_NODES_OF_MESSAGE)) for name, value in rest.items()],
    }


def _content(content: Any) -> tuple[list[str], list[Node]]:
    """The texts of a message's content, and its other parts."""
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
            parts.append(tree(kind, part, Budget(_NODES_OF_MESSAGE)))
    return texts, parts


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool; its arguments are usually JSON text."""
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
        "arguments": tree("arguments", arguments, Budget(_NODES_OF_MESSAGE)),
    }
