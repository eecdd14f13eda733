"""JSON values as trees to unfold. Law: a page shows so many nodes and letters of what users wrote, however much it is.

Design: section 28.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_NODES = 400
_TEXT = 4000  # characters of one value


@dataclass(slots=True)
class Node:
    """A value under its name; `more` says how much of it is left out."""

    name: str
    kind: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    more: str = ""


class Budget:
    """How many nodes may still be shown."""

    def __init__(self, nodes: int = _NODES) -> None:
        self.left = nodes


def tree(name: str, value: Any, budget: Budget) -> Node:
    """A value and what is in it, as far as the budget goes."""
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
        return Node(name, "text", value[:_TEXT], more=_left(value))
    return Node(name, "value", json.dumps(value)[:_TEXT])


def trees(values: dict[str, Any], encoded: dict[str, str] | None = None) -> list[Node]:
    """Fields, and those that are bytes, which come in base64."""
    budget = Budget()
    found = list[Node]()
    for name, value in sorted(values.items()):
        if budget.left <= 0:
            found.append(Node("", "more", f"{len(values) - len(found)} more fields"))
            break
        found.append(tree(name, value, budget))
    for name, text in sorted((encoded or {}).items()):
        found.append(Node(name, "bytes", text[:200], more=_left(text, 200)))
    return found


def _left(text: str, most: int = _TEXT) -> str:
    return f"{len(text) - most} more characters" if len(text) > most else ""
