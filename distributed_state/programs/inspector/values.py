"""Users' values and messages, in the form for a template. Law: a page shows a bounded number of nodes and characters.

Messages of unknown shape are shown as well; calls of tools are known as OpenAI's and Anthropic's interfaces have them.

Design: section 28.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markupsafe import Markup

_NODES = 400  # of all fields
_NODES_OF_MESSAGE = 60  # of one message's values
_LONGEST_VALUE = 4000  # characters
_AROUND = 60  # characters before and after a difference
_ABSENT = object()
_LONGEST_MESSAGE = 8000
_LONGEST_MARKDOWN = 4000
_LONGEST_RESULT = 2**16  # of JSON that is shown as a tree
_WORDS = 32  # of a search that are marked
_BRIEF, _LONGEST_BRIEF = 4, 120  # arguments of a call on its line, and characters
_KNOWN = frozenset({"role", "content", "number", "timestamp", "name", "tool_calls", "tool_call_id"})


# Values as trees to unfold


class Budget:
    """The number of nodes that may still be shown."""

    def __init__(self, nodes: int = _NODES) -> None:
        self.left = nodes


@dataclass(slots=True)
class Node:
    """A value with its name; `more` says how much of it is left out.

    Of two values that are compared, `mark` is "added" or "removed", and `changed` has the text that was there, the text
    that is there, and the text after both.
    """

    name: str
    kind: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    more: str = ""
    mark: str = ""
    changed: tuple[str, str, str] = ("", "", "")


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


# Two values compared


def compared(had: dict[str, Any], has: dict[str, Any]) -> list[Node]:
    """The fields that differ, as one tree with marks; values that are the same on both sides are only counted."""
    return _compared_parts(
        [(name, had.get(name, _ABSENT), has.get(name, _ABSENT)) for name in sorted({*had, *has})], Budget()
    )


def _compared_parts(parts: Iterable[tuple[str, Any, Any]], budget: Budget) -> list[Node]:
    found, same = list[Node](), 0
    for name, old, new in parts:
        if _same(old, new):
            same += 1
        elif budget.left <= 0:
            return [*found, Node("", "more", "more differences")]
        else:
            found.append(_compared(name, old, new, budget))
    return [*found, Node("", "more", f"{same} unchanged")] if same else found


def _compared(name: str, old: Any, new: Any, budget: Budget) -> Node:
    if old is _ABSENT or new is _ABSENT:
        node = tree(name, old if new is _ABSENT else new, budget)
        node.mark = "removed" if new is _ABSENT else "added"
        return node
    budget.left -= 1
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys((*old, *new))
        parts = [(each, old.get(each, _ABSENT), new.get(each, _ABSENT)) for each in names]
        return Node(name, "object", children=_compared_parts(parts, budget))
    if isinstance(old, list) and isinstance(new, list):
        return Node(name, "list", children=_compared_parts(_compared_lists(old, new), budget))
    one, other = (value if isinstance(value, str) else json.dumps(value) for value in (old, new))
    start, end = _common(one, other) if isinstance(old, str) and isinstance(new, str) else (0, 0)
    # Whole words are compared: the common parts end where one does.
    start = one.rfind(" ", 0, start) + 1
    space = one.find(" ", len(one) - end)
    end = len(one) - space if space >= 0 else 0
    was, now = (text[start : len(text) - end][:_LONGEST_VALUE] for text in (one, other))
    return Node(name, "changed", _left_of(one[:start]), changed=(was, now, one[len(one) - end :][:_AROUND]))


def _compared_lists(old: list[Any], new: list[Any]) -> list[tuple[str, Any, Any]]:
    """The parts of two lists, side by side from the front and from the back, so that inserted parts stand alone."""
    start, end = _common(old, new)
    middle = zip_longest(old[start : len(old) - end], new[start : len(new) - end], fillvalue=_ABSENT)
    same = [("", value, value) for value in old[:start] + old[len(old) - end :]]
    return [(str(start + at), one, other) for at, (one, other) in enumerate(middle)] + same


def _common(one: Sequence[Any], other: Sequence[Any]) -> tuple[int, int]:
    """How many parts are the same at the beginning, and at the end of the rest."""
    most = min(len(one), len(other))
    start = bisect_left(range(most), True, key=lambda at: not _same(one[: at + 1], other[: at + 1]))
    end = bisect_left(range(most - start), True, key=lambda at: not _same(one[-1 - at :], other[-1 - at :]))
    return start, end


def _same(one: Any, other: Any) -> bool:
    # 1, 1.0 and true are equal in Python, but different values.
    return bool(one == other) and repr(one) == repr(other)


def _left_of(text: str) -> str:
    return text if len(text) <= _AROUND else f"…{text[-_AROUND:]}"


# Messages as a chat


def chat(messages: Iterable[dict[str, Any]], new: int = 0) -> list[dict[str, Any]]:
    """Messages of the interface, in the form for a template: the result of a tool is shown with its call.

    The last `new` of them are marked as new.
    """
    shown, waiting = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    given = list(messages)
    for at, message in enumerate(given):
        each = message_shown(message) | {"new": len(given) - at <= new}
        alone = []
        for result in each["results"]:
            call = waiting.pop(result["id"], None)
            if call is None:
                alone.append(result)
            else:
                call["result"] = result
        waiting |= {call["id"]: call for call in each["calls"]}
        if alone or len(alone) == len(each["results"]) or any(each[name] for name in ("text", "calls", "parts")):
            shown.append(each | {"results": alone})
    return shown


def message_shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the interface, in the form for a template."""
    texts, others = _content(message.get("content"))
    calls = [_call(each) for each in message.get("tool_calls") or [] if isinstance(each, dict)]
    parts, results = list[Node](), list[dict[str, Any]]()
    number = message.get("number")
    for part in others:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            calls.append(_call(part))
        elif kind == "tool_result":
            results.append(_result(str(part.get("tool_use_id")), _content(part.get("content"))[0], number))
        else:
            parts.append(tree(str(kind or "part"), part, Budget(_NODES_OF_MESSAGE)))
    if message.get("role") == "tool":
        results.append(_result(str(message.get("tool_call_id")), texts, number))
        texts = []
    rest = {name: value for name, value in message.items() if name not in _KNOWN}
    text = "\n".join(texts)
    return {
        "number": number,
        "time": message.get("timestamp"),
        "role": str(message.get("role", "?"))[:40],
        "name": str(message.get("name") or message.get("tool_call_id") or "")[:200],
        "text": text[:_LONGEST_MESSAGE],
        "more": max(0, len(text) - _LONGEST_MESSAGE),
        "calls": calls,
        "results": results,
        "parts": parts,
        "rest": [tree(name, value, Budget(_NODES_OF_MESSAGE)) for name, value in rest.items()],
        "new": False,
    }


def _content(content: Any) -> tuple[list[str], list[Any]]:
    """The texts of a message's content, and its other parts."""
    if content is None:
        return [], []
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in parts]
    others = [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]
    return [text for text in texts if isinstance(text, str)], others


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool; its arguments are usually JSON text."""
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    assert isinstance(function, dict)
    arguments = function.get("arguments", function.get("input", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "name": str(function.get("name", "tool"))[:200],
        "id": str(call.get("id", ""))[:200],
        "brief": _brief(arguments),
        "arguments": tree("arguments", arguments, Budget(_NODES_OF_MESSAGE)),
        "result": None,
    }


def _brief(arguments: Any) -> str:
    """The first arguments on one line."""
    pairs = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
    said = (f"{name}: {_word(value)}" if name else _word(value) for name, value in islice(pairs, _BRIEF))
    return ", ".join(said)[:_LONGEST_BRIEF]


def _word(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{len(value)} in {'{}' if isinstance(value, dict) else '[]'}"
    return value if isinstance(value, str) else json.dumps(value)


def _result(id: str, texts: list[str], number: Any) -> dict[str, Any]:
    """The answer of a tool; JSON is shown as a tree."""
    text, found = "\n".join(texts), None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text[:_LONGEST_RESULT]) if text[:1] in ("{", "[") else None
    return {
        "id": id[:200],
        "number": number,
        "brief": text[:_LONGEST_BRIEF],
        "text": text[:_LONGEST_MESSAGE],
        "more": max(0, len(text) - _LONGEST_MESSAGE),
        "tree": None if found is None else tree("result", found, Budget(_NODES_OF_MESSAGE)),
    }


def marked(text: str, words: str) -> Markup:
    """A text in which these words are marked; the beginning of a word is enough."""
    wanted = re.findall(r"\w+", words)[:_WORDS]
    parts = re.split(rf"(\b(?:{'|'.join(wanted)})\w*)", text, flags=re.IGNORECASE) if wanted else [text]
    return Markup().join(Markup("<mark>{}</mark>").format(part) if at % 2 else part for at, part in enumerate(parts))


def markdown(text: str) -> Markup:
    """A text with its Markdown as HTML, where HTML, images and addresses other than of the web are text.

    A long text is shown as it was written.
    """
    if len(text) > _LONGEST_MARKDOWN:
        return Markup('<p class="plain">{}</p>').format(text)
    return Markup(_MARKDOWN.render(text))


def _headings_and_cells(state: StateCore) -> None:
    """Make headings bold text, because the page has headings of its own, and align cells without styles."""
    for token in state.tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "p"
            if token.nesting > 0:
                token.attrSet("class", "heading")
        align = token.attrs.pop("style", None)
        if align == "text-align:right":
            token.attrSet("class", "number")
        for each in token.children or ():
            if each.type == "link_open":
                each.attrSet("rel", "noreferrer noopener")


class _Markdown(MarkdownIt):
    """Markdown whose links lead to the web, or to a mail address."""

    def validateLink(self, url: str) -> bool:
        return url.startswith(("https://", "http://", "mailto:"))


_MARKDOWN = _Markdown("commonmark", {"html": False, "breaks": True, "maxNesting": 20})
_MARKDOWN.enable(["table", "strikethrough"]).disable(["image", "reference"])
_MARKDOWN.core.ruler.push("headings_and_cells", _headings_and_cells)
