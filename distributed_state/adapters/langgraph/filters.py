"""What `search` and `list_namespaces` choose by. Law: as LangGraph's own stores compare.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_state.adapters.langgraph.memories import Namespace


def compare(value: Any, wanted: Any) -> bool:
    """Whether a value is as a filter wants it, as LangGraph's stores compare."""
    if isinstance(wanted, dict):
        if any(name.startswith("$") for name in wanted):
            return all(_operator(value, name, other) for name, other in wanted.items())
        return isinstance(value, dict) and all(compare(value.get(name), other) for name, other in wanted.items())
    if isinstance(wanted, list | tuple):
        same = isinstance(value, list | tuple) and len(value) == len(wanted)
        return same and all(compare(*pair) for pair in zip(value, wanted, strict=True))
    return bool(value == wanted)


def _operator(value: Any, name: str, other: Any) -> bool:
    if name in ("$eq", "$ne"):
        return bool(value == other) is (name == "$eq")
    compared = {"$gt": "__gt__", "$gte": "__ge__", "$lt": "__lt__", "$lte": "__le__"}
    if name not in compared:
        raise ValueError(f"Unsupported operator: {name}")
    try:
        return bool(getattr(float(value), compared[name])(float(other)))
    except (TypeError, ValueError):
        return False


def matches(path: Sequence[str], namespace: Namespace, *, suffix: bool) -> bool:
    """Whether a namespace begins, or ends, with a path, in which "*" is any label."""
    if len(namespace) < len(path):
        return False
    part = namespace[len(namespace) - len(path) :] if suffix else namespace[: len(path)]
    return all(wanted in ("*", label) for wanted, label in zip(path, part, strict=True))
